"""A draft's optimizer where hidden states teach it: AdamW, or Muon for the layer's matrices and AdamW for the rest.

Muon learns from fewer tokens, of which a draft that is trained beside the policy has few (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.grpo.config import OptimizerMethod
from slipstream.learner.optimizer import BatchedMuon

Parameters = Sequence[tuple[str, torch.nn.Parameter]]

_ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
_MUON_MOMENTS = ("momentum_buffer",)
_MOMENTUM = 0.9  # as the policy's Muon has: a short training wants a short memory
_NUM_ITERATIONS = 3
_OUTPUT = "lm_head."


class DraftOptimizer:
    """Updates of a draft's parameters, and what the next one depends on.

    Attributes:
        learning_rate: of the last update.
    """

    def __init__(self, named: Parameters, method: OptimizerMethod) -> None:
        """Begin without moments; `named` are the trained parameters in their order."""
        self._parameters = [parameter for _, parameter in named]
        matrices = [
            parameter
            for name, parameter in named
            if method is OptimizerMethod.MUON and parameter.dim() == 2 and not name.startswith(_OUTPUT)
        ]
        self._by_muon = {id(parameter) for parameter in matrices}
        rest = [parameter for parameter in self._parameters if id(parameter) not in self._by_muon]
        self.learning_rate = 0.0
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        ]
        if matrices:
            dtype = torch.float32 if matrices[0].device.type == "cpu" else torch.bfloat16
            muon = BatchedMuon(matrices, lr=0.0, momentum=_MOMENTUM, num_iterations=_NUM_ITERATIONS, dtype=dtype)
            self._optimizers.append(muon)

    @property
    def steppers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Torch's, one or two."""
        return tuple(self._optimizers)

    def step(self, *, learning_rate: float) -> None:
        """One update by the parameters' gradients."""
        self.learning_rate = learning_rate
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def moments(self) -> dict[str, Tensor]:
        """By `<index of the parameter>.<name>`, sharing memory; none before the first update."""
        found: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            state = self._optimizer_of(parameter).state.get(parameter, {})
            found |= {f"{index}.{name}": state[name] for name in self._names(parameter) if name in state}
        return found

    def restore(self, moments: Mapping[str, Tensor], *, num_updates: int) -> None:
        """Go on from the `moments` after so many updates.

        Raises:
            KeyError: some are missing.
        """
        for index, parameter in enumerate(self._parameters):
            state = self._optimizer_of(parameter).state
            state.pop(parameter, None)
            if not num_updates:
                continue
            names = self._names(parameter)
            own = {name: moments[f"{index}.{name}"].to(parameter.device, copy=True) for name in names}
            # fused AdamW counts where its parameter is
            count = torch.tensor(float(num_updates), device=parameter.device)
            state[parameter] = own if names is _MUON_MOMENTS else {"step": count, **own}

    def _optimizer_of(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        return self._optimizers[1 if id(parameter) in self._by_muon else 0]

    def _names(self, parameter: torch.nn.Parameter) -> tuple[str, ...]:
        return _MUON_MOMENTS if id(parameter) in self._by_muon else _ADAMW_MOMENTS
