"""The way of new weights into a running vLLM engine, and the weights that its model really computes with.

One weight-transfer engine of vLLM's own API serves every channel. Files and gloo are received here; NCCL and IPC are
left to vLLM's own engines. A channel is named with every update, so one engine can be refitted over the network in
training and from a directory afterwards.

vLLM's layerwise reload re-runs each layer's own loading and post-processing, so it works for the policy and for the
draft, on CPU and GPU, with sharded and prepacked layouts. Its bookkeeping is Python, a layer at a time: on a CPU, where
a plain policy's layers can be written directly, that takes a third of the time. Either way tensors are taken as they
come, and each rank of the engine cuts its own shard from them.

A model's weights are read, and on a CPU written, in whatever layout it keeps them. Fused layers are cut into the
checkpoint's tensors, tensor-parallel shards are named by the slice they hold, and weights that a CPU backend has packed
out of sight are recovered by multiplying with the identity, which is exact: every sum has one term.

vLLM packs a layer's experts when it first loads them, and not when it reloads: its own reload would leave them in the
checkpoint's order for a kernel that takes it for the packed one, and say nothing. So they are written here, packed
anew. Packing moves numbers and computes none; where it moves them is found by packing their indices, so experts are
read exactly, in whatever order.

The layer of a MiMo that predicts the token after the next lies in the policy's checkpoint; an engine loads it as a
draft model of its own, which borrows the policy's embeddings and output layer. So the policy never takes the layer's
tensors, and the draft takes no others: an embedding that came with them would overwrite the policy's.

Legend: `E` experts, `H` hidden size, `F` width of an expert, `P` the same padded to what the kernel takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.mimo_mtp import MiMoMTP
from vllm.platforms import current_platform

from slipstream.refit.config import Channel
from slipstream.refit.fingerprint import HeldWeights, WeightPart
from slipstream.refit.snapshot import bytes_digest
from slipstream.refit.stream import GlooGroup, GlooInit, GlooUpdate, WeightMeta, receive

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_W13, _W2 = "w13_weight", "w2_weight"  # a layer of experts: gate and up, down
_RENAMED = {"draft_id_to_target_id": "d2t"}  # of the model itself: by vLLM's EAGLE-3 drafts, when they load

_INTEGERS = {2: torch.int16, 4: torch.int32}
_LAYERS = "model.mtp_layers."
_BLOCK = "mtp_block."  # what vLLM puts around the layer between the norms

BACKEND = "slipstream"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One parameter of a vLLM model, and the checkpoint's parts that lie in it one below the other."""

    module: nn.Module
    parameter: str
    parts: tuple[WeightPart, ...]
    shape: tuple[int, int] | None = None  # [outputs, inputs] of a layer that multiplies; None of others

    def read(self) -> HeldWeights:
        """The parts as the model computes with them, without what pads them.

        Raises:
            LookupError: the backend hides them.
            RuntimeError: a layer multiplies with another weight than it holds.
        """
        held: Tensor = getattr(self.module, self.parameter)
        if isinstance(self.module, RoutedExperts):
            held = read_experts(self.module, self.parameter)
        if self.shape is not None and hasattr(self.module, "cpu_linear"):
            packed = self._recovered(self.shape[1])
            if held.numel() and not torch.equal(held, packed):
                raise RuntimeError(f"{self.parts[0].name} must be what its layer multiplies with, got another weight")
            held = packed
        if not held.numel():
            raise LookupError(f"{self.parts[0].name} is empty: its backend hides it")
        if self.parts[0].dim == 1:
            return HeldWeights(tensor=held, parts=self.parts, split=lambda rows: [rows])
        lengths = [part.length for part in self.parts]
        return HeldWeights(tensor=held[: sum(lengths)], parts=self.parts, split=lambda rows: rows.split(lengths))

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the parameter by whole tensors of a checkpoint, and have a layer that packs it do so anew."""
        cuts = [tensors[part.name].narrow(part.dim, part.start, part.length) for part in self.parts]
        rows = cuts[0] if len(cuts) == 1 else torch.cat(cuts)
        if isinstance(self.module, RoutedExperts):
            write_experts(self.module, self.parameter, rows)
            return
        held: nn.Parameter = getattr(self.module, self.parameter)
        if held.numel():
            held.data[: len(rows)].copy_(rows)
        else:
            own_dtype = rows.to(held.dtype, copy=True, memory_format=torch.contiguous_format)
            setattr(self.module, self.parameter, nn.Parameter(own_dtype, requires_grad=False))
        if self.shape is not None:
            self.module.quant_method.process_weights_after_loading(self.module)  # type: ignore[operator,union-attr]

    def _recovered(self, num_inputs: int) -> Tensor:
        """[outputs, inputs]: the layer's answer to the identity matrix."""
        weight: Tensor = getattr(self.module, self.parameter)
        return self.module.cpu_linear(_identity(num_inputs, weight.dtype), weight, None).t()  # type: ignore[operator]


@cache
def slots(
    model: nn.Module, *, rename: tuple[tuple[str, str], ...] = (), without: nn.Module | None = None
) -> tuple[Slot, ...]:
    """Every parameter of the model, in the parts that this rank holds; they stay, whatever is loaded into them.

    Args:
        rename: prefixes of the model's names, and what the checkpoint has instead of each; the first that fits counts.
        without: a model whose modules do not count: a draft borrows the policy's embeddings.
    Raises:
        LookupError: a module has parameters that this function does not know.
    """
    borrowed = set() if without is None else {id(module) for module in without.modules()}
    found: list[Slot] = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own and id(module) not in borrowed:
            found += _module_slots(_renamed(path, rename), module, own)
    return tuple(found)


def _renamed(path: str, rename: tuple[tuple[str, str], ...]) -> str:
    for old, new in rename:
        if path.startswith(old):
            return new + path.removeprefix(old)
    return path


def can_write(slots: Sequence[Slot], tensors: Mapping[str, Tensor]) -> bool:
    """Return True if `Slot.write` does all that vLLM's own reload would: plain layers on a CPU, and tensors that fit.

    A GPU's kernels may have derived more from a weight than its layer tells; there vLLM's reload it is.
    """
    names = {part.name for slot in slots for part in slot.parts}
    return (
        current_platform.is_cpu()
        and names == tensors.keys()
        and all(_is_plain(slot.module) for slot in slots)
        and all(part.start + part.length <= tensors[part.name].shape[part.dim] for slot in slots for part in slot.parts)
    )


def _is_plain(module: nn.Module) -> bool:
    if type(module) is RMSNorm or are_on_cpu(module):
        return True
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    skips = getattr(module, "_cpu_skip_gemm_dispatch", False)  # whose weight others have taken apart
    return type(getattr(module, "quant_method", None)) in methods and not skips


def _module_slots(path: str, module: nn.Module, own: dict[str, nn.Parameter]) -> list[Slot]:
    if isinstance(module, RoutedExperts):
        parts_of = expert_parts(path, module, own)
        return [Slot(module=module, parameter=name, parts=parts) for name, parts in parts_of.items()]
    if isinstance(module, LinearBase):
        if "weight" not in own or own.keys() - {"weight", "bias"}:
            raise LookupError(f"{path} holds {sorted(own)}, not one weight and perhaps its bias")
        shape = _linear_shape(module)
        parts = _linear_parts(path, module, shape, _dtype(own["weight"]))
        weight = Slot(module=module, parameter="weight", parts=parts, shape=shape)
        if "bias" not in own:
            return [weight]
        return [weight, Slot(module=module, parameter="bias", parts=_of_bias(parts, own["bias"]))]
    if isinstance(module, VocabParallelEmbedding):
        held = module.shard_indices
        start, stop = held.org_vocab_start_index, held.org_vocab_end_index
        shape = (module.num_embeddings_per_partition, module.embedding_dim)
        part = WeightPart(name=f"{path}.weight", dim=0, start=start, length=stop - start, dtype=_dtype(own["weight"]))
        return [Slot(module=module, parameter="weight", parts=(part,), shape=shape)]
    return [
        Slot(
            module=module,
            parameter=name,
            parts=(WeightPart(name=_whole_name(path, name), dim=0, start=0, length=len(tensor), dtype=_dtype(tensor)),),
        )
        for name, tensor in own.items()
    ]


def _of_bias(parts: tuple[WeightPart, ...], bias: Tensor) -> tuple[WeightPart, ...]:
    """A number an output, in the same parts as the weight's rows.

    Raises:
        LookupError: the rows are cut by input, so that each rank holds all of them.
    """
    if any(part.dim for part in parts):
        raise LookupError(f"{parts[0].name} is split by its inputs, and has a bias")
    return tuple(replace(part, name=part.name.removesuffix("weight") + "bias", dtype=_dtype(bias)) for part in parts)


def _whole_name(path: str, name: str) -> str:
    """The checkpoint's name of a parameter that is there whole."""
    return f"{path}.{name}" if path else _RENAMED.get(name, name)


def _linear_shape(module: LinearBase) -> tuple[int, int]:
    """[outputs, inputs] of this rank."""
    if isinstance(module, RowParallelLinear):
        return module.output_size, module.input_size_per_partition
    if isinstance(module, ColumnParallelLinear):
        return module.output_size_per_partition, module.input_size
    return module.output_size, module.input_size


def _linear_parts(path: str, module: LinearBase, shape: tuple[int, int], dtype: str) -> tuple[WeightPart, ...]:
    rank, parent = module.tp_rank, path.rpartition(".")[0]
    if isinstance(module, QKVParallelLinear):
        kv_rank = rank // module.num_kv_head_replicas
        sizes = [module.num_heads * module.head_size] + [module.num_kv_heads * module.head_size] * 2
        starts = [rank * sizes[0], kv_rank * sizes[1], kv_rank * sizes[2]]
        return _stacked(path, [f"{parent}.{name}.weight" for name in _QKV], sizes, starts, shape, dtype)
    if isinstance(module, MergedColumnParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        starts = [rank * size for size in sizes]
        return _stacked(path, [f"{parent}.{name}.weight" for name in _GATE_UP], sizes, starts, shape, dtype)
    if isinstance(module, RowParallelLinear):
        width = shape[1]
        return (WeightPart(name=f"{path}.weight", dim=1, start=rank * width, length=width, dtype=dtype),)
    start = rank * shape[0] if isinstance(module, ColumnParallelLinear) else 0
    return (WeightPart(name=f"{path}.weight", dim=0, start=start, length=shape[0], dtype=dtype),)


def _stacked(
    path: str, names: list[str], sizes: list[int], starts: list[int], shape: tuple[int, int], dtype: str
) -> tuple[WeightPart, ...]:
    if len(names) != len(sizes) or sum(sizes) != shape[0]:
        raise LookupError(f"{path}: {names} do not make up {shape}: rows {sizes}")
    return tuple(
        WeightPart(name=name, dim=0, start=start, length=size, dtype=dtype)
        for name, size, start in zip(names, sizes, starts, strict=True)
    )


@cache
def _identity(size: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def are_on_cpu(module: nn.Module) -> bool:
    """Return True if the module holds experts in the order of a CPU's kernel."""
    return isinstance(module, RoutedExperts) and isinstance(_kernel(module), CPUUnquantizedExperts)


def expert_parts(path: str, module: RoutedExperts, own: dict[str, nn.Parameter]) -> dict[str, tuple[WeightPart, ...]]:
    """The checkpoint's tensors in each parameter, one below the other.

    Raises:
        LookupError: experts that this module does not know: split, quantized, with a bias, or another device's.
    """
    config, kernel = module.moe_config, _kernel(module)
    is_whole = module.local_num_experts == module.global_num_experts and config.tp_size == 1
    if not are_on_cpu(module) or kernel._use_zentorch or set(own) != {_W13, _W2} or not is_whole:
        raise LookupError(f"{path} holds {sorted(own)} in an order that only vLLM knows")
    name = path.removesuffix(".routed_experts")
    dtype = str(own[_W2].dtype).removeprefix("torch.")

    def part(expert: int, projection: str, length: int) -> WeightPart:
        return WeightPart(name=f"{name}.{expert}.{projection}.weight", dim=0, start=0, length=length, dtype=dtype)

    experts, width = range(module.global_num_experts), _width(module)
    return {
        _W13: tuple(part(expert, each, width) for expert in experts for each in _GATE_UP),
        _W2: tuple(part(expert, "down_proj", module.hidden_size) for expert in experts),
    }


def read_experts(module: RoutedExperts, parameter: str) -> Tensor:
    """[rows of all experts, columns] in the checkpoint's order: [E * 2 F, H] of gate and up, [E * H, F] of down."""
    packed: Tensor = getattr(module, parameter).detach()
    order = _order(packed.shape[1], packed.shape[2], packed.dtype, _kernel(module).isa)
    plain = torch.empty_like(packed).flatten(1)
    plain[:, order] = packed.flatten(1)
    width = _width(module)
    if parameter == _W2:
        return plain.view(packed.shape)[..., :width].flatten(0, 1)
    return plain.view(len(packed), 2, -1, packed.shape[2])[:, :, :width].flatten(0, 2)


def write_experts(module: RoutedExperts, parameter: str, rows: Tensor) -> None:
    """The inverse of `read_experts`."""
    packed: Tensor = getattr(module, parameter).data
    plain, width = torch.zeros_like(packed), _width(module)
    if parameter == _W2:
        plain[..., :width] = rows.view(len(packed), -1, width)
    else:
        halves_E2PH = plain.view(len(packed), 2, -1, packed.shape[2])
        halves_E2PH[:, :, :width] = rows.view(len(packed), 2, width, -1)
    packed.copy_(cpu_prepack_moe_weight(plain, _kernel(module).isa))


def _kernel(module: RoutedExperts) -> Any:
    kernel: Any = module.quant_method.moe_kernel
    return None if kernel is None else kernel.fused_experts


def _width(module: RoutedExperts) -> int:
    width = module.moe_config.intermediate_size_per_partition_unpadded
    assert width is not None
    return width


@cache
def _order(num_rows: int, num_columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """[rows * columns]: the index in an expert's matrix of each number of its packed form.

    Indices are packed as the bits of numbers: of 16 bits, in two halves.
    """
    bits = 8 * dtype.itemsize
    indices = torch.arange(num_rows * num_columns)
    order = torch.zeros_like(indices)
    for shift in range(0, 32, bits):
        half = (indices >> shift).to(_INTEGERS[dtype.itemsize]).view(dtype).view(1, num_rows, num_columns)
        packed = cpu_prepack_moe_weight(half, isa).view(_INTEGERS[dtype.itemsize]).flatten().long()
        order += (packed & ((1 << bits) - 1)) << shift
    assert torch.equal(order.sort().values, indices), "packing must move numbers, and change none"
    return order


def takes(model: nn.Module, name: str) -> bool:
    """Return True if a tensor of a checkpoint belongs into this model, policy or draft."""
    return name.startswith(_LAYERS) == isinstance(model, MiMoMTP)


def draft_names(draft: nn.Module) -> tuple[tuple[str, str], ...]:
    """Prefixes of an MTP draft's names in vLLM, and what a checkpoint has instead of each; none of another draft."""
    if not isinstance(draft, MiMoMTP):
        return ()
    pairs = [(f"{_LAYERS}{key}.", f"{_LAYERS}{index}.") for index, key in enumerate(draft.model.mtp_layers)]
    return tuple((held + inside, saved) for held, saved in pairs for inside in (_BLOCK, ""))


@dataclass
class ChannelInit(WeightTransferInitInfo):
    """The channel to join, and what it needs to know; files need nothing."""

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


def loader_of(model: nn.Module, model_config: Any, metas: Sequence[WeightMeta]) -> SlotLoader | ReloadLoader:
    """The faster loader that can load these tensors.

    Raises:
        LookupError: there is none: what holds experts on a CPU cannot be reloaded by vLLM (this module).
    """
    try:
        known = slots(model)
    except LookupError:
        known = ()  # some parameters only vLLM can write
    shapes = {meta.name: torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta") for meta in metas}
    if can_write(known, shapes):
        return SlotLoader(known)
    if any(map(are_on_cpu, model.modules())):
        raise LookupError("a model with experts on a CPU can only be refitted with all of its tensors, and no others")
    return ReloadLoader(model, model_config)


class SlotLoader:
    """Writes the model's parameters, each when all tensors of it have come: a layer's worth waits at most."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._by_name: dict[str, list[Slot]] = {}
        for slot in slots:
            for part in slot.parts:
                self._by_name.setdefault(part.name, []).append(slot)
        self._waiting: dict[str, Tensor] = {}
        self._num_unwritten = len(slots)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load some, or keep them until their layer's others come."""
        for name, tensor in tensors:
            self._waiting[name] = tensor
            for slot in self._by_name[name]:
                if all(part.name in self._waiting for part in slot.parts):
                    slot.write(self._waiting)
                    self._num_unwritten -= 1
                    for part in slot.parts:
                        del self._waiting[part.name]

    def finish(self) -> None:
        """Check that all have come."""
        assert not self._num_unwritten, f"{self._num_unwritten} parameters were not written"

    def abandon(self) -> None:
        """The rest will not come: every parameter is as it was, or written; the model can take others."""


class ReloadLoader:
    """vLLM's own layerwise reload: it keeps a layer's tensors until the layer is complete."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        initialize_layerwise_reload(model)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load some; vLLM keeps them until their layer's others come."""
        if not tensors:
            return
        with disable_mtp_completeness_check():  # a portion is never complete
            self._model.load_weights(tensors)  # type: ignore[operator]  # every vLLM model has it

    def finish(self) -> None:
        """Have vLLM make layers of what came: all, or of an update that broke a part."""
        finalize_layerwise_reload(self._model, self._model_config)

    abandon = finish


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no weights to refit with: {path} holds no safetensors file")
    return files


def register() -> None:
    """Make the backend known to vLLM in this process; vLLM calls plugins more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ChannelTransfer)
