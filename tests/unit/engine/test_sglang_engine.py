"""The adapter of SGLang beside a stand-in for SGLang's process, and the parts of that process that need no SGLang."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import nn

from slipstream.config import ConfigError
from slipstream.engine import sglang_engine
from slipstream.engine.config import Backend, EngineConfig, SamplingConfig
from slipstream.engine.protocol import GroupRequest
from slipstream.engine.sglang_engine import PYTHON, SglangDiedError, SglangEngine, kv_cache_tokens, sglang_python
from slipstream.engine.sglang_process import draw, held_weights, write_weights
from slipstream.refit.config import EngineState, WeightFiles
from slipstream.refit.fingerprint import Turn, held_whole, part_fingerprints, weight_totals
from slipstream.types import Dtype, FinishReason, Prompt

CONFIG = EngineConfig(
    backend=Backend.SGLANG, max_model_len=16, max_num_seqs=4, dtype=Dtype.FLOAT32, kv_cache_gib=0.001, num_threads=3
)
SAMPLING = SamplingConfig(temperature=0.5, max_response_tokens=4)
PROMPT = Prompt(id="a", text="", token_ids=(2, 10), answer="")
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
STAND_IN = Path(__file__).with_name("sglang_stand_in.py")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SglangEngine]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"eos_token_id": 3}))
    command = [sys.executable, str(STAND_IN), str(tmp_path / "calls")]
    engine = SglangEngine(tmp_path, config=CONFIG, command=command)
    yield engine
    engine.close()
    assert calls(tmp_path)[-1] == "closed" or (tmp_path / "died").exists()


def calls(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / "calls").read_text().splitlines()]


def request(*seeds: int, index: int = 0) -> GroupRequest:
    return GroupRequest(index=index, prompt=PROMPT, seeds=seeds)


def test_sglang_starts_on_a_cpu_with_the_recipes_settings(engine: SglangEngine, tmp_path: Path) -> None:
    (start,) = calls(tmp_path)
    told = start["arguments"]
    assert (start["name"], told["device"], told["attention_backend"]) == ("start", "cpu", "torch_native")
    assert (told["model_path"], told["context_length"]) == (str(tmp_path), 16)
    assert (told["max_running_requests"], told["dtype"]) == (4, "float32")
    # 2 layers x 2 heads x 8 numbers, keys and values, 4 bytes each: 256 bytes a token.
    assert told["max_total_tokens"] == int(0.001 * 2**30) // 256
    facts = {"SGLang": "0.5.23", "attention": "torch_native", "KV cache tokens": str(told["max_total_tokens"])}
    assert engine.facts() == facts
    assert sglang_engine.sglang_environment(CONFIG)["OMP_NUM_THREADS"] == "3"


def test_a_models_own_head_size_and_missing_groups_count_in_the_cache() -> None:
    model = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "head_dim": 4}
    half = replace(CONFIG, dtype=Dtype.BFLOAT16, kv_cache_gib=1.0)
    assert kv_cache_tokens(model, half) == 2**30 // (2 * 2 * 4 * 2)


def test_groups_come_back_with_tokens_logprobs_and_ends(engine: SglangEngine, tmp_path: Path) -> None:
    engine.refit(WeightFiles(policy=Path("weights"), policy_version=6))
    portion = engine.generate([request(0, 1, index=4), request(3, index=9)], sampling=SAMPLING)
    params = calls(tmp_path)[-1]["arguments"]["sampling_params"]
    assert calls(tmp_path)[-1]["arguments"]["input_ids"] == [[2, 10]] * 3
    assert [each.pop("sampling_seed") for each in params] == [0, 1, 3]
    assert params == [{"temperature": 0.5, "max_new_tokens": 4, "stop_token_ids": [3]}] * 3
    assert [index for index, _ in portion.groups] == [4, 9]
    first, second = portion.groups[0][1].rollouts
    assert (first.token_ids, first.rollout_logprobs) == ((34, 36, 3), (-1.6910631656646729, -2.25, -0.5))
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert (second.policy_version, second.draft_version, second.prompt_id) == (6, None, "a")
    assert [each.token_ids for each in portion.groups[1][1].rollouts] == [(34, 58, 68, 99)]
    assert (portion.started_s, portion.ended_s, portion.num_preemptions, portion.acceptance) == (5.0, 7.5, 2, None)


def test_a_response_without_its_stop_token_or_that_sglang_cut_elsewhere_is_an_error(engine: SglangEngine) -> None:
    for limit in (3, 5):
        with pytest.raises(RuntimeError, match=r"must end a response by its stop token or length, got 4, length"):
            engine.generate([request(1)], sampling=replace(SAMPLING, max_response_tokens=limit))
    engine._stop_token_ids = (7,)
    with pytest.raises(RuntimeError, match=r"got 3, stop"):
        engine.generate([request(0)], sampling=SAMPLING)


def test_a_cut_distribution_or_a_full_sequence_is_refused(engine: SglangEngine) -> None:
    uncut = r"top_p and top_k must be 1.0 and 0 with engine.backend sglang"
    length = r"longest prompt 2 \+ max_response_tokens 13 \+ 2, got 16"
    for changes, message in (({"top_p": 0.9}, uncut), ({"top_k": 5}, uncut), ({"max_response_tokens": 13}, length)):
        with pytest.raises(ConfigError, match=message):
            engine.generate([request(1)], sampling=replace(SAMPLING, **changes))


def test_a_refit_sets_version_digest_and_counter(engine: SglangEngine, tmp_path: Path) -> None:
    state = engine.refit(WeightFiles(policy=Path("weights"), policy_version=5))
    assert calls(tmp_path)[-1] == {"name": "load", "arguments": {"path": "weights"}}
    assert state == EngineState(
        policy_version=5, policy_digest="00aa", draft_version=None, draft_digest="", num_prefix_cache_resets=1
    )
    assert engine.weight_dtypes(is_draft=False) == {"model.norm.weight": "float32"}
    assert engine.weight_fingerprints(is_draft=False, turn=Turn(index=1, count=8)) == {"model.norm.weight": 2**63 + 1}
    assert calls(tmp_path)[-1]["arguments"] == {"index": 1, "count": 8}
    assert engine.token_logprobs([(1, 2, 3)]) == [[-0.5, -1.25]]
    assert calls(tmp_path)[-1]["arguments"] == {"sequences": [[1, 2, 3]]}


def test_a_refused_refit_leaves_the_version_and_an_end_is_told(engine: SglangEngine, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"SGLang failed during load: RuntimeError: no weights"):
        engine.refit(WeightFiles(policy=Path("missing"), policy_version=5))
    assert engine.state().policy_version == 0
    (tmp_path / "died").touch()
    for _ in range(2):  # at its end, and afterwards
        with pytest.raises(SglangDiedError, match=r"ended during load"):
            engine.refit(WeightFiles(policy=Path("deadly"), policy_version=5))


def test_hidden_tensors_are_a_lookup_error(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "call", lambda name, **arguments: {"hidden": "experts"})
    with pytest.raises(LookupError, match=r"experts"):
        engine.weight_dtypes(is_draft=False)


def test_an_engine_that_would_speculate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.backend must be vllm here, got 'sglang'"):
        SglangEngine(Path("a"), config=CONFIG, speculative_config={"method": "ngram"})


def test_a_host_without_the_environment_is_told_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PYTHON, str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"run make sglang-setup"):
        sglang_python()
    (tmp_path / "python").touch()
    assert sglang_python() == tmp_path / "python"
    monkeypatch.delenv(PYTHON)
    monkeypatch.setattr(sglang_engine, "_CHECKOUT", tmp_path)
    with pytest.raises(ConfigError, match=r"engine.backend must be vllm on a host without SGLang's environment"):
        sglang_python()


def test_tokens_are_drawn_with_their_probabilities() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    rows = torch.arange(20000)
    for seeds, positions in ((rows * 2**40, torch.full_like(rows, 7)), (torch.full_like(rows, 2**62), rows)):
        drawn = draw(probs.expand(20000, -1), seeds, positions)
        counts = torch.bincount(drawn, minlength=5)
        assert counts[4] == 0
        assert chisquare(counts[:4], 20000 * probs[:4].double()).pvalue > 1e-3


def test_a_draw_depends_on_its_own_row_alone() -> None:
    probs = torch.rand(6, 50).softmax(-1)
    seeds, positions = torch.tensor([1, 2, 3, 1, 2, 3]), torch.tensor([4, 4, 4, 5, 5, 5])
    together = draw(probs, seeds, positions)
    assert together.dtype is torch.int32
    for row in range(6):
        only = slice(row, row + 1)
        assert draw(probs[only], seeds[only], positions[only]) == together[only]


class Fused(nn.Module):
    """Layers as SGLang holds them, by the attributes that are read of them."""

    def __init__(self, rows: int, **read: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(rows * 2.0).view(rows, 2))
        self.read = read

    def __getattr__(self, name: str) -> Any:
        return self.read[name] if name in self.__dict__.get("read", {}) else super().__getattr__(name)


def model(**others: nn.Module) -> nn.Module:
    layers = {
        "qkv_proj": Fused(8, num_heads=2, num_kv_heads=1, head_size=2),
        "gate_up_proj": Fused(6, output_sizes=[3, 3]),
        "embed_tokens": Fused(64, org_vocab_size=5),
        "norm": Fused(2),
    }
    return nn.ModuleDict({"model": nn.ModuleDict(layers | others)})


def written(held: nn.Module, path: Path, *turn: int) -> dict[str, Any]:
    """What SGLang's process writes of the weights of a model."""
    write_weights(
        SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=held))), str(path), *turn
    )
    return json.loads(path.read_text())


def test_fused_tensors_are_read_as_the_checkpoints() -> None:
    found = {each.parts[0].name: each.tensor for each in held_weights(model())}
    rows = {name.split(".")[1]: [int(row[0]) // 2 for row in tensor] for name, tensor in found.items()}
    fused = {"q_proj": [0, 1, 2, 3], "k_proj": [4, 5], "v_proj": [6, 7], "gate_proj": [0, 1, 2], "up_proj": [3, 4, 5]}
    assert rows == fused | {"embed_tokens": [0, 1, 2, 3, 4], "norm": [0, 1]}
    assert all(name.startswith("model.") and name.endswith(".weight") for name in found)


@pytest.mark.parametrize(
    "hidden", [{"qkv_proj": Fused(9, num_heads=2, num_kv_heads=1, head_size=2)}, {"experts": nn.Bilinear(2, 2, 2)}]
)
def test_tensors_in_an_unknown_order_are_told(hidden: dict[str, nn.Module], tmp_path: Path) -> None:
    (reason,) = written(model(**hidden), tmp_path / "out", 0, 1).values()
    assert reason.startswith(f"model.{next(iter(hidden))} h")


def test_a_turns_tensors_are_fingerprinted_where_they_are(tmp_path: Path) -> None:
    layers = nn.ModuleDict({"layers": nn.ModuleList([Fused(2), Fused(3)])})
    expected = held_whole("layers.1.weight", torch.arange(6.0).view(3, 2))
    fingerprints = weight_totals([part_fingerprints([expected])])
    found = written(layers, tmp_path / "out", 1, 2)
    assert found == {"dtypes": {"layers.1.weight": "float32"}, "fingerprints": fingerprints}
