"""A draft that goes on learning while RL runs, from what the policy's own training pass leaves behind.

Legend: `V` vocabulary, `H` hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.drafts.chats import States
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.trainer import DraftTrainer
from slipstream.grpo.config import OptimizerMethod
from slipstream.learner.checkpoint import CheckpointError

_NUM_STEPS = "num_steps"
# Adam's first updates move every weight by nearly the whole learning rate, which sets a good draft back.
_WARMUP_UPDATES = 5


class OnlineDraft(DraftTrainer):
    """A pretrained draft with a fresh optimizer, whose learning rate stays, after a few updates, as it is."""

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
        """Learn from the rollouts of a step; returns the mean loss. See `DraftTrainer.step` and `learned`."""
        return learned(
            partial(self.step, temperature=temperature, sum_over_ranks=sum_over_ranks),
            (sequences, prompt_lengths, states),
            config=self._config,
            num_updates=self._num_steps,
            num_ranks=num_ranks,
        )

    def state(self) -> dict[str, Tensor]:
        """All that its next update depends on; the tensors share memory with it."""
        self._memory.take()
        found = {_NUM_STEPS: torch.tensor([self._num_steps])}
        for index, parameter in enumerate(self._trained):
            found[f"{index}.parameter"] = parameter.detach()
        return found | self._optimizer.moments()

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
        self._memory.take()
        self._num_steps = int(state[_NUM_STEPS])
        for index, parameter in enumerate(self._trained):
            parameter.copy_(state[f"{index}.parameter"])
        self._optimizer.restore(state, num_updates=self._num_steps)

    def _learning_rate(self) -> float:
        return self._config.online_learning_rate * min(1.0, (self._num_steps + 1) / _WARMUP_UPDATES)

    def _num_passes(self) -> int:
        return self._config.online_passes

    def _optimizer_method(self) -> OptimizerMethod:
        return self._config.online_optimizer


def learned(
    step: Callable[[Sequence[Sequence[int]], Sequence[int], States], float],
    rollouts: tuple[Sequence[Sequence[int]], Sequence[int], States],
    *,
    config: DraftConfig,
    num_updates: int,
    num_ranks: int,
) -> float:
    """`online_updates` updates by `step`, each on other sequences; returns their mean loss.

    Args:
        rollouts: sequences, prompt lengths and hidden states.
        num_updates: so far: every step of training draws anew.
        num_ranks: that share an update's tokens.
    """
    sequences, prompt_lengths, states = rollouts
    parts = drawn(
        [len(tokens) for tokens in sequences],
        num_parts=config.online_updates,
        num_tokens=config.online_tokens // num_ranks,
        seed=f"{config.seed}/online/{num_updates}",
    )
    losses = [
        step([sequences[i] for i in part], [prompt_lengths[i] for i in part], [states[i] for i in part])
        for part in parts
    ]
    return sum(losses) / len(losses)


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
