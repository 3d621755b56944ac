"""Muon for many small matrices: all of one shape are made orthogonal together.

`torch.optim.Muon` does them one after another, which on a CPU costs more than twice as much for the same updates
(docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in Jordan's post and in torch
_EPS = 1e-7


class BatchedMuon(torch.optim.Optimizer):
    """Momentum (Nesterov's), made orthogonal; an update is as large as AdamW's would be at the same learning rate.

    `dtype` is the iteration's: bfloat16 suffices, but only some processors multiply it fast. The updates are those of
    `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")` up to rounding.

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
        """One update of every matrix that has a gradient."""
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
    """Each matrix with its singular values brought near 1, by Newton and Schulz's iteration in `dtype`."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.to(dtype)
    x = x.mT.contiguous() if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=_EPS)
    for _ in range(num_iterations):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices_BMN.dtype)
