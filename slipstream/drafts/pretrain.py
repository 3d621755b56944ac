"""Draft pretraining on the policy's own responses, and the draft's vocabulary.

Pretraining resumes from responses and checkpoints in the stage's directory, and a batch is a pure function of seed and
step. A large vocabulary can be cut to the tokens that the policy's responses use most.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.learner_draft import sample_parts
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.files import write_atomic
from slipstream.storage import remove
from slipstream.types import Prompt

logger = logging.getLogger(__name__)

_LOSSES = "losses.json"
_SEED_OFFSET = 7919  # draft responses and training rollouts must not share engine seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftProgress:
    """Held-out acceptance of a draft: by position given the tokens before, and mean acceptance length."""

    rate_by_position: tuple[float, ...]
    mean_acceptance_length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """Chats with the policy's responses: tokens of prompt and response, and prompt lengths."""

    token_ids: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]

    def batch(self, step: int, *, num_tokens: int, seed: int) -> list[int]:
        """Sample indices of distinct chats with about `num_tokens` tokens, a pure function of seed and step."""
        lengths = [len(tokens) for tokens in self.token_ids]
        return sample_parts(lengths, num_parts=1, num_tokens=num_tokens, seed=f"{seed}/draft/{step}")[0]

    def select(self, indices: Sequence[int]) -> Responses:
        """Return the chats with these indices."""
        return Responses(
            token_ids=tuple(self.token_ids[i] for i in indices),
            prompt_lengths=tuple(self.prompt_lengths[i] for i in indices),
        )


def regenerate(
    engine: Engines, prompts: Sequence[Prompt], *, config: DraftConfig, sampling: SamplingConfig
) -> tuple[Responses, float]:
    """Generate the policy's responses to `prompts`; returns them and the seconds of generation."""
    seed, group_size = config.seed + _SEED_OFFSET, config.pretrain.samples_per_prompt
    result = engine.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)
    pairs = [(group.prompt.token_ids, rollout) for group in result.groups for rollout in group.rollouts]
    responses = Responses(
        token_ids=tuple(prompt + rollout.token_ids for prompt, rollout in pairs),
        prompt_lengths=tuple(len(prompt) for prompt, _ in pairs),
    )
    return responses, result.generation_s


def write_responses(responses: Responses, path: Path) -> None:
    """Store `responses` for a resumed attempt."""
    kept = {"token_ids": responses.token_ids, "prompt_lengths": responses.prompt_lengths}
    write_atomic(path, json.dumps(kept).encode())


def read_responses(path: Path) -> Responses:
    """Read what `write_responses` wrote."""
    kept = json.loads(path.read_text())
    return Responses(token_ids=tuple(map(tuple, kept["token_ids"])), prompt_lengths=tuple(kept["prompt_lengths"]))


def train_draft(
    train: Responses,
    config: DraftConfig,
    *,
    update: Callable[[int, list[int]], float],
    save: Callable[[Path], None],
    load: Callable[[Path], object],
    hold: Callable[[], bool] = lambda: True,
    checkpoint: Path,
    on_step: Callable[[int, float], None],
) -> list[float]:
    """Train to the last step, from an earlier attempt's checkpoint if there is one; returns the loss of every step.

    Args:
        update: updates the draft on the chats with the given indices in the given step; returns the loss.
        save: writes the draft's checkpoint.
        load: reads the draft's checkpoint.
        hold: computes the chats' hidden states once; returns False if they exceed the cache.
    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    plan, progress = config.pretrain, checkpoint / _LOSSES
    losses: list[float] = json.loads(progress.read_text()) if progress.is_file() else []
    num_saved = len(losses)
    if losses:
        try:
            load(checkpoint / f"step-{num_saved}")
        except (CheckpointError, FileNotFoundError) as error:
            raise CheckpointError(f"{error}; remove {checkpoint} to train the draft anew") from error
        logger.info("pretrain_draft: resuming at step %d", num_saved)
    if not hold():
        text = "pretrain_draft: hidden states exceed %s and are computed in each step; raise it if memory allows"
        logger.info(text, "draft.pretrain.states_cache_gib")
    for step in range(num_saved, plan.num_steps):
        losses.append(update(step, train.batch(step, num_tokens=plan.tokens_per_step, seed=config.seed)))
        on_step(step, losses[-1])
        if len(losses) % plan.checkpoint_every_steps == 0 and len(losses) < plan.num_steps:
            save(checkpoint / f"step-{len(losses)}")
            write_atomic(progress, json.dumps(losses).encode())
            remove(checkpoint / f"step-{num_saved}")
            num_saved = len(losses)
    return losses


def num_done(checkpoint: Path) -> int:
    """Return the number of steps that an earlier attempt completed."""
    progress = checkpoint / _LOSSES
    return len(json.loads(progress.read_text())) if progress.is_file() else 0


def require_cut(num: int, vocab_size: int, *, field: str = "draft.eagle3.vocab_size") -> None:
    """Reject a draft's vocabulary, the recipe's `field`, that is empty or not smaller than the policy's."""
    fix = "null keeps the whole vocabulary"
    require(0 < num < vocab_size, field, f"must be < the policy's {vocab_size} tokens", num, fix)


def frequent_tokens(responses: Iterable[Sequence[int]], *, num: int, vocab_size: int) -> tuple[int, ...]:
    """Return the `num` most frequent tokens in ascending order; ties go to the smaller id.

    Source: `build_vocab_mappings_from_distribution` of speculators 0.9.
    """
    counts = Counter(itertools.chain.from_iterable(responses))
    by_count = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return tuple(sorted(by_count[:num]))


def coverage(responses: Iterable[Sequence[int]], token_ids: Iterable[int]) -> float:
    """Return the fraction of the tokens in `responses` that are among `token_ids`."""
    counts = Counter(itertools.chain.from_iterable(responses))
    return sum(counts[token] for token in set(token_ids)) / max(counts.total(), 1)
