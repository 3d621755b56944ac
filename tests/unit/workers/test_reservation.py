"""Fractions of a GPU, which Ray packs onto one as long as they fit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.config import EngineConfig
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.workers import engines, learner_process, reservation
from slipstream.workers.engines import EngineProcess
from slipstream.workers.learner_process import LearnerProcess
from slipstream.workers.placement.config import Layout, PlacementConfig
from slipstream.workers.placement.plan import Node
from slipstream.workers.reservation import PlacementError, engine_share, learner_share, require_gpu, reserved
from tests.small import replace_in


@given(st.integers(1, 40), st.integers(1, 40))
def test_all_that_may_live_on_a_gpu_fits_its_bundle(num_engine_sets: int, num_learners: int) -> None:
    layout = Layout(num_engine_sets=num_engine_sets, num_learners=num_learners)
    together = num_engine_sets * engine_share(layout) + num_learners * learner_share(layout)
    assert together <= 1
    assert min(engine_share(layout), learner_share(layout)) > 0


def test_shares_are_those_of_rays_bookkeeping_and_a_layout_without_gpus_reserves_nothing() -> None:
    assert engine_share(Layout(num_engine_sets=7)) == pytest.approx(0.0857)  # 0.6 / 7, rounded down
    assert reserved(Layout()) is None


def test_a_plan_on_live_nodes_is_logged_with_their_addresses_and_numa_labels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(name="4f1c", address="10.0.0.7", num_gpus=2, labels={"slipstream.io/numa": "0-1"})
    monkeypatch.setattr(reservation, "ray_nodes", lambda: [node])
    monkeypatch.setattr(reservation, "_reserve", lambda *_: {})
    layout = Layout(num_engines=2, parallel=ParallelConfig(data=2), placement=PlacementConfig(gpus_per_node=2))
    caplog.set_level("INFO", logger="slipstream")
    reservation.reserve(layout)
    assert caplog.messages[0].startswith("placement: 1 x 2 GPUs, colocated\n")
    assert caplog.messages[0].endswith("\n10.0.0.7  -              L0 E0 (NUMA 0)  L1 E1 (NUMA 1)")


@pytest.fixture
def assigned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the GPUs that Ray says it gave to this process."""
    ids = ["3"]
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ids})
    fake = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(reservation, "ray", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("VLLM_RAY_BUNDLE_INDICES", raising=False)
    return ids


def test_a_learner_without_its_gpus_cuda_says_what_to_do(assigned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(PlacementError) as caught:
        LearnerProcess(LearnerConfig(), rank=2)
    assert str(caught.value) == (
        "learner rank 2 on node7 must compute on what Ray assigned to it, GPU 3, but torch sees no CUDA device and "
        f"would train on the CPU (CUDA_VISIBLE_DEVICES '3', torch {torch.__version__}, torch.version.cuda 13.0): "
        "install requirements/gpu.lock and a driver with which nvidia-smi lists the GPU, or set "
        "placement.logical_gpus: true if Ray's GPUs are only counted"
    )
    LearnerProcess(LearnerConfig(), rank=2, logical_gpus=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    LearnerProcess(LearnerConfig(), rank=2)


def test_an_engine_with_a_gpu_does_not_start_on_the_cpu(
    assigned: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def start(**more: Any) -> None:
        EngineProcess(tmp_path, config=EngineConfig(max_model_len=32, max_num_seqs=4), speculative_config=None, **more)

    message = r"^engine on .* Ray assigned to it, GPU 3, but vLLM would generate on 'cpu'"
    with pytest.raises(PlacementError, match=message):
        start()
    started: list[Any] = []
    replace_in(monkeypatch, engines.VllmEngine, __init__=lambda *_, **__: started.append("vLLM"))
    replace_in(monkeypatch, engines, node_address=lambda: "127.0.0.1")
    start(logical_gpus=True)
    assigned.clear()
    start()
    assert started == ["vLLM"] * 2
    # Over several nodes the engine's workers are actors, and hold its GPUs.
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "0,1")
    with pytest.raises(PlacementError, match="the GPUs of bundles 0,1, but"):
        start()


def test_a_learner_that_was_given_no_gpu_may_do_without_and_torch_is_not_asked_nor_is_anything_outside_ray(
    assigned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assigned.clear()
    monkeypatch.setattr(learner_process, "_without_cuda", lambda: pytest.fail("asked"))
    LearnerProcess(LearnerConfig())
    assigned.append("3")
    monkeypatch.setattr(reservation, "ray", SimpleNamespace(is_initialized=lambda: False))
    require_gpu("learner", problem=lambda: pytest.fail("asked"))
