"""Train one arm with GRPO."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from slipstream.data.prompts import read_prompt_sets
from slipstream.recipe import Recipe, parameters
from slipstream.records import DraftRecord, TuningRecord, read_record, write_record
from slipstream.stages.context import RunContext
from slipstream.stages.store import finished
from slipstream.stages.support import (
    decode,
    draft_init,
    draft_weights,
    recipe_engine,
    settled,
    tokenizer,
    tracked,
    versions,
)
from slipstream.train.arm import ArmPlan, train
from slipstream.types import Arm
from slipstream.workers.cluster import accelerators
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)


def train_grpo(
    context: RunContext, recipe: Recipe, arm: Arm, *, policy: Path, data: Path, draft: Path, tuning: Path
) -> Path:
    """Train one arm, going on from its last checkpoint if an attempt left one; arm.json and the final policy."""
    node = f"train_grpo_{arm.value}"
    done = finished(context, node, "arm.json")
    if done is not None:
        return done
    recipe = settled(context, recipe)
    directory = context.directory(node)
    chosen_k = read_record(TuningRecord, tuning / "tuning.json").chosen_k if arm is Arm.SPECULATIVE else 0
    logger.info("%s: k=%d, %d steps; learner and engine start first", node, chosen_k, recipe.grpo.num_steps)
    labels = arm_labels(recipe, arm, chosen_k)
    connect()
    with tracked(
        context,
        recipe,
        node,
        labels,
        name=f"{context.execution} {arm.value}",
        params={**parameters(recipe), **labels},
        gpu=accelerators(),
    ) as tracker:
        record = train(
            recipe,
            ArmPlan(
                arm=arm,
                num_speculative_tokens=chosen_k,
                draft=draft_weights(recipe.draft, draft) if chosen_k else None,
                draft_length=known_length(draft, chosen_k) if chosen_k else None,
                start_engine=partial(recipe_engine, recipe, policy, draft, chosen_k),
            ),
            policy=policy,
            prompts=read_prompt_sets(data).train,
            decode=decode(tokenizer(policy)),
            directory=directory,
            log=tracker.log,
        )
        record = replace(record, versions=versions())
        tracker.log_artifact(write_record(record, directory / "arm.json"))
    return directory


def known_length(draft: Path, k: int) -> float | None:
    """Mean acceptance length at `k`, or more, of a draft on held-out text; None of one not measured."""
    file = draft / "draft.json"
    if not file.is_file():
        return None
    rates = read_record(DraftRecord, file).heldout_rate_by_position
    if not rates:  # taken as it was
        return None
    return 1.0 + sum(math.prod(rates[: i + 1]) for i in range(min(k, len(rates))))


def arm_labels(recipe: Recipe, arm: Arm, k: int) -> dict[str, str]:
    """What sets an arm's run apart from the other's: parameters and tags alike. Without drafting it has no draft."""
    drafts = {"draft.method": recipe.draft.method.value, "draft.init": draft_init(recipe.draft)}
    return {"arm": arm.value, "k": str(k), **(drafts if k else dict.fromkeys(drafts, "none"))}
