"""Memory that a model needs for its updates alone, given back while others work on the same device.

Gradients are let go, for every update begins with zeros. What the optimizer keeps, float32 masters and moments, goes
to host memory and comes back to the last bit. The model's weights stay: whoever reads them notices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

_PIECE_BYTES = 2**28  # torch rounds a block of pinned memory up to a power of two


@dataclass(frozen=True, slots=True)
class _Away:
    """A storage without memory, how large it is with it, and what it held; no pieces of one that holds zeros."""

    storage: torch.UntypedStorage
    num_bytes: int
    pieces: tuple[Tensor, ...]


class TrainingMemory:
    """The gradients and the optimizer's state of one model on one device.

    It is given back and taken again by the storage, not by the tensor: what shares a storage, such as the views of
    Megatron's gradient buffers, or the shards that a float32 distributed optimizer steps within the weights
    themselves, goes and stays together, and every reference to it is valid afterwards. Megatron's own `offload_to_cpu`
    moves what an optimizer steps, which in float32 are the weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        gradients: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """Take note of a model, its optimizers and the buffers of its gradients, if these are no `grad`s.

        Args:
            gradients: held for the whole training, and zero before each update.
        """
        self._model, self._optimizers, self._device, self._gradients = model, optimizers, device, gradients
        self._away: list[_Away] = []

    @classmethod
    def of_megatron(
        cls, module: DistributedDataParallel, optimizer: MegatronOptimizer, device: torch.device
    ) -> TrainingMemory:
        """Of what `with_optimizer` returned."""

        def gradients() -> Iterator[Tensor]:
            lists: Any = module  # whose `buffers` are no method, as those of a torch module
            for buffer in [*lists.buffers, *lists.expert_parallel_buffers]:
                yield buffer.grad_data

        return cls(module.module, _steppers(optimizer), device=device, gradients=gradients)

    @property
    def is_away(self) -> bool:
        """Whether it was given back, and not taken again."""
        return bool(self._away)

    @torch.no_grad()
    def give_back(self) -> int:
        """Until `take`, which whoever trains calls first, the device has the memory; returns how many bytes that are.

        Called again before it changes nothing and returns 0.
        """
        if self._away:
            return 0
        for optimizer in self._optimizers:
            optimizer.zero_grad()  # they may be references to the buffers
        kept = {each.untyped_storage().data_ptr() for each in [*self._model.parameters(), *self._model.buffers()]}
        gradients = self._storages(self._gradients(), kept)
        state = self._storages(self._state(), kept | gradients.keys())
        copies = {pointer: _copies(storage) for pointer, storage in state.items()}
        self._wait()  # the copies are on their way
        for pointer, storage in (gradients | state).items():
            self._away.append(_Away(storage, storage.nbytes(), copies.get(pointer, ())))
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it for this process
        return sum(away.num_bytes for away in self._away)

    @torch.no_grad()
    def take(self) -> None:
        """Have everything again, if it was given back: gradients of zeros, and the optimizer's state as it was."""
        for away in self._away:
            away.storage.resize_(away.num_bytes)
            whole = _numbers(away.storage)
            if not away.pieces:
                whole.zero_()
            for place, piece in zip(whole.split(_PIECE_BYTES), away.pieces, strict=False):
                place.copy_(piece, non_blocking=True)
        self._wait()
        self._away = []

    def _state(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, Tensor) and each.dim())

    def _storages(self, tensors: Iterable[Tensor], kept: Set[int]) -> dict[int, torch.UntypedStorage]:
        """Those of this device by their address, without those to be kept and those without memory.

        On a host also without what numpy has ever had a view of, as a checkpoint takes one: torch leaves it as it is.
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
    """Torch's optimizers inside of Megatron's; a rank that steps nothing has none."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [each.optimizer for each in chained if each.optimizer is not None]


def _numbers(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, in one dimension."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copies(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    """Of all its bytes in host memory; they are there when the device has been waited for."""
    return tuple(
        torch.empty_like(piece, device="cpu", pin_memory=piece.is_cuda).copy_(piece, non_blocking=True)
        for piece in _numbers(storage).split(_PIECE_BYTES)
    )
