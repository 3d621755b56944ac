"""Adaptation of Megatron-Core to a host without CUDA; nothing here has an effect where CUDA is present.

Megatron names the device "cuda" in a few places that its gloo code paths reach: scalars of the schedules and of
gradient clipping, buffers of the gradient all-reduce, and names of tensor types in the optimizers. Inside
`cuda_as_cpu`, never at import, these places get the CPU. The dispatcher of tokens to experts waits for no stream, and
its splits are lists, as gloo needs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode


def is_cpu_only() -> bool:
    """Return True if the learner runs without CUDA."""
    return not torch.cuda.is_available()


def install() -> None:
    """Give Megatron a random-number tracker without CUDA generators; a second call changes nothing.

    Under sequence parallelism Megatron forks the tracker around dropout, which is always 0.
    """
    if is_cpu_only() and not isinstance(megatron_random._CUDA_RNG_STATE_TRACKER, _NoRngTracker):
        megatron_random._CUDA_RNG_STATE_TRACKER = _NoRngTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Give Megatron the CPU wherever it asks for CUDA; restore everything on exit."""
    if not is_cpu_only():
        yield
        return
    current_device, synchronize, stream = torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.Stream
    get_state, set_state = megatron_random._get_cuda_rng_state, megatron_random._set_cuda_rng_state
    # The function is annotated as returning an index, but every caller in Megatron passes the result on as `device=`.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None  # pipeline sends wait for the stream, which gloo does not have
    torch.cuda.Stream = lambda: None  # a token dispatcher makes a stream for asynchronous copies
    # Recomputation for a gradient restores the random state; Megatron keeps the CPU's state apart from CUDA's.
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    try:
        with _CudaAsCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.Stream = current_device, synchronize, stream
        megatron_random._get_cuda_rng_state, megatron_random._set_cuda_rng_state = get_state, set_state


@contextlib.contextmanager
def model_arithmetic() -> Iterator[None]:
    """Disable the interception of `cuda_as_cpu`, which costs 6 % of a step, for the model, which names no device."""
    with torch._C.DisableTorchFunction() if is_cpu_only() else contextlib.nullcontext():
        yield


class _CudaAsCpu(TorchFunctionMode):
    """Mode that redirects `device="cuda"` and `Tensor.cuda`, and makes `Tensor.type()` return CUDA type names.

    The optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"` and reject every other name.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class _NoRngTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron's tracker of named random states, without any: nothing here samples from them."""

    def add(self, name: str, seed: int) -> None:
        pass

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        yield


def use_cpu_dispatchers(model: torch.nn.Module) -> None:
    """Replace the token dispatchers of a model's expert layers by `_CpuDispatcher`."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = _CpuDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )


class _CpuDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher with token counts as lists, which gloo's all-to-all needs."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:  # type: ignore[override]  # declared to return a tensor always
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits: Tensor | None = getattr(self, name)
                if splits is not None:
                    setattr(self, name, splits.tolist())
        return tokens_per_expert
