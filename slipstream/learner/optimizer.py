"""Megatron's gradient buffers and optimizer around a model, Muon for many small matrices, and the memory of both.

Muon orthogonalizes all matrices of one shape together. `torch.optim.Muon` does so one by one, which on a CPU takes more
than twice as long for the same updates (research/log.md).

Memory that only updates need is offloaded while other processes use the same device. Gradients are freed, because every
update begins with zeros. The optimizer's float32 masters and moments move to host memory and come back bit for bit. The
model's weights stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.config import LearnerConfig
from slipstream.learner.cpu import host
from slipstream.learner.numerics import TORCH_DTYPES
from slipstream.types import Dtype

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in Jordan's post and in torch
_EPS = 1e-7

# The defaults are 0.95 and five. A short training learns faster with a lower momentum, and three iterations teach as
# much as five (research/log.md).
_MUON_MOMENTUM = 0.9
_NUM_MUON_ITERATIONS = 3
_PIECE_BYTES = 2**28  # torch rounds a block of pinned memory up to a power of two


class BatchedMuon(torch.optim.Optimizer):
    """Muon: steps by orthogonalized Nesterov momentum, scaled to AdamW's update size at the same learning rate.

    The updates equal those of `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")` up to rounding. `dtype` is the
    iteration's: bfloat16 is precise enough, but only some processors multiply it fast.

    Source:
        Jordan et al., Muon (2024); Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        num_iterations: int = 5,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "num_iterations": num_iterations}
        super().__init__(matrices, defaults)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss to return
        """Update every matrix that has a gradient."""
        assert closure is None, "the loss is computed once"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in by_shape.items():
                momenta = [self._momentum(matrix) for matrix in matrices]
                gradients: list[Any] = [matrix.grad for matrix in matrices]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
                num_iterations = group["num_iterations"]
                updates = orthogonal(torch.stack(ahead), num_iterations=num_iterations, dtype=self._dtype).unbind()
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(matrices, updates, alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)

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


def with_optimizer(
    model: MegatronModule, learner: LearnerConfig, config: OptimizerConfig
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wrap a model so that its gradients accumulate in float32 buffers, and give it an optimizer of float32 masters."""
    with host.cuda_as_cpu():
        module = DistributedDataParallel(
            config=model.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=learner.distributed_optimizer,
            ),
            module=model,
        )
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=1e-8,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            bf16=learner.dtype is Dtype.BFLOAT16,
            params_dtype=TORCH_DTYPES[learner.dtype],
            use_distributed_optimizer=learner.distributed_optimizer,
        )
        matrices = _hidden_matrices(model) if config.method is OptimizerMethod.MUON else []
        with _left_out(matrices):
            optimizer = get_megatron_optimizer(settings, [module])
        for group in optimizer.param_groups:
            # On a CPU torch's AdamW runs several kernels a tensor by default; the fused one runs a single kernel.
            group["fused"] = True
            # Megatron marks norms and biases, and leaves it to its scheduler, which is not used, to spare them.
            group["weight_decay"] *= group["wd_mult"]
        if matrices:
            assert isinstance(optimizer, ChainedOptimizer)
            optimizer = ChainedOptimizer([*optimizer.chained_optimizers, _muon(matrices, settings)])
    return module, optimizer


def _hidden_matrices(model: MegatronModule) -> list[torch.nn.Parameter]:
    """Matrices that Muon steps: all but the embedding and the output layer."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.dim() == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False)
    ]


@contextmanager
def _left_out(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Hide parameters from Megatron's optimizer, which skips those that need no gradient."""
    for parameter in parameters:
        parameter.requires_grad = False
    yield
    for parameter in parameters:
        parameter.requires_grad = True


def _muon(matrices: Sequence[torch.nn.Parameter], settings: MegatronOptimizerConfig) -> MegatronOptimizer:
    """Muon with Megatron's float32 masters; Megatron's own Muon needs a package that does not support Python 3.11."""
    assert settings.lr is not None
    muon = BatchedMuon(
        matrices,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=_MUON_MOMENTUM,
        num_iterations=_NUM_MUON_ITERATIONS,
        dtype=settings.params_dtype,
    )

    def without_state(*_: Any) -> None:
        """Initialize nothing: only Megatron's own checkpoints, which this project does not use, need the state."""

    wrapped: Any = (
        Float16OptimizerWithFloat16Params(muon, settings, cast(Any, None), without_state)
        if settings.bf16
        else FP32Optimizer(muon, settings, without_state)
    )
    wrapped.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    wrapped.tp_group = parallel_state.get_tensor_model_parallel_group()
    return wrapped


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """A storage without memory, its full size and a copy of its bytes; a gradient has no copy and returns as zeros."""

    storage: torch.UntypedStorage
    num_bytes: int
    pieces: tuple[Tensor, ...]


class TrainingMemory:
    """Gradients and optimizer state of one model on one device.

    Whole storages are offloaded and onloaded. Tensors that share a storage move together, and every reference to them
    stays valid: the views of Megatron's gradient buffers, or the shards of the weights that a float32 distributed
    optimizer steps in place. Megatron's own `offload_to_cpu` would move the tensors that an optimizer steps, which in
    float32 are the weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        gradients: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """Register a model, its optimizers and the buffers of its gradients.

        Args:
            gradients: returns buffers that live as long as the training and are zero before each update; the `grad`s
                of parameters are freed in any case.
        """
        self._model, self._optimizers, self._device, self._gradients = model, optimizers, device, gradients
        self._offloaded: list[_Offloaded] = []  # from `offload` to `onload`

    @classmethod
    def of_megatron(
        cls, module: DistributedDataParallel, optimizer: MegatronOptimizer, device: torch.device
    ) -> TrainingMemory:
        """Register the module and the optimizer that `with_optimizer` returned."""

        def gradients() -> Iterator[Tensor]:
            lists: Any = module  # whose `buffers` are no method, as those of a torch module
            for buffer in [*lists.buffers, *lists.expert_parallel_buffers]:
                yield buffer.grad_data

        return cls(module.module, _steppers(optimizer), device=device, gradients=gradients)

    @torch.no_grad()
    def offload(self) -> int:
        """Free the memory until `onload`, which precedes every update; returns the number of bytes freed.

        A second call before `onload` changes nothing and returns 0.
        """
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

        Torch cannot resize a storage of which numpy has had a view, such as a checkpoint takes on a host: it is left
        out too.
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


def _steppers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Torch's optimizers inside Megatron's; a rank that steps nothing has none."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [each.optimizer for each in chained if each.optimizer is not None]


def _numbers(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, in one dimension."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copies(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    """Copy all bytes to host memory; the copies are complete once the device has been synchronized."""
    return tuple(
        torch.empty_like(piece, device="cpu", pin_memory=piece.is_cuda).copy_(piece, non_blocking=True)
        for piece in _numbers(storage).split(_PIECE_BYTES)
    )
