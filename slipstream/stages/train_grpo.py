"""Train one arm with GRPO."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts.length import DraftLength, described
from slipstream.grpo.loop_config import LoopConfig
from slipstream.recipe import Recipe, parameters
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import DraftRecord
from slipstream.stages.context import RunContext, arm_node, require_loop
from slipstream.stages.recipe_engines import draft_length, draft_weights, recipe_engine
from slipstream.stages.runs import tracked
from slipstream.stages.store import finished
from slipstream.stages.support import decode, draft_init, settled, tokenizer, versions
from slipstream.train.arm import ArmPlan, train
from slipstream.types import Arm, ArmLoop, arm_name
from slipstream.workers.session import accelerators, connect

logger = logging.getLogger(__name__)


def train_grpo(  # one input a record, and which arm
    context: RunContext,
    recipe: Recipe,
    arm: Arm,
    *,
    policy: Path,
    data: Path,
    draft: Path,
    tuning: Path,
    loop: ArmLoop = ArmLoop.SYNCHRONOUS,
) -> Path:
    """Train one arm, going on from its last checkpoint if an attempt left one; arm.json and the final policy.

    Args:
        loop: the recipe's own, or the synchronous one that it is compared with.
    Raises:
        ConfigError: the recipe is synchronous, and the arm is to be asynchronous.
    """
    node = arm_node(arm, loop)
    done = finished(context, node, "arm.json")
    if done is not None:
        return done
    recipe = in_loop(settled(context, recipe), loop)
    directory = context.directory(node)
    length = draft_length(recipe, tuning) if arm is Arm.SPECULATIVE else DraftLength(num_speculative_tokens=0)
    logger.info("%s: k=%s, %d steps; learner and engine start first", node, length.label, recipe.grpo.num_steps)
    labels = arm_labels(recipe, arm, length)
    connect()
    with tracked(
        context,
        recipe,
        node,
        labels,
        name=f"{context.execution} {arm_name(arm, loop)}",
        params={**parameters(recipe), **labels, **_table(length)},
        gpu=accelerators(),
    ) as tracker:
        plan = arm_plan(recipe, arm, policy=policy, draft=draft, length=length, label=arm_name(arm, loop))
        sets = read_prompt_sets(data)
        record = train(
            recipe,
            replace(plan, validation=sets.validation),
            policy=policy,
            prompts=sets.train,
            decode=decode(tokenizer(policy)),
            directory=directory,
            log=tracker.log,
        )
        record = replace(record, versions=versions())
        tracker.log_artifact(write_record(record, directory / "arm.json"))
    return directory


def in_loop(recipe: Recipe, loop: ArmLoop) -> Recipe:
    """The recipe as an arm is trained with it in that loop.

    Raises:
        ConfigError: it has no asynchronous loop.
    """
    if loop is ArmLoop.SYNCHRONOUS:
        return replace(recipe, loop=LoopConfig())
    require_loop(recipe, loop)
    return recipe


def arm_plan(recipe: Recipe, arm: Arm, *, policy: Path, draft: Path, length: DraftLength, label: str = "") -> ArmPlan:
    """How an arm is trained that drafts by `length`.

    Args:
        draft: what `pretrain_draft` made; nothing reads it where nothing is drafted.
        label: see `ArmPlan`.
    """
    k = length.num_speculative_tokens
    return ArmPlan(
        arm=arm,
        num_speculative_tokens=k,
        schedule=length.schedule,
        draft=draft_weights(recipe.draft, draft) if k else None,
        draft_length=known_length(draft, k) if k else None,
        start_engine=partial(
            recipe_engine, recipe, policy, draft, k, schedule=length.schedule, kv_cache=recipe.loop.in_flight_kv_cache
        ),
        label=label,
    )


def known_length(draft: Path, k: int) -> float | None:
    """Mean acceptance length at `k`, or more, of a draft on held-out text; None of one that was not measured."""
    file = draft / "draft.json"
    if not file.is_file():
        return None
    rates = read_record(DraftRecord, file).heldout_rate_by_position
    if not rates:  # taken as it was
        return None
    return 1.0 + sum(math.prod(rates[: i + 1]) for i in range(min(k, len(rates))))


def _table(length: DraftLength) -> dict[str, str]:
    """The draft length by running batch, as a parameter, where there is more than one."""
    return {"k_by_batch": described(length.schedule)} if length.label == "by_batch" else {}


def arm_labels(recipe: Recipe, arm: Arm, length: DraftLength) -> dict[str, str]:
    """What sets an arm's run apart from the others': parameters and tags alike. Without drafting it has no draft.

    Args:
        recipe: of the arm: in its own loop.
    """
    drafts = {"draft.method": recipe.draft.method.value, "draft.init": draft_init(recipe.draft)}
    speculates = length.num_speculative_tokens > 0
    return {
        "arm": arm.value,
        "k": length.label,
        "loop": recipe.loop.mode.value,
        "max_off_policy_steps": str(recipe.loop.max_off_policy_steps),
        **(drafts if speculates else dict.fromkeys(drafts, "none")),
    }
