"""Learner's half of vLLM's own weight transfer: NCCL between GPUs, CUDA IPC on a shared GPU.

vLLM's trainer engines send the weights and call the engines through `EngineControl`, which has the calls of vLLM's
`VLLMWeightSyncClient`. This module adds several engines in one group, drafts, and `WeightSource`. Neither channel
computes a digest of the bytes, so the refit gate compares every tensor at each refit.
Source: vllm/distributed/weight_transfer (nccl_engine.py, ipc_engine.py) of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VllmWeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.utils.network_utils import get_open_port

from slipstream.refit.channel import EngineControl
from slipstream.refit.config import RefitConfig
from slipstream.refit.stream import Sender, WeightSource


class SourceForVllm(VllmWeightSource):
    """Adapter of a `WeightSource` for vLLM's trainer engines."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._pass: Iterator[tuple[str, torch.Tensor]] | None = None

    def metadata(self) -> list[ParamMeta]:
        """Describe each tensor by name, type and shape."""
        return [ParamMeta(meta.name, meta.torch_dtype, meta.shape) for meta in self._source.metas()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._pass = iter(self._source)
        return self._pass

    def drain(self) -> None:
        """Iterate to the end of the pass, as the learner's other ranks do."""
        for _ in self._pass or iter(self._source):
            pass


class VllmSender(Sender):
    """Sender over one of vLLM's trainer engines."""

    def __init__(self, trainer: Any, engines: EngineControl) -> None:
        """Take vLLM's `TrainerWeightTransferEngine`."""
        self._trainer = trainer
        self._engines = engines

    def send(self, source: WeightSource, *, is_draft: bool) -> None:
        """Send all of `source` by vLLM's engine; raises as `Sender.send` does."""
        self._engines.aim(is_draft=is_draft)
        adapted = SourceForVllm(source)
        self._trainer.source = adapted
        try:
            self._trainer.send_weights()
        except BaseException:
            adapted.drain()
            raise
        source.require_finite()

    def close(self) -> None:
        """Leave the group."""
        self._trainer.shutdown()


def open_nccl(settings: RefitConfig, *, engines: EngineControl, source: WeightSource, address: str) -> VllmSender:
    """Form an NCCL group of the learner's rank 0 and every worker of every engine, at rank 0's address.

    A bucket may grow by the tensor that fills it.
    """
    init = NCCLTrainerInitInfo(
        rank=0,
        master_address=address,
        master_port=get_open_port(),
        world_size=1 + engines.num_workers,
        packed=True,
        packed_buffer_size_bytes=settings.bucket_bytes,
    )
    given = SourceForVllm(source)
    return VllmSender(NCCLTrainerWeightTransferEngine.trainer_init(init, client=engines, source=given), engines)


def open_ipc(
    settings: RefitConfig, *, engines: EngineControl, sources: Sequence[WeightSource], rank: int
) -> VllmSender:
    """Map a bucket of each learner rank into the engine worker on the same GPU; it holds any tensor of `sources`."""
    size = max([settings.bucket_bytes, *(meta.num_bytes for source in sources for meta in source.metas())])
    init = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
    given = SourceForVllm(sources[0])
    return VllmSender(IPCTrainerWeightTransferEngine.trainer_init(init, client=engines, source=given), engines)
