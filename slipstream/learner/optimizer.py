"""Megatron's gradient buffers and optimizer around a model, Muon for many small matrices, and the memory of both.

Muon orthogonalizes all matrices of one shape together. `torch.optim.Muon` does so one by one, which on a CPU takes more
than twice as long for the same updates (research/log.md).

Memory that only updates need is offloaded while other processes use the same device: gradients are freed, and the
optimizer's float32 masters and moments move to host memory. The model's weights stay on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner import parallel
from slipstream.learner.config import MUON_BATCH_ELEMENTS, LearnerConfig
from slipstream.learner.cpu import host
from slipstream.learner.numerics import TORCH_DTYPES
from slipstream.types import Dtype

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in Jordan's post and in torch
_EPS = 1e-7
_BY_MUON = "with_muon"  # key of Muon's groups; it sorts behind Megatron's, and so do the groups
_PIECE_BYTES = 2**28  # torch rounds a block of pinned memory up to a power of two


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Part of a matrix that a rank steps: the elements [start, stop), in flat order, of its tensor-parallel part."""

    gradient: Tensor  # place of the whole tensor-parallel part in Megatron's float32 buffer of gradients
    start: int
    stop: int
    dim: int | None  # along which tensor-parallel ranks split the matrix; None where each has all of it


class BatchedMuon(torch.optim.Optimizer):
    """Muon: steps by orthogonalized Nesterov momentum, scaled to AdamW's update size at the same learning rate.

    The updates equal those of `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")` up to rounding. `dtype` is the
    iteration's: bfloat16 is precise enough, but only some processors multiply it fast. A step overwrites the gradients
    by the momentum that it orthogonalizes. Torch's momentum is 0.95, and it makes five iterations: a short training
    learns faster with a lower momentum, and three iterations teach as much as five (research/log.md).

    Source:
        Jordan et al., Muon (2024); Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        num_iterations: int = 3,
        dtype: torch.dtype = torch.bfloat16,
        parts: Mapping[Tensor, MatrixPart] | None = None,
        gather: Callable[[], None] = lambda: None,
    ) -> None:
        """Register whole matrices, or parts of matrices.

        Args:
            parts: by tensor, of which matrix it is which part; a tensor that is not named is a whole matrix.
            gather: completes the `gradient`s of `parts` out of those of all data-parallel ranks.
        """
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "num_iterations": num_iterations}
        super().__init__(matrices, defaults)
        self._dtype, self._parts, self._gather = dtype, parts or {}, gather

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss to return
        """Update every matrix that has a gradient; ranks that hold parts of the same matrices call it together."""
        assert closure is None, "the loss is computed once"
        for group in self.param_groups:
            stepped = [each for each in group["params"] if each.grad is not None]
            if stepped:
                momenta, gradients = [self._momentum(each) for each in stepped], [each.grad for each in stepped]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                torch._foreach_lerp_(gradients, momenta, group["momentum"])
            self._gather()
            for batch in self._batches(stepped):
                updates, longest = self._updates(batch, group["num_iterations"])
                torch._foreach_mul_(batch, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(batch, updates, alpha=-group["lr"] * 0.2 * longest**0.5)

    def _batches(self, stepped: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Divide what is stepped into matrices of one shape and split, at most `MUON_BATCH_ELEMENTS` at once."""
        alike: dict[tuple[torch.Size, int | None], list[Tensor]] = {}
        for each in stepped:
            part = self._part(each)
            alike.setdefault((part.gradient.shape, part.dim), []).append(each)
        for (shape, dim), found in alike.items():
            ranks = 1 if dim is None else parallel.tensor_group().size()
            size = max(1, MUON_BATCH_ELEMENTS // (shape.numel() * ranks))
            yield from (found[start : start + size] for start in range(0, len(found), size))

    def _updates(self, batch: Sequence[Tensor], num_iterations: int) -> tuple[list[Tensor], int]:
        """Orthogonalize whole matrices; returns the update of each part, and the longer side of a matrix."""
        parts = [self._part(each) for each in batch]
        dim = parts[0].dim
        given_BMN = torch.stack([part.gradient for part in parts])
        whole_BMN = given_BMN
        if dim is not None:
            whole_BMN = torch.cat(parallel.tensor_parallel_shards(given_BMN.to(self._dtype)), dim + 1)
        found_BMN = orthogonal(whole_BMN, num_iterations=num_iterations, dtype=self._dtype)
        if dim is not None:
            group = parallel.tensor_group()
            found_BMN = found_BMN.chunk(group.size(), dim + 1)[group.rank()].to(given_BMN.dtype)
        updates = [
            found_MN if each.shape == found_MN.shape else found_MN.reshape(-1)[part.start : part.stop]
            for each, part, found_MN in zip(batch, parts, found_BMN.unbind(), strict=True)
        ]
        return updates, max(whole_BMN.shape[1:])

    def _part(self, stepped: Tensor) -> MatrixPart:
        assert stepped.grad is not None
        part = self._parts.get(stepped)
        if part is None:
            return MatrixPart(stepped.grad, 0, stepped.numel(), None)
        assert stepped.grad.data_ptr() == part.gradient.view(-1)[part.start :].data_ptr(), "it lies in the buffer"
        return part

    def _momentum(self, matrix: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        return state["momentum_buffer"]


def orthogonal(matrices_BMN: Tensor, *, num_iterations: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Bring the singular values of each matrix near 1 by the Newton-Schulz iteration in `dtype`."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.to(dtype)
    x = x.mT.contiguous() if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=_EPS)
    for _ in range(num_iterations):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices_BMN.dtype)


class Training:
    """Gradients of a model in Megatron's float32 buffers, and an optimizer with float32 masters.

    Attributes:
        module: the model with the buffers.
        optimizer: Megatron's, of the model's parameters.
        memory: what only updates need.
    """

    def __init__(self, model: MegatronModule, learner: LearnerConfig, config: OptimizerConfig) -> None:
        with host.cuda_as_cpu():
            self.module = DistributedDataParallel(
                config=model.config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, use_distributed_optimizer=learner.distributed_optimizer
                ),
                module=model,
            )
            settings = MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                weight_decay=config.weight_decay,
                clip_grad=config.clip_grad,
                bf16=learner.dtype is Dtype.BFLOAT16,
                params_dtype=TORCH_DTYPES[learner.dtype],
                use_distributed_optimizer=learner.distributed_optimizer,
            )
            overrides = get_standard_config_overrides(settings)
            if config.method is OptimizerMethod.MUON:
                muon = ParamKey(predicate=ParamPredicate(name=_BY_MUON, fn=_is_hidden_matrix))
                overrides[muon] = cast(ParamGroupOverride, {_BY_MUON: True})
            self.optimizer = get_megatron_optimizer(settings, [self.module], overrides)
            for group in self.optimizer.param_groups:
                # On a CPU torch's AdamW runs several kernels a tensor by default; the fused one runs a single kernel.
                group["fused"] = True
                # Megatron marks norms and biases, and leaves it to its scheduler, which is not used, to spare them.
                group["weight_decay"] *= group["wd_mult"]
            for each in _chained(self.optimizer):
                _give_to_muon(each, settings)
        gradients = partial(_gradient_buffers, self.module)
        self.memory = TrainingMemory(model, steppers(self.optimizer), device=parallel.device(), gradients=gradients)

    def begin(self, *, learning_rate: float) -> None:
        """Onload the memory, set the learning rate of an update and zero the gradients."""
        self.memory.onload()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.module.zero_grad_buffer()
        # In float32 the optimizer leaves `param.grad` as an alias of the buffer: without this call the first
        # micro-batch of the next update would be added twice.
        self.optimizer.zero_grad()

    def step(self) -> float:
        """Step the optimizer; returns the norm of the gradient before it is clipped."""
        with host.cuda_as_cpu():
            _, grad_norm, _ = self.optimizer.step()  # type: ignore[misc]  # declared by a base without result
        return float(grad_norm)


def _gradient_buffers(module: Any) -> list[Tensor]:  # its `buffers` are no method, as those of a torch module
    return [buffer.grad_data for buffer in [*module.buffers, *module.expert_parallel_buffers]]


def _is_hidden_matrix(parameter: torch.nn.Parameter) -> bool:
    """Return True for what Muon steps: all matrices but the embedding and the output layer."""
    return parameter.dim() == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False)


class _AdamWAndMuon:
    """Two optimizers that one of Megatron's optimizers steps as one.

    Megatron thus handles Muon's matrices as AdamW's parameters under every layout: it reduces, measures and clips their
    gradients, keeps their float32 masters, and shards both. Its own Muon needs a package that does not support Python
    3.11.
    """

    def __init__(self, adamw: torch.optim.Optimizer, muon: BatchedMuon) -> None:
        self.optimizers = (adamw, muon)
        self.param_groups = adamw.param_groups  # in Megatron's order, by which it finds a parameter
        adamw.param_groups = [group for group in self.param_groups if _BY_MUON not in group]
        muon.param_groups = [group for group in self.param_groups if _BY_MUON in group]
        for group in muon.param_groups:
            group.update({name: value for name, value in muon.defaults.items() if name not in group})

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def _give_to_muon(optimizer: Any, settings: MegatronOptimizerConfig) -> None:
    """Let Muon step the groups that are marked `_BY_MUON` in one of Megatron's optimizers."""
    if not any(_BY_MUON in group for group in optimizer.param_groups):
        return
    parts: dict[Tensor, MatrixPart] = {}
    for each in stepped_parameters(optimizer):
        matrix: Any = each.parameter
        dim = matrix.partition_dim if getattr(matrix, "tensor_model_parallel", False) else None
        is_split = dim is not None and parallel.tensor_group().size() > 1
        parts[each.main] = MatrixPart(matrix.main_grad, each.start, each.stop, dim if is_split else None)
    buffers = optimizer.buffers if isinstance(optimizer, DistributedOptimizer) else []

    def gather() -> None:
        for buffer in buffers:
            for bucket in buffer.buckets:
                parallel.gather_in_place(bucket.grad_data, buffer.data_parallel_group)

    muon = BatchedMuon(
        [{"params": []}],  # Megatron's groups have rate and decay; some of their tensors torch's constructor refuses
        lr=0.0,
        dtype=settings.params_dtype,
        parts=parts,
        gather=gather,
    )
    cast(Any, optimizer).optimizer = _AdamWAndMuon(optimizer.optimizer, muon)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter as an optimizer steps it: whole, or its elements [start, stop) in flat order."""

    parameter: torch.nn.Parameter
    main: Tensor  # the float32 tensor that is stepped for these elements
    start: int
    stop: int
    optimizer: torch.optim.Optimizer
    is_sharded: bool = False  # over the data-parallel ranks

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the tensors that the optimizer keeps once it has stepped, besides its count of steps."""
        return ("momentum_buffer",) if isinstance(self.optimizer, BatchedMuon) else ("exp_avg", "exp_avg_sq")

    @property
    def counts_by_parameter(self) -> bool:
        """True if each parameter has a tensor that counts its steps, as in torch; else the group has one number."""
        return isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW)

    def counts(self) -> list[float]:
        """Return the optimizer's counts of updates; Muon keeps none."""
        if self.counts_by_parameter:
            return [float(self.optimizer.state[self.main]["step"])]
        groups = [] if isinstance(self.optimizer, BatchedMuon) else self.optimizer.param_groups
        return [float(group["step"]) for group in groups if group["params"]]

    def kept(self) -> dict[str, Tensor]:
        """Return the optimizer's moments by name, sharing memory; empty before the first update."""
        state = self.optimizer.state
        return {name: state[self.main][name] for name in self.moments} if self.main in state else {}

    def reset(self, num_updates: int) -> dict[str, Tensor]:
        """Set the optimizer's count of updates; returns its new moments, if any, for the caller to fill."""
        state = self.optimizer.state
        state.pop(self.main, None)
        moments = {name: torch.empty_like(self.main) for name in self.moments} if num_updates else {}
        if num_updates:
            state[self.main] = dict(moments)
        if num_updates and self.counts_by_parameter:
            state[self.main]["step"] = torch.tensor(float(num_updates), device=self.main.device)
        elif not self.counts_by_parameter and "exp_avg" in self.moments:
            for group in self.optimizer.param_groups:
                group["step"] = num_updates
        return moments


def stepped_parameters(optimizer: MegatronOptimizer) -> Iterator[Stepped]:
    """List what this rank steps by one of Megatron's optimizers, or by a chain of them."""
    by_main = {id(m): each for each in steppers(optimizer) for group in each.param_groups for m in group["params"]}
    for each in _chained(optimizer):
        if isinstance(each, DistributedOptimizer):
            for parameter, (group, position) in each.model_param_group_index_map.items():
                extent = each._get_model_param_range_map(parameter)["param"]
                main = each.param_groups[group]["params"][position]
                yield Stepped(parameter, main, extent.start, extent.end, by_main[id(main)], is_sharded=True)
            continue
        low, masters, whole = (
            (each.float16_groups, each.fp32_from_float16_groups, each.fp32_from_fp32_groups)
            if isinstance(each, Float16OptimizerWithFloat16Params)
            else ([], [], [group["params"] for group in each.param_groups])
        )
        pairs = zip(itertools.chain(*low, *whole), itertools.chain(*masters, *whole), strict=True)
        for parameter, main in pairs:
            yield Stepped(parameter, main, 0, main.numel(), by_main[id(main)])


def steppers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Torch's optimizers inside Megatron's; a rank that steps nothing has none."""
    found = [each.optimizer for each in _chained(optimizer) if each.optimizer is not None]
    return [one for each in found for one in (each.optimizers if isinstance(each, _AdamWAndMuon) else [each])]


def _chained(optimizer: MegatronOptimizer) -> list[Any]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """A storage without memory, its full size and a copy of its bytes; a gradient has no copy and returns as zeros."""

    storage: torch.UntypedStorage
    num_bytes: int
    pieces: tuple[Tensor, ...]


class TrainingMemory:
    """Gradients and optimizer state of one model on one device.

    Whole storages are offloaded and onloaded, so that every reference to their tensors stays valid, such as the views
    of Megatron's gradient buffers. Megatron's own `offload_to_cpu` would move the tensors that an optimizer steps: in
    float32 these are the weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        gradients: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """Register a model and its optimizers.

        Args:
            gradients: returns buffers that live as long as the training and are zero before each update; the `grad`s
                of parameters are freed in any case.
        """
        self._model, self._optimizers, self._device, self._gradients = model, optimizers, device, gradients
        self._offloaded: list[_Offloaded] = []  # from `offload` to `onload`

    @torch.no_grad()
    def offload(self) -> int:
        """Free the memory until `onload`; returns the number of bytes freed, 0 in a second call."""
        if self._offloaded:
            return 0
        for optimizer in self._optimizers:
            optimizer.zero_grad()  # a `grad` may be a reference to a buffer
        kept = {each.untyped_storage().data_ptr() for each in [*self._model.parameters(), *self._model.buffers()]}
        gradients = self._storages(self._gradients(), kept)
        state = self._storages(self._state(), kept | gradients.keys())
        copies = {pointer: _copies(storage) for pointer, storage in state.items()}
        self._wait()  # until the asynchronous copies are complete
        for pointer, storage in (gradients | state).items():
            self._offloaded.append(_Offloaded(storage, storage.nbytes(), copies.get(pointer, ())))
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep the memory for this process
        return sum(each.num_bytes for each in self._offloaded)

    @torch.no_grad()
    def onload(self) -> None:
        """Undo `offload`: gradients are zero, and the optimizer's state is as before."""
        for each in self._offloaded:
            each.storage.resize_(each.num_bytes)
            whole = _numbers(each.storage)
            if not each.pieces:
                whole.zero_()
            for place, piece in zip(whole.split(_PIECE_BYTES), each.pieces, strict=False):
                place.copy_(piece, non_blocking=True)
        self._wait()
        self._offloaded = []

    def _state(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, Tensor) and each.dim())

    def _storages(self, tensors: Iterable[Tensor], kept: Set[int]) -> dict[int, torch.UntypedStorage]:
        """Storages of this device by address, without those in `kept` and those without memory.

        One of which numpy has had a view, such as a checkpoint takes on a host, is left out: torch cannot resize it.
        """
        storages = [each.untyped_storage() for each in tensors if each.device.type == self._device.type]
        return {
            storage.data_ptr(): storage
            for storage in storages
            if storage.nbytes() and storage.resizable() and storage.data_ptr() not in kept
        }

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _numbers(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, in one dimension."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copies(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    """Copy all bytes to host memory; the copies are complete once the device has been synchronized."""
    return tuple(
        torch.empty_like(piece, device="cpu", pin_memory=piece.is_cuda).copy_(piece, non_blocking=True)
        for piece in _numbers(storage).split(_PIECE_BYTES)
    )
