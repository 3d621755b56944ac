"""A draft that goes on learning while RL runs, from what the policy's own training pass leaves behind.

Legend: `V` vocabulary, `H` hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from slipstream.drafts.chats import States
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.trainer import DraftTrainer
from slipstream.policy.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NUM_STEPS = "num_steps"
# Adam's first updates move every weight by nearly the whole learning rate, which sets a good draft back.
_WARMUP_UPDATES = 5
_CPU = torch.device("cpu")


class OnlineDraft(DraftTrainer):
    """A pretrained draft with a fresh optimizer, whose learning rate stays, after a few updates, as it is."""

    @classmethod
    def of(
        cls,
        draft: Path,
        policy: Path,
        config: DraftConfig,
        *,
        num_threads: int | None = None,
        device: torch.device = _CPU,
    ) -> Self:
        """Go on from the saved `draft` of `policy`.

        Raises:
            ConfigError: it is no draft, or one that reads other layers than `config` names.
        """
        return cls.from_draft(draft, policy, config, num_threads=num_threads, device=device)

    def learn(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        states: States,
        *,
        temperature: float,
        num_ranks: int = 1,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> float:
        """`online_updates` updates, each on other sequences; returns their mean loss. See `DraftTrainer.step`.

        Args:
            num_ranks: that share an update's tokens.
        """
        config = self._config
        parts = drawn(
            [len(tokens) for tokens in sequences],
            num_parts=config.online_updates,
            num_tokens=config.tokens_per_step // num_ranks,
            seed=f"{config.seed}/online/{self._num_steps}",
        )
        losses = [
            self.step(
                [sequences[i] for i in part],
                [prompt_lengths[i] for i in part],
                [states[i] for i in part],
                temperature=temperature,
                sum_over_ranks=sum_over_ranks,
            )
            for part in parts
        ]
        return sum(losses) / len(losses)

    def state(self) -> dict[str, Tensor]:
        """All that its next update depends on; the tensors share memory with it."""
        found = {_NUM_STEPS: torch.tensor([self._num_steps])}
        for index, parameter in enumerate(self._trained):
            found[f"{index}.parameter"] = parameter.detach()
            found |= {f"{index}.{name}": self._optimizer.state[parameter][name] for name in _MOMENTS if self._num_steps}
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`, bit for bit.

        Raises:
            CheckpointError: it is none of this draft.
        """
        expected = {f"{index}.parameter": each.shape for index, each in enumerate(self._trained)}
        if any(name not in state or state[name].shape != shape for name, shape in expected.items()):
            raise CheckpointError(
                f"the checkpoint must hold the draft's {len(expected)} trained tensors, got {len(state)} others: it is "
                "of another draft, or of a run that trained none"
            )
        self._num_steps = int(state[_NUM_STEPS])
        for index, parameter in enumerate(self._trained):
            parameter.copy_(state[f"{index}.parameter"])
            self._optimizer.state.pop(parameter, None)
            if self._num_steps:
                moments = {name: state[f"{index}.{name}"].to(parameter.device) for name in _MOMENTS}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(self._num_steps)), **moments}

    def _learning_rate(self) -> float:
        return self._config.online_learning_rate * min(1.0, (self._num_steps + 1) / _WARMUP_UPDATES)


def drawn(lengths: Sequence[int], *, num_parts: int, num_tokens: int, seed: str) -> list[list[int]]:
    """Parts of some sequences in a random order, none twice, of `num_tokens` tokens at most or of one sequence.

    A part is empty where there are more parts than sequences.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    parts: list[list[int]] = []
    for number in range(num_parts):
        part, taken = [], 0
        for index in order[number::num_parts]:
            if part and taken + lengths[index] > num_tokens:
                break
            part.append(index)
            taken += lengths[index]
        parts.append(part)
    return parts
