"""How a draft is taught: on the policy's hidden states, or on its responses alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.drafts import pretrain
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.distill import distill, heldout_acceptance, num_distilled
from slipstream.drafts.draft_model import scratch_model
from slipstream.drafts.pretrain import DraftProgress, Responses, train_draft
from slipstream.drafts.vocabulary import coverage, frequent_tokens, require_cut
from slipstream.grpo.config import OptimizerConfig
from slipstream.learner.architecture import Architecture
from slipstream.recipe import Recipe
from slipstream.types import TrainBatch
from slipstream.workers.learners import RemoteLearner

logger = logging.getLogger(__name__)

GIVEN = "given"
"""Where a draft lies that training begins with."""

_CHECKPOINT = "checkpoint"
_DRAFT = "draft"


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """What became of a draft that lies where it was to be written."""

    num_parameters: int
    losses: tuple[float, ...]
    heldout: DraftProgress


def prepare(recipe: Recipe, policy: Path, directory: Path) -> None:
    """Check what training begins with, before anything else is done; a draft that is given lies in `GIVEN` then.

    Raises:
        ConfigError: a given draft does not fit, or `draft.vocab_size` is no cut.
    """
    config = recipe.draft
    if config.is_given:
        from slipstream.drafts.eagle3 import bring_draft

        bring_draft(config, policy, directory / GIVEN, max_model_len=recipe.engine.max_model_len)
        logger.info("pretrain_draft: goes on from %s", config.model)
    if config.vocab_size is not None:
        require_cut(config.vocab_size, Architecture.from_hf(policy).vocab_size)


def known_tokens(config: DraftConfig, train: Responses, policy: Path) -> tuple[int, ...] | None:
    """The tokens that a draft of a cut vocabulary knows; None for all."""
    if config.vocab_size is None:
        return None
    answers = [tokens[start:] for tokens, start in zip(train.token_ids, train.prompt_lengths, strict=True)]
    vocab_size = Architecture.from_hf(policy).vocab_size
    token_ids = frequent_tokens(answers, num=config.vocab_size, vocab_size=vocab_size)
    known = 100 * coverage(answers, token_ids)
    logger.info("pretrain_draft: %d of %d tokens make up %.2f %% of the responses", len(token_ids), vocab_size, known)
    return token_ids


def on_states(
    learner: RemoteLearner,
    recipe: Recipe,
    policy: Path,
    train: Responses,
    heldout: Responses,
    *,
    directory: Path,
    on_step: Callable[[int, float], None],
) -> Taught:
    """Teach a one-layer draft the policy's hidden states; it is written to `directory/draft`."""
    config, temperature = recipe.draft, recipe.sampling.temperature
    logger.info("pretrain_draft: trains on %d responses, whose hidden states come first", len(train.token_ids))
    learner.load(policy, None)
    given = directory / GIVEN if config.is_given else None
    num_parameters = learner.start_draft(policy, config, given, known_tokens(config, train, policy))
    losses = train_draft(
        learner, train, config, temperature=temperature, checkpoint=directory / _CHECKPOINT, on_step=on_step
    )
    found = learner.evaluate_draft(heldout.token_ids, heldout.prompt_lengths, config, temperature)
    learner.save_draft(directory / _DRAFT)
    return Taught(num_parameters=num_parameters, losses=tuple(losses), heldout=found)


def on_responses(
    learner: RemoteLearner,
    recipe: Recipe,
    policy: Path,
    train: Responses,
    heldout: Responses,
    *,
    directory: Path,
    on_step: Callable[[int, float], None],
) -> Taught:
    """Teach a small language model what the policy answers; it is written to `directory/draft`."""
    config, temperature = recipe.draft, recipe.sampling.temperature
    logger.info("pretrain_draft: trains a small model on %d responses", len(train.token_ids))
    judged = _batch(heldout)
    learner.load(policy, None)
    of_policy = learner.logprobs(judged, temperature)
    scratch, vocab_size, eos = scratch_model(config, policy)
    optimizer = OptimizerConfig(method=scratch.optimizer, learning_rate=scratch.learning_rate)
    num_parameters = learner.create(scratch, vocab_size, eos, optimizer)
    losses = distill(learner, train, config, scratch, checkpoint=directory / _CHECKPOINT, on_step=on_step)
    of_draft = learner.logprobs(judged, temperature)
    learner.save_hf(directory / _DRAFT, policy)
    found = heldout_acceptance(of_policy, of_draft, num_tokens=config.ttt_steps)
    return Taught(num_parameters=num_parameters, losses=tuple(losses), heldout=found)


def num_done(directory: Path) -> int:
    """How many steps an earlier attempt left."""
    checkpoint = directory / _CHECKPOINT
    return num_distilled(checkpoint) or pretrain.num_done(checkpoint)


def _batch(responses: Responses) -> TrainBatch:
    """What the learner is asked the logprobs of; nothing is trained on it."""
    none = [0.0] * len(responses.token_ids)
    return TrainBatch(
        token_ids=responses.token_ids,
        prompt_lengths=responses.prompt_lengths,
        rollout_logprobs=[
            [0.0] * (len(tokens) - start)
            for tokens, start in zip(responses.token_ids, responses.prompt_lengths, strict=True)
        ],
        advantages=none,
        policy_version=0,
    )
