"""Parts that Megatron-Core lacks on a host without CUDA. Nothing here does anything when CUDA is present.

Megatron names the device "cuda" in a few places that its own gloo code paths reach: scalars of the schedules and of
gradient clipping, buffers of the gradient all-reduce, and the names of tensor types in the optimizers. Its arithmetic
does not care. So the learner answers those questions with "cpu", but only inside `cuda_as_cpu`, never at import. Its
dispatcher of tokens to experts waits for no stream, and its splits are lists.
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
    """Give Megatron a random-number tracker made of CPU generators.

    Weight initialisation and dropout under sequence parallelism fork it; the stock one saves and restores states of
    CUDA generators. Calling it again changes nothing.
    """
    if is_cpu_only() and not isinstance(megatron_random._CUDA_RNG_STATE_TRACKER, _CpuRngTracker):
        megatron_random._CUDA_RNG_STATE_TRACKER = _CpuRngTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Let Megatron find the CPU where it asks for CUDA; put everything back at the end."""
    if not is_cpu_only():
        yield
        return
    current_device, synchronize, stream = torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.Stream
    get_state, set_state = megatron_random._get_cuda_rng_state, megatron_random._set_cuda_rng_state
    # Annotated as returning an index, but every caller in Megatron passes the answer on as `device=`.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None  # pipeline sends wait for the stream; gloo has none
    torch.cuda.Stream = lambda: None  # a dispatcher of tokens makes one, to copy beside
    # What is recomputed for a gradient draws the same numbers again; the state of the CPU is kept beside this one.
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
    """Inside `cuda_as_cpu`: stop looking at every operation, as the model's own name no device (6 % of a step)."""
    with torch._C.DisableTorchFunction() if is_cpu_only() else contextlib.nullcontext():
        yield


class _CudaAsCpu(TorchFunctionMode):
    """Redirects `device="cuda"` and `Tensor.cuda`, and lets `Tensor.type()` answer with the CUDA name.

    The optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"` and refuse every other name.
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


class _CpuRngTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron's tracker of named random states, over the CPU generator."""

    def add(self, name: str, seed: int) -> None:
        assert name not in self.states_, f"random state {name} exists"
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


def use_cpu_dispatchers(model: torch.nn.Module) -> None:
    """Give the layers of experts the dispatcher below."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = _CpuDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )


class _CpuDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher with counts of tokens as gloo's all-to-all takes them."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:  # type: ignore[override]  # declared to return a tensor always
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits: Tensor | None = getattr(self, name)
                if splits is not None:
                    setattr(self, name, splits.tolist())
        return tokens_per_expert
