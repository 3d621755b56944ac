"""RMSNorm of eager engines on CPUs in one pass over its input.

vLLM's CPU build has kernels for RMSNorm, alone and behind a residual. Its layers compute either from six to eight
operations of torch instead, for a compiler to fuse, and an eager engine pays for each of them. Here an engine is
offered the kernels as a provider of vLLM's operations (`vllm_engine.OWN_NORMS`). In bfloat16 they round once.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "slipstream"

_VECTOR = 16  # elements; the kernels take whole vectors


def register() -> None:
    """Offer the kernels to the engines of this process; repeated calls change nothing."""
    from vllm import ir

    if PROVIDER in ir.ops.rms_norm.impls:
        return
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_fits)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_fits_residual, inplace=True)(add_rms_norm)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Norm of each row."""
    del variance_size
    x = x.contiguous()  # the kernel takes rows that follow each other, and those of heads do not
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Norm of each row of the sum, and the sum; they overwrite both inputs."""
    del variance_size
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    del epsilon
    is_known = weight is not None and x.dtype is weight.dtype and x.dtype in (torch.float32, torch.bfloat16)
    return is_known and variance_size is None and x.shape[-1] % _VECTOR == 0


def _fits_residual(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()
