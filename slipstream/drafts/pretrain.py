"""Draft pretraining: the policy's own responses, its frozen hidden states, a one-layer EAGLE-3 draft.

Resumable: responses and draft checkpoints lie in the stage's directory, and each batch is a pure function of the
seed and the step.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipstream.drafts.config import DraftConfig
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines
from slipstream.records.files import write_atomic
from slipstream.types import Prompt, RolloutGroup

logger = logging.getLogger(__name__)

_LOSSES = "losses.json"
_SEED_OFFSET = 7919  # draft responses and training rollouts must not share engine seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftProgress:
    """Held-out acceptance of a draft: by position given the tokens before, and over the window."""

    rate_by_position: tuple[float, ...]
    mean_acceptance_length: float


class DraftLearner(Protocol):
    """The learner, as far as draft training needs it."""

    def hold_draft_chats(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], config: DraftConfig
    ) -> bool:
        """Take the chats that `draft_step` names by index; whether their hidden states fit the cache."""
        ...

    def draft_step(self, indices: Sequence[int], config: DraftConfig, temperature: float) -> float:
        """One update of the draft at the temperature of the responses; returns its loss."""
        ...

    def save_draft_checkpoint(self, path: Path) -> None:
        """Write what resumed draft training needs."""
        ...

    def load_draft_checkpoint(self, path: Path) -> None:
        """Restore it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """Chats of the policy: tokens of prompt and response, and where the response begins."""

    token_ids: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]

    def batch(self, step: int, *, num_tokens: int, seed: int) -> list[int]:
        """Indices of distinct chats of about `num_tokens` tokens, drawn by seed and step alone."""
        order = list(range(len(self.token_ids)))
        random.Random(f"{seed}/draft/{step}").shuffle(order)
        taken, chosen = 0, []
        for index in order:
            if chosen and taken + len(self.token_ids[index]) > num_tokens:
                break
            chosen.append(index)
            taken += len(self.token_ids[index])
        return chosen

    def select(self, indices: Sequence[int]) -> Responses:
        """These chats."""
        return Responses(
            token_ids=tuple(self.token_ids[i] for i in indices),
            prompt_lengths=tuple(self.prompt_lengths[i] for i in indices),
        )


def regenerate(
    engine: Engines, prompts: Sequence[Prompt], *, config: DraftConfig, sampling: SamplingConfig
) -> tuple[Responses, float]:
    """What the engine's policy answers to `prompts`, and the seconds that it took."""
    result = engine.generate(
        prompts, sampling=sampling, group_size=config.samples_per_prompt, seed=config.seed + _SEED_OFFSET
    )
    return _join(result.groups), result.generation_s


def write_responses(responses: Responses, path: Path) -> None:
    """Keep `responses` for a resumed attempt."""
    kept = {"token_ids": responses.token_ids, "prompt_lengths": responses.prompt_lengths}
    write_atomic(path, json.dumps(kept).encode())


def read_responses(path: Path) -> Responses:
    """Read what `write_responses` wrote."""
    kept = json.loads(path.read_text())
    return Responses(token_ids=tuple(map(tuple, kept["token_ids"])), prompt_lengths=tuple(kept["prompt_lengths"]))


def train_draft(
    learner: DraftLearner,
    train: Responses,
    config: DraftConfig,
    *,
    temperature: float,
    checkpoint: Path,
    on_step: Callable[[int, float], None],
) -> list[float]:
    """Train to the last step, from the checkpoint of an earlier attempt if there is one; the loss of every step.

    Args:
        temperature: at which the responses were sampled.
    """
    progress = checkpoint / _LOSSES
    losses: list[float] = []
    if progress.is_file():
        losses = json.loads(progress.read_text())
        learner.load_draft_checkpoint(checkpoint / f"step-{len(losses)}")
        logger.info("pretrain_draft: going on from step %d", len(losses))
    if not learner.hold_draft_chats(train.token_ids, train.prompt_lengths, config):
        fix = "raise it, where there is memory, to compute them once"
        logger.info("pretrain_draft: hidden states exceed draft.states_cache_gib and come at each step; %s", fix)
    for step in range(len(losses), config.num_steps):
        chosen = train.batch(step, num_tokens=config.tokens_per_step, seed=config.seed)
        losses.append(learner.draft_step(chosen, config, temperature))
        on_step(step, losses[-1])
        if len(losses) % config.checkpoint_every_steps == 0 and len(losses) < config.num_steps:
            learner.save_draft_checkpoint(checkpoint / f"step-{len(losses)}")
            write_atomic(progress, json.dumps(losses).encode())
    return losses


def num_done(checkpoint: Path) -> int:
    """How many steps an earlier attempt left in `checkpoint`."""
    progress = checkpoint / _LOSSES
    return len(json.loads(progress.read_text())) if progress.is_file() else 0


def _join(groups: Sequence[RolloutGroup]) -> Responses:
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    return Responses(
        token_ids=tuple(prompt.token_ids + rollout.token_ids for prompt, rollout in pairs),
        prompt_lengths=tuple(len(prompt.token_ids) for prompt, _ in pairs),
    )
