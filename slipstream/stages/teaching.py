"""How a draft is taught: on the policy's hidden states, or on its responses alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.drafts import pretrain
from slipstream.drafts.distill import distill, heldout_acceptance, num_distilled
from slipstream.drafts.draft_model import scratch_model
from slipstream.drafts.pretrain import DraftProgress, Responses, train_draft
from slipstream.grpo.config import OptimizerConfig
from slipstream.recipe import Recipe
from slipstream.types import TrainBatch
from slipstream.workers.learners import RemoteLearner

logger = logging.getLogger(__name__)

_CHECKPOINT = "checkpoint"
_DRAFT = "draft"


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """What became of a draft that lies where it was to be written."""

    num_parameters: int
    losses: tuple[float, ...]
    heldout: DraftProgress


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
    config = recipe.draft
    logger.info("pretrain_draft: trains on %d responses, whose hidden states come first", len(train.token_ids))
    learner.load(policy, None)
    num_parameters = learner.start_draft(policy, config)
    losses = train_draft(learner, train, config, checkpoint=directory / _CHECKPOINT, on_step=on_step)
    found = learner.evaluate_draft(heldout.token_ids, heldout.prompt_lengths, config)
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
