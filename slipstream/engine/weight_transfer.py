"""How new weights enter a running vLLM engine: one weight-transfer engine of vLLM's own API, for every channel.

Files and gloo are received here. NCCL and IPC are left to vLLM's own engines. A channel is named with every update, so
one engine can be refitted over the network in training and from a directory afterwards.

vLLM's layerwise reload re-runs each layer's own loading and post-processing, so it works for the policy and for the
draft, on CPU and GPU, with sharded and prepacked layouts. Its bookkeeping is Python, a layer at a time: on a CPU, where
a plain policy's layers can be written directly, that takes a third of the time. Either way tensors are taken as they
come, and each rank of the engine cuts its own shard from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slipstream.engine import model_weights
from slipstream.engine.mtp_names import takes
from slipstream.engine.packed_experts import are_on_cpu
from slipstream.refit.config import Channel
from slipstream.refit.gloo import GlooGroup, GlooInit, GlooUpdate, receive
from slipstream.refit.snapshot import bytes_digest
from slipstream.refit.stream import WeightMeta

BACKEND = "slipstream"


@dataclass
class ChannelInit(WeightTransferInitInfo):
    """Which channel to join, and what it needs to know; files need nothing."""

    channel: Channel = Channel.SHARED_MEMORY
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class ChannelUpdate(WeightTransferUpdateInfo):
    """Over which channel weights come, and what it needs to know: for files `path`, a file or a directory of them."""

    channel: Channel = Channel.SHARED_MEMORY
    settings: dict[str, Any] = field(default_factory=dict)


class ChannelTransfer(WeightTransferEngine[ChannelInit, ChannelUpdate]):
    """Brings tensors under the checkpoint's names into whichever model, policy or draft, the running update targets."""

    init_info_cls = ChannelInit
    update_info_cls = ChannelUpdate
    received_digest = ""  # of the bytes that the last update read; empty where vLLM's own engines read them
    _group: GlooGroup | None = None
    _vllm: WeightTransferEngine | None = None
    _is_vllm_updating = False

    def init_transfer_engine(self, init_info: ChannelInit) -> None:
        """Join the channel; one that was joined before is left."""
        self.shutdown()
        channel = Channel(init_info.channel)
        if channel is Channel.GLOO:
            self._group = GlooGroup.join(GlooInit(**init_info.settings), worker=self.parallel_config.rank)
        elif channel in (Channel.NCCL, Channel.IPC):
            config = WeightTransferConfig(backend=channel.value)
            self._vllm = WeightTransferEngineFactory.create_engine(
                config, self.vllm_config, self.device, self._default_model
            )
            self._vllm.init_transfer_engine(self._vllm.parse_init_info(init_info.settings))

    def start_weight_update(self) -> None:
        """Nothing but to tidy up after an update that broke: how to load is known when the channel is."""
        self._finish_vllm()

    def receive_weights(self, update_info: ChannelUpdate) -> None:
        """Load what comes, and rebuild what the layers derive from their weights.

        Raises:
            FileNotFoundError: there are no files.
            ChannelBrokeError: the sender or another engine is gone, or stood still.
        """
        match Channel(update_info.channel):
            case Channel.SHARED_MEMORY:
                self._read(Path(update_info.settings["path"]))
            case Channel.GLOO:
                self._receive(GlooUpdate.of(update_info.settings))
            case _:
                self._receive_with_vllm(update_info.settings)

    def finish_weight_update(self) -> None:
        """Have vLLM's own engine finish; here one update brings all tensors."""
        self._finish_vllm()

    def shutdown(self) -> None:
        """Leave the channel."""
        self._finish_vllm()
        if self._group is not None:
            self._group.close()
        if self._vllm is not None:
            self._vllm.shutdown()
        self._group = self._vllm = None

    def _finish_vllm(self) -> None:
        if self._is_vllm_updating:
            assert self._vllm is not None
            self._is_vllm_updating = False
            self._vllm.finish_weight_update()
            self._vllm.reset_weight_update_target()

    def _read(self, path: Path) -> None:
        files = _files(path)
        maps = [torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8) for file in files]
        self.received_digest = bytes_digest(maps)
        opened = [safe_open(file, framework="pt") for file in files]
        names = [(name, file) for file in opened for name in file.keys() if takes(self.model, name)]  # noqa: SIM118
        tensors = [(name, file.get_tensor(name)) for name, file in names]
        loader = loader_of(self.model, self.model_config, [WeightMeta.of(name, tensor) for name, tensor in tensors])
        loader.take(tensors)
        loader.finish()

    def _receive(self, update: GlooUpdate) -> None:
        assert self._group is not None, "init_transfer_engine comes first"
        try:
            self._load(self._group, update)
        except BaseException:
            self.shutdown()  # or the sender would wait for this rank
            raise

    def _load(self, group: GlooGroup, update: GlooUpdate) -> None:
        loader = loader_of(self.model, self.model_config, update.metas)
        try:
            self.received_digest = receive(group, update, loader.take)
        except BaseException:
            loader.abandon()
            raise
        loader.finish()

    def _receive_with_vllm(self, settings: dict[str, Any]) -> None:
        assert self._vllm is not None, "init_transfer_engine comes first"
        if not self._is_vllm_updating:
            self._vllm.set_weight_update_target(self.model, self.model_config)
            self._vllm.start_weight_update()
            self._is_vllm_updating = True
        self.received_digest = ""
        self._vllm.receive_weights(self._vllm.parse_update_info(settings))


class Loader(Protocol):
    """Puts tensors into a model in whatever portions they come."""

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load some, or keep them until their layer's others come."""
        ...

    def finish(self) -> None:
        """All have come."""
        ...

    def abandon(self) -> None:
        """The rest will not come: the model has wrong weights, and can take others."""
        ...


def loader_of(model: nn.Module, model_config: Any, metas: Sequence[WeightMeta]) -> Loader:
    """The faster loader that can load these tensors.

    Raises:
        LookupError: there is none: what holds experts on a CPU cannot be reloaded by vLLM (`packed_experts`).
    """
    slots = _known_slots(model)
    shapes = {meta.name: torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta") for meta in metas}
    if model_weights.can_write(slots, shapes):
        return SlotLoader(slots)
    if any(map(are_on_cpu, model.modules())):
        raise LookupError("a model with experts on a CPU can only be refitted with all of its tensors, and no others")
    return ReloadLoader(model, model_config)


class SlotLoader:
    """Writes the model's parameters, each when all tensors of it have come: a layer's worth waits at most."""

    def __init__(self, slots: Sequence[model_weights.Slot]) -> None:
        self._by_name: dict[str, list[model_weights.Slot]] = {}
        for slot in slots:
            for part in slot.parts:
                self._by_name.setdefault(part.name, []).append(slot)
        self._waiting: dict[str, Tensor] = {}
        self._num_unwritten = len(slots)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """See `Loader.take`."""
        for name, tensor in tensors:
            self._waiting[name] = tensor
            for slot in self._by_name[name]:
                if all(part.name in self._waiting for part in slot.parts):
                    slot.write(self._waiting)
                    self._num_unwritten -= 1
                    for part in slot.parts:
                        del self._waiting[part.name]

    def finish(self) -> None:
        """See `Loader.finish`."""
        assert not self._num_unwritten, f"{self._num_unwritten} parameters were not written"

    def abandon(self) -> None:
        """See `Loader.abandon`: every parameter is as it was, or written."""


class ReloadLoader:
    """vLLM's own layerwise reload: it keeps a layer's tensors until the layer is complete."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        initialize_layerwise_reload(model)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """See `Loader.take`."""
        if not tensors:
            return
        with disable_mtp_completeness_check():  # a portion is never complete
            self._model.load_weights(tensors)  # type: ignore[operator]  # every vLLM model has it

    def finish(self) -> None:
        """See `Loader.finish`."""
        finalize_layerwise_reload(self._model, self._model_config)

    def abandon(self) -> None:
        """See `Loader.abandon`: vLLM makes layers of what came."""
        finalize_layerwise_reload(self._model, self._model_config)


def _known_slots(model: nn.Module) -> tuple[model_weights.Slot, ...]:
    """The model's parameters; none if it has some that only vLLM can write."""
    try:
        return model_weights.slots(model)
    except LookupError:
        return ()


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no weights to refit with: {path} holds no safetensors file")
    return files


def register() -> None:
    """Make the backend known to vLLM in this process; vLLM calls plugins more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ChannelTransfer)
