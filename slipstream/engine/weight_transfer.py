"""Loading of new weights into a running vLLM engine, and reading of the weights that its model computes with.

One weight-transfer engine of vLLM's API serves every channel. Files and gloo are received here; NCCL and IPC are left
to vLLM's own engines. Every update names its channel, so an engine can be refitted over the network during training
and from a directory afterwards.

vLLM's layerwise reload runs each layer's own loading and post-processing again. The reload works for policy and draft,
on CPU and GPU, with sharded and prepacked layouts, but spends time on each layer in Python. On a CPU the layers of a
plain policy can be written directly, in a third of the time. Both loaders take tensors one at a time, and each rank of
the engine cuts its shard from a tensor.

A model's weights are read, and on a CPU written, in the model's layout. Fused layers are cut into the checkpoint's
tensors, and tensor-parallel shards are named by their slice. Weights that a CPU backend has packed are recovered by
multiplication with the identity, which is exact, because every sum has one term.

vLLM packs a layer's experts at the first load but not at a reload. After a reload the kernel would read experts in the
checkpoint's order as packed ones, without an error. Experts are therefore packed and written here. Packing moves
numbers and computes none. The packed order is found by packing indices, so experts are read exactly.

A MiMo's layer that predicts the token after the next is stored in the policy's checkpoint. An engine loads that layer
as a draft model, which borrows the policy's embeddings and output layer. The policy therefore never loads the layer's
tensors, and the draft loads no others: an embedding among them would overwrite the policy's.

Legend: `E` experts, `H` hidden size, `F` width of an expert, `P` width of an expert padded for the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import LoadConfig, ModelConfig
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
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.mimo_mtp import MiMoMTP
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from slipstream.refit.config import Channel, WeightFormat
from slipstream.refit.fingerprint import HeldWeights, WeightPart
from slipstream.refit.quantization import LOAD_FORMAT, SCALE, quantized
from slipstream.refit.stream import GlooGroup, WeightMeta, bytes_digest, receive
from slipstream.storage import safetensors_files

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_W13, _W2 = "w13_weight", "w2_weight"  # a layer of experts: gate and up, down
_MAKES_COPIES = "_build_fused_kv_buffers"  # vLLM's method

OF_READERS = (("model.", ""),)
"""Prefix of the names of drafts that read hidden states, in vLLM alone."""

_RENAMED = {"draft_id_to_target_id": "d2t"}  # vLLM's name in an EAGLE-3 draft -> the checkpoint's

_INTEGERS = {2: torch.int16, 4: torch.int32}
_LAYERS = "model.mtp_layers."
_BLOCK = "mtp_block."  # vLLM's prefix of the layer between the norms

BACKEND = "slipstream"
_WEIGHT, _SCALE = "weight", "weight" + SCALE


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A parameter of a vLLM model, and the parts of the checkpoint's tensors in its rows."""

    module: nn.Module
    parameter: str
    parts: tuple[WeightPart, ...]
    num_inputs: int | None = None  # of a matrix [outputs, inputs]; None for other parameters

    def read(self) -> tuple[HeldWeights, ...]:
        """Read the parts that the model computes with, without padding; raises LookupError if they are hidden."""
        held: Tensor = getattr(self.module, self.parameter)
        if isinstance(self.module, RoutedExperts):
            held = read_experts(self.module, self.parameter)
        if self.num_inputs is not None and hasattr(self.module, "cpu_linear"):
            identity = _identity(self.num_inputs, held.dtype)
            packed = self.module.cpu_linear(identity, held, None).t()  # type: ignore[operator]
            if held.numel() and not torch.equal(held, packed):
                raise RuntimeError(f"{self.parts[0].name} must be what its layer multiplies with, got another weight")
            held = packed
        if not held.numel():
            raise LookupError(f"{self.parts[0].name} is empty: its backend hides it")
        return (_held(held, self.parts),)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the parameter by whole tensors of a checkpoint, and pack it again where the layer packs."""
        rows = _cut(tensors, self.parts)
        if isinstance(self.module, RoutedExperts):
            write_experts(self.module, self.parameter, rows)
            return
        held: nn.Parameter = getattr(self.module, self.parameter)
        if held.numel():
            held.data[: len(rows)].copy_(rows)
        else:
            own_dtype = rows.to(held.dtype, copy=True, memory_format=torch.contiguous_format)
            setattr(self.module, self.parameter, nn.Parameter(own_dtype, requires_grad=False))
        if self.num_inputs is not None:
            self.module.quant_method.process_weights_after_loading(self.module)  # type: ignore[operator,union-attr]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedSlot:
    """A matrix of a vLLM model in 8 bits with a scale for each row, which are written together.

    On a CPU the kernel packs the values into memory of its own, with a pointer to the scales. vLLM's layerwise reload
    would free those under the pointer, so the layer gets both anew here.
    """

    module: LinearBase
    parts: tuple[WeightPart, ...]  # of the values, then of the scales
    num_inputs: int

    def read(self) -> tuple[HeldWeights, ...]:
        """Read values and scales that the layer multiplies with."""
        scale: Tensor = self.module.weight_scale  # type: ignore[assignment]
        values: Tensor | None = self.module.weight  # type: ignore[assignment]
        values = self._recovered(scale) if values is None else values.t()
        half = len(self.parts) // 2
        return _held(values, self.parts[:half]), _held(scale.detach(), self.parts[half:])

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace values and scales by whole tensors of a checkpoint, and have the kernel pack them."""
        half = len(self.parts) // 2
        for name, parts in ((_WEIGHT, self.parts[:half]), (_SCALE, self.parts[half:])):
            fresh = _cut(tensors, parts).clone(memory_format=torch.contiguous_format)
            setattr(self.module, name, nn.Parameter(fresh, requires_grad=False))
        with set_default_torch_dtype(self.module.params_dtype):  # the kernel's output, as where vLLM loads a model
            self.module.quant_method.process_weights_after_loading(self.module)

    def _recovered(self, scale: Tensor) -> Tensor:
        """Compute the values [outputs, inputs] as the layer's product with the identity: a sum of one term.

        In bfloat16, cut to 8 bits, a value up to 64 is known within a half.
        """
        identity = _identity(self.num_inputs, self.module.params_dtype)
        product: Tensor = self.module.quant_method.apply(self.module, identity, None)
        return (product.t().float() / scale).round().to(torch.int8)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextSlot:
    """vLLM's copy of a DFlash layer's tensors, by which the policy's hidden states become the layer's keys and values.

    Block tokens are multiplied with the layer's own tensors. A copy has the parts of its original, so a copy with other
    values is two values of one tensor: the fingerprints refuse it. vLLM makes copies at each load, which at a reload
    would be of weights that a CPU's kernel has packed away, and beside angles of the rotation that have no storage.
    """

    module: DFlashQwen3Model
    copy: str  # attribute of the module
    rows: slice | int  # of the layer, in the copies of all layers
    parts: tuple[WeightPart, ...]

    def read(self) -> tuple[HeldWeights, ...]:
        """Read the copy; empty where vLLM made none, as of a quantized draft."""
        copies: Tensor | None = getattr(self.module, self.copy)
        return () if copies is None else (_held(copies[self.rows], self.parts),)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the copy by whole tensors of a checkpoint."""
        copies: Tensor | None = getattr(self.module, self.copy)
        if copies is not None:
            copies[self.rows].copy_(_cut(tensors, self.parts))


AnySlot = Slot | QuantizedSlot | ContextSlot


def _held(rows: Tensor, parts: tuple[WeightPart, ...]) -> HeldWeights:
    """Describe a tensor whose rows are those of the parts, one behind the other, and perhaps padding."""
    lengths = [part.length for part in parts]
    if parts[0].dim == 1:
        return HeldWeights(tensor=rows, parts=parts, split=lambda sums: [sums])
    return HeldWeights(tensor=rows[: sum(lengths)], parts=parts, split=lambda sums: sums.split(lengths))


def _cut(tensors: Mapping[str, Tensor], parts: Sequence[WeightPart]) -> Tensor:
    """Cut the parts out of whole tensors of a checkpoint, one behind the other."""
    cuts = [tensors[part.name].narrow(part.dim, part.start, part.length) for part in parts]
    return cuts[0] if len(cuts) == 1 else torch.cat(cuts)


@cache
def slots(
    model: nn.Module, *, rename: tuple[tuple[str, str], ...] = (), without: nn.Module | None = None
) -> tuple[AnySlot, ...]:
    """List every parameter of the model with this rank's parts; loading weights changes no slot.

    A tensor that two modules share, as a tied output layer does with the embedding, has the first one's name in both:
    each packs a copy of its own to multiply with. A module with unknown parameters is a LookupError.

    Args:
        rename: prefixes of the model's names with the checkpoint's prefixes; the first match counts.
        without: a model whose modules are left out, as a draft borrows the policy's embeddings.
    """
    borrowed = set() if without is None else {id(module) for module in without.modules()}
    found: list[AnySlot] = []
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        # A DFlash draft's own parameter is the embedding of a mask that no draft here has.
        if own and id(module) not in borrowed and not isinstance(module, DFlashQwen3Model):
            path = paths.setdefault(id(next(iter(own.values()))), path)
            saved = next((new + path.removeprefix(old) for old, new in rename if path.startswith(old)), path)
            found += _module_slots(saved, module, own)
    drafts = (module for module in model.modules() if isinstance(module, DFlashQwen3Model))
    return (*found, *(slot for draft in drafts for slot in _context_slots(draft, found)))


def _context_slots(draft: DFlashQwen3Model, held: Sequence[AnySlot]) -> Iterator[ContextSlot]:
    parts = {id(slot.module): slot.parts for slot in held if isinstance(slot, Slot) and slot.parameter == _WEIGHT}
    for index, layer in enumerate(draft.layers):
        attention: Any = layer.self_attn
        rows = slice(2 * index * attention.kv_size, 2 * (index + 1) * attention.kv_size)
        keys_and_values = parts[id(attention.qkv_proj)][1:]
        yield ContextSlot(module=draft, copy="_fused_kv_weight", rows=rows, parts=keys_and_values)
        yield ContextSlot(module=draft, copy="_k_norm_weights", rows=index, parts=parts[id(attention.k_norm)])
    norm = parts[id(draft.hidden_norm)]
    yield ContextSlot(module=draft, copy="_hidden_norm_weight", rows=slice(None), parts=norm)


def can_write(slots: Sequence[AnySlot], shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return True if `Slot.write` can replace vLLM's reload: plain layers on a CPU, and tensors that fit.

    On a GPU vLLM's reload is needed, as kernels may keep values that they derived from a weight.
    """
    parts = [part for slot in slots for part in slot.parts]
    return (
        current_platform.is_cpu()
        and {part.name for part in parts} == shapes.keys()
        and all(_is_plain(slot.module) for slot in slots)
        and all(part.start + part.length <= shapes[part.name][part.dim] for part in parts)
    )


def _is_plain(module: nn.Module) -> bool:
    if type(module) is RMSNorm or are_on_cpu(module):
        return True
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, CompressedTensorsLinearMethod)
    skips = getattr(module, "_cpu_skip_gemm_dispatch", False)  # set where another module has split the weight
    return type(getattr(module, "quant_method", None)) in methods and not skips


def _module_slots(path: str, module: nn.Module, own: dict[str, nn.Parameter]) -> list[AnySlot]:
    if isinstance(module, RoutedExperts):
        parts_of = expert_parts(path, module, own)
        return [Slot(module=module, parameter=name, parts=parts) for name, parts in parts_of.items()]
    if isinstance(module, LinearBase) and _SCALE in own:
        return _quantized_slots(path, module, own)
    if isinstance(module, LinearBase):
        if "weight" not in own or own.keys() - {"weight", "bias"}:
            raise LookupError(f"{path} holds {sorted(own)}, not one weight and perhaps its bias")
        shape = _linear_shape(module)
        parts = _linear_parts(path, module, shape, _dtype(own["weight"]))
        weight = Slot(module=module, parameter="weight", parts=parts, num_inputs=shape[1])
        return [weight, *_bias_slots(module, own, parts)]
    if isinstance(module, VocabParallelEmbedding):
        held = module.shard_indices
        start, stop = held.org_vocab_start_index, held.org_vocab_end_index
        part = WeightPart(name=f"{path}.weight", start=start, length=stop - start, dtype=_dtype(own["weight"]))
        return [Slot(module=module, parameter="weight", parts=(part,), num_inputs=module.embedding_dim)]
    found: list[AnySlot] = []
    for name, tensor in own.items():
        saved = f"{path}.{name}" if path else _RENAMED.get(name, name)
        part = WeightPart(name=saved, length=len(tensor), dtype=_dtype(tensor))
        found.append(Slot(module=module, parameter=name, parts=(part,)))
    return found


def _quantized_slots(path: str, module: LinearBase, own: dict[str, nn.Parameter]) -> list[AnySlot]:
    """List the slot of a quantized matrix, and that of its bias."""
    shape = _linear_shape(module)
    dtype = _dtype(own[_WEIGHT]) if _WEIGHT in own else "int8"  # a CPU's kernel packs its values away
    values = _linear_parts(path, module, shape, dtype)
    whole_rows = (replace(part, dim=0, start=0, length=shape[0]) if part.dim else part for part in values)
    scales = tuple(replace(part, name=part.name + SCALE, dtype="float32") for part in whole_rows)
    return [QuantizedSlot(module=module, parts=values + scales, num_inputs=shape[1]), *_bias_slots(module, own, values)]


def _bias_slots(module: LinearBase, own: dict[str, nn.Parameter], parts: tuple[WeightPart, ...]) -> list[AnySlot]:
    """List the slot of a bias, if there is one: a number for each row of the weight's parts."""
    if "bias" not in own:
        return []
    if any(part.dim for part in parts):
        raise LookupError(f"{parts[0].name} is split by its inputs, and has a bias")
    dtype = _dtype(own["bias"])
    rows = tuple(replace(part, name=part.name.removesuffix("weight") + "bias", dtype=dtype) for part in parts)
    return [Slot(module=module, parameter="bias", parts=rows)]


def _linear_shape(module: LinearBase) -> tuple[int, int]:
    """Return [outputs, inputs] on this rank."""
    if isinstance(module, RowParallelLinear):
        return module.output_size, module.input_size_per_partition
    if isinstance(module, ColumnParallelLinear):
        return module.output_size_per_partition, module.input_size
    return module.output_size, module.input_size


def _linear_parts(path: str, module: LinearBase, shape: tuple[int, int], dtype: str) -> tuple[WeightPart, ...]:
    rank, parent = module.tp_rank, path.rpartition(".")[0]
    if isinstance(module, QKVParallelLinear):
        kv_rank = rank // module.num_kv_head_replicas
        names, ranks = _QKV, (rank, kv_rank, kv_rank)
        sizes = [module.num_heads * module.head_size] + [module.num_kv_heads * module.head_size] * 2
    elif isinstance(module, MergedColumnParallelLinear):
        names, ranks = _GATE_UP, (rank, rank)
        sizes = [size // module.tp_size for size in module.output_sizes]
    elif isinstance(module, RowParallelLinear):
        width = shape[1]
        return (WeightPart(name=f"{path}.weight", dim=1, start=rank * width, length=width, dtype=dtype),)
    else:
        start = rank * shape[0] if isinstance(module, ColumnParallelLinear) else 0
        return (WeightPart(name=f"{path}.weight", start=start, length=shape[0], dtype=dtype),)
    if len(names) != len(sizes) or sum(sizes) != shape[0]:
        raise LookupError(f"{path}: {names} do not make up {shape}: rows {sizes}")
    return tuple(
        WeightPart(name=f"{parent}.{name}.weight", start=at * size, length=size, dtype=dtype)
        for name, at, size in zip(names, ranks, sizes, strict=True)
    )


@cache
def _identity(size: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def are_on_cpu(module: nn.Module) -> bool:
    """Return True if the module holds experts packed for a CPU's kernel."""
    return isinstance(module, RoutedExperts) and isinstance(_kernel(module), CPUUnquantizedExperts)


def expert_parts(path: str, module: RoutedExperts, own: dict[str, nn.Parameter]) -> dict[str, tuple[WeightPart, ...]]:
    """List the checkpoint's tensors in the rows of each parameter; raises LookupError if vLLM alone knows the order."""
    config, kernel = module.moe_config, _kernel(module)
    is_whole = module.local_num_experts == module.global_num_experts and config.tp_size == 1
    if not are_on_cpu(module) or kernel._use_zentorch or set(own) != {_W13, _W2} or not is_whole:
        raise LookupError(f"{path} holds {sorted(own)} in an order that only vLLM knows")
    name = path.removesuffix(".routed_experts")
    dtype = _dtype(own[_W2])

    def part(expert: int, projection: str, length: int) -> WeightPart:
        return WeightPart(name=f"{name}.{expert}.{projection}.weight", length=length, dtype=dtype)

    experts, width = range(module.global_num_experts), _width(module)
    return {
        _W13: tuple(part(expert, each, width) for expert in experts for each in _GATE_UP),
        _W2: tuple(part(expert, "down_proj", module.hidden_size) for expert in experts),
    }


def read_experts(module: RoutedExperts, parameter: str) -> Tensor:
    """Read experts in the checkpoint's order: [E * 2 F, H] for gate and up, [E * H, F] for down."""
    packed: Tensor = getattr(module, parameter).detach()
    order = _order(packed.shape[1], packed.shape[2], packed.dtype, _kernel(module).isa)
    plain = torch.empty_like(packed).flatten(1)
    plain[:, order] = packed.flatten(1)
    width = _width(module)
    if parameter == _W2:
        return plain.view(packed.shape)[..., :width].flatten(0, 1)
    return plain.view(len(packed), 2, -1, packed.shape[2])[:, :, :width].flatten(0, 2)


def write_experts(module: RoutedExperts, parameter: str, rows: Tensor) -> None:
    """Pack and write experts; the inverse of `read_experts`."""
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
    """Compute [rows * columns]: the index in an expert's matrix of each number in packed order.

    Indices are packed as the bits of numbers; for 16-bit types in two halves.
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


def draft_names(draft: nn.Module) -> tuple[tuple[str, str], ...]:
    """List the prefixes of an MTP draft's names in vLLM with the checkpoint's; empty for another draft."""
    if not isinstance(draft, MiMoMTP):
        return ()
    pairs = [(f"{_LAYERS}{key}.", f"{_LAYERS}{index}.") for index, key in enumerate(draft.model.mtp_layers)]
    return tuple((held + inside, saved) for held, saved in pairs for inside in (_BLOCK, ""))


@dataclass
class ChannelInfo(WeightTransferInitInfo, WeightTransferUpdateInfo):
    """Channel to join or to receive over, with the sender's settings; for files `path`, a file or a directory."""

    channel: Channel = Channel.SHARED_MEMORY
    settings: dict[str, Any] = field(default_factory=dict)


class ChannelTransfer(WeightTransferEngine[ChannelInfo, ChannelInfo]):
    """Loads tensors with the checkpoint's names into the model, policy or draft, that the running update targets."""

    init_info_cls = update_info_cls = ChannelInfo
    received_digest = ""  # digest of the last update's bytes; empty where vLLM's own engines receive
    _group: GlooGroup | None = None
    _vllm: WeightTransferEngine | None = None
    _is_vllm_updating = False

    def init_transfer_engine(self, init_info: ChannelInfo) -> None:
        """Join the channel; leaves a channel that was joined before."""
        self.shutdown()
        channel = Channel(init_info.channel)
        if channel is Channel.GLOO:
            self._group = GlooGroup.join(**init_info.settings, worker=self.parallel_config.rank)
        elif channel in (Channel.NCCL, Channel.IPC):
            config = WeightTransferConfig(backend=channel.value)
            self._vllm = WeightTransferEngineFactory.create_engine(
                config, self.vllm_config, self.device, self._default_model
            )
            self._vllm.init_transfer_engine(self._vllm.parse_init_info(init_info.settings))

    def start_weight_update(self) -> None:
        """Finish an update that broke; `receive_weights` chooses the loader."""
        self.finish_weight_update()

    def receive_weights(self, update_info: ChannelInfo) -> None:
        """Receive and load weights, and recompute the values that layers derive from weights."""
        match Channel(update_info.channel):
            case Channel.SHARED_MEMORY:
                self._read(Path(update_info.settings["path"]))
            case Channel.GLOO:
                self._receive(**update_info.settings)
            case _:
                self._receive_with_vllm(update_info.settings)

    def finish_weight_update(self) -> None:
        """Finish the update of vLLM's own engine; on the other channels one call receives all tensors."""
        if self._is_vllm_updating:
            assert self._vllm is not None
            self._is_vllm_updating = False
            self._vllm.finish_weight_update()
            self._vllm.reset_weight_update_target()

    def shutdown(self) -> None:
        """Leave the channel."""
        self.finish_weight_update()
        if self._group is not None:
            self._group.close()
        if self._vllm is not None:
            self._vllm.shutdown()
        self._group = self._vllm = None

    def _read(self, path: Path) -> None:
        files = safetensors_files(path)
        maps = [torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8) for file in files]
        self.received_digest = bytes_digest(maps)
        opened = [safe_open(file, framework="pt") for file in files]
        names = [(name, file) for file in opened for name in file.keys()]  # noqa: SIM118  # safe_open is no mapping
        is_mtp = isinstance(self.model, MiMoMTP)
        read = ((name, file.get_tensor(name)) for name, file in names if name.startswith(_LAYERS) == is_mtp)
        tensors = list(_as_held(read, self.model_config, self.vllm_config.load_config))
        loader = loader_of(self.model, self.model_config, [WeightMeta.of(name, tensor) for name, tensor in tensors])
        loader.take(tensors)
        loader.finish()

    def _receive(self, metas: Sequence[WeightMeta], bucket_bytes: int) -> None:
        assert self._group is not None, "init_transfer_engine comes first"
        try:
            loader = loader_of(self.model, self.model_config, metas)
            try:
                self.received_digest = receive(self._group, loader.take, metas=metas, bucket_bytes=bucket_bytes)
            except BaseException:
                loader.abandon()
                raise
            loader.finish()
        except BaseException:
            self.shutdown()  # the sender would wait for this rank
            raise

    def _receive_with_vllm(self, settings: dict[str, Any]) -> None:
        assert self._vllm is not None, "init_transfer_engine comes first"
        if not self._is_vllm_updating:
            self._vllm.set_weight_update_target(self.model, self.model_config)
            self._vllm.start_weight_update()
            self._is_vllm_updating = True
        self.received_digest = ""
        self._vllm.receive_weights(self._vllm.parse_update_info(settings))


class QuantizingLoader(DefaultModelLoader):
    """Loads a checkpoint as vLLM does, with the matrices of a quantized policy in 8 bits; a draft stays as it is."""

    def __init__(self, load_config: LoadConfig) -> None:
        """Take the fields of `WeightFormat` from vLLM's `model_loader_extra_config`."""
        self._own_config = load_config
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        """Yield the checkpoint's tensors, quantized where the policy is."""
        return _as_held(super().get_all_weights(model_config, model), model_config, self._own_config)


def _as_held(
    weights: Iterator[tuple[str, Tensor]], model_config: ModelConfig, load_config: LoadConfig
) -> Iterator[tuple[str, Tensor]]:
    """Quantize the tensors of a checkpoint for a model that holds them so."""
    if model_config.quantization is None:
        return weights
    return quantized(weights, WeightFormat(**load_config.model_loader_extra_config))


def loader_of(model: nn.Module, model_config: Any, metas: Sequence[WeightMeta]) -> SlotLoader | ReloadLoader:
    """Choose the fastest loader that can load these tensors; raises LookupError if none can."""
    try:
        known = slots(model)
    except LookupError:
        known = ()  # vLLM alone can write some parameters
    if can_write(known, {meta.name: meta.shape for meta in metas}):
        return SlotLoader(known)
    if any(map(are_on_cpu, model.modules())):
        raise LookupError("a model with experts on a CPU can only be refitted with all of its tensors, and no others")
    return ReloadLoader(model, model_config)


class SlotLoader:
    """Writes each parameter of the model when all of its tensors have come, and keeps at most a layer's tensors."""

    def __init__(self, slots: Sequence[AnySlot]) -> None:
        self._by_name: dict[str, list[AnySlot]] = {}
        for slot in slots:
            for part in slot.parts:
                self._by_name.setdefault(part.name, []).append(slot)
        self._waiting: dict[str, Tensor] = {}
        self._num_unwritten = len(slots)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Write these tensors, or keep them until the rest of their parameter comes."""
        for name, tensor in tensors:
            self._waiting[name] = tensor
            complete = [slot for slot in self._by_name[name] if all(p.name in self._waiting for p in slot.parts)]
            for slot in complete:
                slot.write(self._waiting)
            self._num_unwritten -= len(complete)
            for written in {part.name for slot in complete for part in slot.parts}:
                del self._waiting[written]

    def finish(self) -> None:
        """Check that every parameter was written."""
        assert not self._num_unwritten, f"{self._num_unwritten} parameters were not written"

    def abandon(self) -> None:
        """Do nothing, as every parameter holds its old or its new value and can be written again."""


class ReloadLoader:
    """vLLM's own layerwise reload, which keeps a layer's tensors until it is complete; a draft's copies come last."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        is_dflash = any(isinstance(module, DFlashQwen3Model) for module in model.modules())
        known = slots(model, rename=OF_READERS) if is_dflash else ()
        self._copies = [slot for slot in known if isinstance(slot, ContextSlot)]
        self._copied: dict[str, Tensor] = {}
        for slot in self._copies:
            slot.module.__dict__[_MAKES_COPIES] = lambda: None
        initialize_layerwise_reload(model)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load these tensors; vLLM keeps them until the rest of their layer comes."""
        if not tensors:
            return
        with disable_mtp_completeness_check():  # a portion is never complete
            self._model.load_weights(tensors)  # type: ignore[operator]  # every vLLM model has it
        names = {part.name for slot in self._copies for part in slot.parts}
        self._copied |= {name: tensor for name, tensor in tensors if name in names}

    def finish(self) -> None:
        """Build the layers from the tensors that came: all, or a part where an update broke."""
        finalize_layerwise_reload(self._model, self._model_config)
        for slot in self._copies:
            slot.module.__dict__.pop(_MAKES_COPIES, None)
            if all(part.name in self._copied for part in slot.parts):
                slot.write(self._copied)

    abandon = finish


def register() -> None:
    """Register the backend and the loader with vLLM in this process; vLLM calls plugins more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ChannelTransfer)
        register_model_loader(LOAD_FORMAT)(QuantizingLoader)
