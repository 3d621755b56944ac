"""Next-token pretraining of a policy from random weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from slipstream.learner.config import ScratchConfig

Document = tuple[Sequence[int], int]
"""Token ids, and the index from which they are learned (0: all of them)."""


class Step(Protocol):
    """One update on the next-token loss, in this process or in another; returns the mean loss a learned token."""

    def __call__(
        self, sequences: Sequence[Sequence[int]], loss_starts: Sequence[int], *, learning_rate: float | None = None
    ) -> float:
        """Update, with `learning_rate` or the optimizer's own."""
        ...


def pretrain(
    lm_step: Step,
    documents: Iterable[Document],
    config: ScratchConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train for `config.num_steps` updates of about `config.tokens_per_step` tokens each.

    Args:
        lm_step: of a learner that was made with random weights.
        documents: taken in order; a sequence starts again when it is exhausted, an iterator must not run out.
        on_step: told each step, from 0, and its loss.
    Returns:
        Mean loss a learned token of every step, in nats.
    Raises:
        ValueError: `documents` ended before the last step.
    """
    stream = itertools.cycle(documents) if isinstance(documents, Sequence) else iter(documents)
    losses = []
    for step in range(config.num_steps):
        batch = _take(stream, config.tokens_per_step)
        if not batch:
            raise ValueError(f"documents ended after {step} of {config.num_steps} pretraining steps")
        sequences, loss_starts = zip(*batch, strict=True)
        loss = lm_step(sequences, loss_starts, learning_rate=learning_rate_at(step, config))
        losses.append(loss)
        on_step(step, loss)
    return losses


def learning_rate_at(step: int, config: ScratchConfig) -> float:
    """Linear warmup to `config.learning_rate`, then a straight line that would reach zero one step after the last."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return config.learning_rate * (config.num_steps - step) / (config.num_steps - config.warmup_steps)


def _take(stream: Iterator[Document], num_tokens: int) -> list[Document]:
    """Documents until they hold `num_tokens` tokens: the last one is taken whole."""
    batch: list[Document] = []
    taken = 0
    while taken < num_tokens:
        document = next(stream, None)
        if document is None:
            break
        batch.append(document)
        taken += len(document[0])
    return batch
