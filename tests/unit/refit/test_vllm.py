"""The learner's half of vLLM's transfer, without a GPU: what it is opened with, and the order of the calls."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.refit.config import Channel, RefitConfig
from slipstream.refit.stream import WeightSource

TENSORS = [("embed", torch.ones(3, 2, dtype=torch.bfloat16)), ("norm", torch.zeros(2))]
SETTINGS = RefitConfig(channel=Channel.NCCL, bucket_mib=64 / 2**20, timeout_s=1.0)
vllm = pytest.importorskip("slipstream.refit.vllm")


def source(tensors: Any = TENSORS) -> WeightSource:
    return WeightSource(lambda: iter(tensors), model="policy")


def recording() -> Any:
    """`EngineControl` that notes its calls, but for the one that opens a channel."""
    calls: list[Any] = []
    return SimpleNamespace(
        calls=calls,
        aim=lambda *, is_draft: calls.append(("aim", is_draft)),
        start_weight_update=lambda: calls.append("start"),
        update_weights=lambda info: calls.append(("update", info)),
        finish_weight_update=lambda: calls.append("finish"),
    )


class RecordingTrainer:
    """vLLM's trainer engine, as `send_weights` uses its client and source; no GPU."""

    def __init__(self, engines: Any) -> None:
        self.engines = engines
        self.source: Any = None

    def send_weights(self) -> None:
        self.engines.start_weight_update()
        self.engines.update_weights({"names": [name for name, _ in self.source]})
        self.engines.finish_weight_update()

    def shutdown(self) -> None:
        self.engines.calls.append("shutdown")


def test_a_source_tells_vllm_what_it_then_gives() -> None:
    """vLLM's own check of metadata against iteration, which its sender runs on every parameter."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    adapted = vllm.SourceForVllm(source())
    meta = adapted.metadata()
    kinds = [(each.name, each.dtype, each.shape) for each in meta]
    assert kinds == [("embed", torch.bfloat16, (3, 2)), ("norm", torch.float32, (2,))]
    for _ in range(2):  # a fresh pass each time
        checked = list(NCCLTrainerWeightTransferEngine._checked_iter(adapted, meta))
        assert [name for name, _ in checked] == ["embed", "norm"]


def test_policy_and_draft_go_through_one_trainer_each_with_its_own_weights() -> None:
    engines = recording()
    sender = vllm.VllmSender(RecordingTrainer(engines), engines)
    sender.send(source(), is_draft=False)
    sender.send(source([("fc", torch.ones(1))]), is_draft=True)
    sender.close()
    assert engines.calls == [
        *[("aim", False), "start", ("update", {"names": ["embed", "norm"]}), "finish"],
        *[("aim", True), "start", ("update", {"names": ["fc"]}), "finish"],
        "shutdown",
    ]


def test_weights_that_are_not_finite_are_an_error_after_all_were_sent() -> None:
    """Earlier, the engines would wait for the rest in NCCL, which knows no timeout."""
    engines = recording()
    sender = vllm.VllmSender(RecordingTrainer(engines), engines)
    with pytest.raises(ValueError, match="weight a of the policy must be finite"):
        sender.send(source([("a", torch.tensor([float("nan")])), ("b", torch.ones(1))]), is_draft=False)
    assert ("update", {"names": ["a", "b"]}) in engines.calls


@pytest.mark.parametrize("fails_after", [0, 1, 2])
def test_after_a_failure_the_rest_of_the_weights_goes_by_once(fails_after: int) -> None:
    gone: list[str] = []

    def weights() -> Any:
        for name, tensor in TENSORS:
            yield name, tensor
            gone.append(name)

    class Failing(RecordingTrainer):
        def send_weights(self) -> None:
            if fails_after:
                given = iter(self.source)
                for _ in range(fails_after):
                    next(given)
            raise RuntimeError("an engine is gone")

    engines = recording()
    stream = WeightSource(weights, model="policy")
    stream.metas()
    gone.clear()
    with pytest.raises(RuntimeError, match="an engine is gone"):
        vllm.VllmSender(Failing(engines), engines).send(stream, is_draft=False)
    assert gone == ["embed", "norm"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What vLLM's trainer engines are opened with, in order; none is."""
    opened: list[Any] = []
    trainer = SimpleNamespace(trainer_init=lambda init, **_: opened.append(init))
    for name in ("NCCL", "IPC"):
        monkeypatch.setattr(vllm, f"{name}TrainerWeightTransferEngine", trainer)
    return opened


def test_nccl_joins_rank_0_and_every_worker_of_every_engine(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "get_open_port", lambda: 1234)
    vllm.open_nccl(SETTINGS, engines=SimpleNamespace(num_workers=4), source=source(), address="10.0.0.1")
    (info,) = opened
    assert asdict(info) == {
        **{"rank": 0, "master_address": "10.0.0.1", "master_port": 1234, "world_size": 5},
        **{"packed": True, "packed_buffer_size_bytes": 64, "packed_num_buffers": 2},
    }
    assert (info.backend, info.is_sender) == ("nccl", True)


@pytest.mark.parametrize(
    ("policy", "draft", "buffer"),
    [([(20,), (5,)], [], 64), ([(100,), (20,)], [(16,)], 100), ([(100,)], [(30,), (4,)], 120)],
    ids=["the settings'", "the policy's largest", "the draft's largest"],
)
def test_an_ipc_bucket_holds_the_largest_tensor(
    policy: list[tuple[int]], draft: list[tuple[int]], buffer: int, opened: list[Any]
) -> None:
    models = [(policy, torch.uint8), (draft, torch.float32)]
    sources = [source([(f"{i}", torch.empty(shape, dtype=d)) for i, shape in enumerate(own)]) for own, d in models]
    vllm.open_ipc(SETTINGS, engines=None, sources=sources, rank=3)
    (info,) = opened
    assert (info.packed, info.packed_buffer_size_bytes, info.rank, info.is_sender) == (True, buffer, 3, False)


def test_what_the_engines_are_told_is_what_vllms_workers_read() -> None:
    """The init info of vLLM's sender, shifted for the second engine of two with two workers each."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

    from slipstream.workers.calls import settings_of

    told = worker_init_payload(
        NCCLWeightTransferInitInfo(master_address="10.0.0.1", master_port=1, rank_offset=1, world_size=5, packed=True)
    )
    ranks = [NCCLWeightTransferInitInfo(**settings_of(told, index=i, num_workers_each=2)).rank_offset for i in (0, 1)]
    assert ranks == [1, 3]
    assert told["rank_offset"] == 1
    assert settings_of({"packed": True}, index=1, num_workers_each=2) == {"packed": True}  # IPC has no ranks
