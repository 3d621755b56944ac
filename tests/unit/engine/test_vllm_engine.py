"""Arguments that vLLM gets of the device, and paths that it finds."""

from __future__ import annotations

import glob
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.engine.config import EngineConfig
from slipstream.engine.vllm_engine import OWN_NORMS, VllmEngine, engine_arguments, loadable, process_environment
from slipstream.types import Dtype

GPU = EngineConfig(max_model_len=8, max_num_seqs=1)
CPU = EngineConfig(max_model_len=8, max_num_seqs=1, kv_cache_gib=1.0)


@pytest.mark.parametrize("can_sleep", [False, True])
def test_on_a_gpu_an_engine_in_flight_has_no_step_under_way_between_two_others(can_sleep: bool) -> None:
    plain, flying = (engine_arguments(GPU, is_in_flight=each, can_sleep=can_sleep) for each in (False, True))
    assert "async_scheduling" not in plain
    assert flying == plain | {"async_scheduling": False}


@pytest.mark.parametrize(
    ("config", "asked", "added"),
    [
        (GPU, {"can_sleep": True}, {"enable_sleep_mode": True}),
        (CPU, {"can_sleep": True}, {}),
        (CPU, {"is_in_flight": True}, {}),  # vLLM never schedules ahead there
        (GPU, {"returns_routes": True}, {"enable_return_routed_experts": True}),
    ],
    ids=["sleep on a GPU", "sleep on a CPU", "in flight on a CPU", "routes"],
)
def test_vllm_is_told_what_an_engine_is_asked_for_where_the_device_has_it(
    config: EngineConfig, asked: dict[str, bool], added: dict[str, bool]
) -> None:
    plain = engine_arguments(config, is_in_flight=False)
    assert engine_arguments(config, **{"is_in_flight": False, **asked}) == plain | added
    assert {"enable_sleep_mode", "async_scheduling", "enable_return_routed_experts"}.isdisjoint(plain)
    assert plain.get("gpu_memory_utilization") == (0.6 if config is GPU else None)


@pytest.mark.parametrize("name", ["a [b]", "c*", "d?"])
def test_a_model_is_found_by_a_glob_pattern_whatever_its_path(tmp_path: Path, name: str) -> None:
    model = tmp_path / name / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    with loadable(model) as path:
        (found,) = glob.glob(f"{path}/*.safetensors")
        assert Path(found).resolve() == (model / "model.safetensors").resolve()
    assert not path.exists()
    with loadable(tmp_path) as path:  # nothing in it stands for anything else
        assert path == tmp_path
    assert model.is_dir()


@pytest.mark.parametrize(
    ("config", "takes_them"),
    [
        (replace(CPU, dtype=Dtype.FLOAT32, enforce_eager=True), True),
        (replace(CPU, dtype=Dtype.FLOAT32, enforce_eager=False), False),
        (replace(CPU, dtype=Dtype.BFLOAT16, enforce_eager=True), True),
        (replace(GPU, dtype=Dtype.FLOAT32, enforce_eager=True), False),
    ],
)
def test_only_eager_engines_on_cpus_take_the_plugins_norms(config: EngineConfig, takes_them: bool) -> None:
    assert engine_arguments(config, is_in_flight=False).get("ir_op_priority") == (OWN_NORMS if takes_them else None)


def test_vllm_logs_errors_alone_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert process_environment(GPU)["VLLM_LOGGING_LEVEL"] == "ERROR"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert process_environment(GPU)["VLLM_LOGGING_LEVEL"] == "INFO"


class FakeLlm:
    """Notes what vLLM is started with and what its workers are asked."""

    def __init__(self, model: str, *, speculative_config: dict[str, Any], **others: Any) -> None:
        self.told, self.others, self.asked = speculative_config, others, list[str]()
        runner = SimpleNamespace(
            use_v2_model_runner=self.is_v2,
            compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE")),
            cache_config=SimpleNamespace(kv_cache_size_tokens=0),
        )
        core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(vllm_config=runner)))
        self.llm_engine = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[]), engine_core=core)

    is_v2, reset_prefix_cache = False, bool

    def collective_rpc(self, method: str) -> list[Any]:
        self.asked.append(method)
        return [()] if method == "attention_backends" else []


@pytest.mark.parametrize(
    ("config", "is_v2", "method", "told", "asks"),
    [
        (CPU, False, "block", "standard", True),
        (CPU, False, "standard", "standard", False),
        (GPU, True, "block", "block", False),
        (GPU, False, "block", None, False),
    ],
)
def test_blocks_are_verified_by_whom_can(
    config: EngineConfig, is_v2: bool, method: str, told: str | None, asks: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """On a CPU the plugin's sampler is asked, on a GPU vLLM's second runner is told; its first one is refused."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    monkeypatch.setattr(FakeLlm, "is_v2", is_v2)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeLlm))
    monkeypatch.setitem(sys.modules, "slipstream.engine.weight_transfer", SimpleNamespace(BACKEND="slipstream"))
    monkeypatch.setattr("slipstream.engine.vllm_engine.StepCounts", lambda llm: None)
    monkeypatch.setattr("slipstream.engine.vllm_engine.os.environ", {})
    speculative = {"method": "eagle3", "rejection_sample_method": method}
    if told is None:
        with pytest.raises(ConfigError, match=r"draft\.verification must be token .* got 'block'"):
            VllmEngine(tmp_path, config=config, speculative_config=speculative)
        return
    llm = VllmEngine(tmp_path, config=config, speculative_config=speculative, returns_routes=is_v2)._llm
    assert llm.others.get("enable_return_routed_experts", False) == is_v2
    assert llm.told == {"method": "eagle3", "rejection_sample_method": told}
    assert ("verify_in_blocks" in llm.asked) == asks
