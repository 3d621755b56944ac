"""A bake-off: train with every drafter from one policy, their steps in turn with those of an autoregressive arm.

Each drafter has an engine and a learner of its own. `tuning.max_live_engines` bounds how many arms live at once, the
autoregressive arm among them; a new autoregressive arm runs beside each group of drafters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts.length import DraftLength
from slipstream.recipe import Recipe, parameters
from slipstream.records.files import read_record
from slipstream.records.stages import DraftRecord
from slipstream.records.steps import ArmRecord
from slipstream.stages.context import RunContext
from slipstream.stages.pretrain_draft import pretrain_draft
from slipstream.stages.recipe_engines import fitting_weights, given_length, started
from slipstream.stages.runs import NOTE, execution_run, tracked
from slipstream.stages.store import finished
from slipstream.stages.support import decode, settled, tokenizer
from slipstream.stages.train_grpo import arm_plan, end_idle, train_arm
from slipstream.study.ranking import StudyRecord, Trained, rank, result_metrics
from slipstream.study.study_page import answers, write_study
from slipstream.study.variants import Grid, Study, Variant, drafter_recipes
from slipstream.tracking.config import ABLATION, KIND_TAG
from slipstream.tracking.spool import RunStatus
from slipstream.train.arm import ArmPlan
from slipstream.train.turns import Turn, in_turn
from slipstream.types import Arm
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)

NODE = Study.BAKE_OFF.node


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """One arm of a group, with all that its training needs: a drafter's, or the autoregressive one."""

    context: RunContext
    recipe: Recipe
    plan: ArmPlan
    pretraining_s: float = 0.0


def check_drafters(context: RunContext, recipe: Recipe, grid: Grid) -> list[str]:
    """Refuse what the recipe cannot do with a drafter before anything expensive starts; return the drafters' names."""
    drafters = drafter_recipes(recipe, grid)
    context.directory(NODE)  # the directory marks the execution as a bake-off
    return [drafter.name for drafter in drafters]


def bake_off(context: RunContext, recipe: Recipe, grid: Grid, *, policy: Path, data: Path) -> Path:
    """Compare the drafters, and list failures with their reasons; return a directory with page, record and figure."""
    done = finished(context, NODE, "bake_off.json") or _compared(context, recipe, grid, policy=policy, data=data)
    record = read_record(StudyRecord, done / "bake_off.json")
    text = " ".join(answers(record))
    with execution_run(context, recipe) as run:  # an attempt that had compared all may have been lost before this
        run.log(result_metrics(record))
        # The kind is that of an ablation: beside executions of the chain, which have two arms, it would be misread.
        run.set_tags({NOTE: text, "num_dropouts": str(len(record.failures)), KIND_TAG: ABLATION})
    logger.info("bake_off: %s", text)
    return done


def _compared(context: RunContext, recipe: Recipe, grid: Grid, *, policy: Path, data: Path) -> Path:
    recipe = settled(context, recipe)
    drafters = drafter_recipes(recipe, grid)
    directory = context.directory(NODE)
    connect()
    with tracked(context, recipe, NODE, {"k": str(grid.draft_lengths[0])}) as tracker:
        members: dict[Variant, _Member] = {}
        ended: dict[Variant, Trained | str] = {}
        for drafter, own in drafters.items():
            part = replace(context, execution=f"{context.execution}/{drafter.name}")
            try:
                members[drafter] = _pretrained(part, drafter, own, policy=policy, data=data)
            except Exception as error:
                logger.exception("bake_off: %s drops out, the others continue", drafter.name)
                ended[drafter] = f"{type(error).__name__}: {error}"
        for number, group in enumerate(_groups(list(members), recipe.tuning.max_live_engines - 1), start=1):
            logger.info("bake_off: %s, their steps in turn", ", ".join(drafter.name for drafter in group))
            ended |= _trained(context, {each: members[each] for each in group}, number, policy=policy, data=data)
        name, dtype = recipe.name, recipe.learner.dtype.value
        record = rank(Study.BAKE_OFF, ended, execution=context.execution, recipe=name, dtype=dtype)
        for path in write_study(record, directory):
            tracker.log_artifact(path)
        tracker.log(result_metrics(record))
    return directory


def _pretrained(context: RunContext, drafter: Variant, recipe: Recipe, *, policy: Path, data: Path) -> _Member:
    """Pretrain the draft of a drafter; drafters that differ only in training during RL share one draft."""
    execution_run(context, recipe, params=parameters(recipe)).detach()
    try:
        length = given_length(recipe, drafter.setting.num_speculative_tokens)
        draft = pretrain_draft(context, recipe, policy=policy, data=data)
        fitting_weights(recipe, policy, draft)
        return _Member(
            context=context,
            recipe=recipe,
            plan=arm_plan(recipe, Arm.SPECULATIVE, policy=policy, draft=draft, length=length, label=drafter.name),
            pretraining_s=read_record(DraftRecord, draft / "draft.json").elapsed_s if drafter.setting.init else 0.0,
        )
    except Exception:
        execution_run(context, recipe).close(RunStatus.FAILED)
        raise


def _groups(drafters: Sequence[Variant], size: int) -> Iterator[Sequence[Variant]]:
    """Groups of at most `size` drafters, as even as possible."""
    num = -(-len(drafters) // size)
    for index in range(num):
        yield drafters[index * len(drafters) // num : (index + 1) * len(drafters) // num]


def _trained(
    context: RunContext, group: Mapping[Variant, _Member], number: int, *, policy: Path, data: Path
) -> dict[Variant, Trained | str]:
    """Train one group beside an autoregressive arm of its own, whose failure ends the group, and is raised.

    Drafters that went on without it would be compared with steps that a retry times later.
    """
    alone, recipe = f"autoregressive-{number}", next(iter(group.values())).recipe
    own = replace(context, execution=f"{context.execution}/{alone}")
    execution_run(own, recipe, params=parameters(recipe)).detach()
    length = DraftLength(num_speculative_tokens=0)
    plan = arm_plan(recipe, Arm.AUTOREGRESSIVE, policy=policy, draft=None, length=length)
    members = {alone: _Member(context=own, recipe=recipe, plan=plan), **{each.name: m for each, m in group.items()}}
    starting = threading.Semaphore(recipe.layout.num_starting)
    end_idle()
    prompts, text = read_prompt_sets(data).train, decode(tokenizer(policy))  # imports, before several threads would
    given = {"starting": starting, "policy": policy, "prompts": prompts, "decode": text}
    arms = in_turn({name: partial(_train, member, **given) for name, member in members.items()}, needed=[alone])
    if isinstance(arms[alone], BaseException):
        raise arms[alone]
    ended: dict[Variant, Trained | str] = {}
    for drafter, member in group.items():
        arm = arms[drafter.name]
        if isinstance(arm, BaseException):
            logger.error("bake_off: %s dropped out, the others continued", drafter.name, exc_info=arm)
            ended[drafter] = f"{type(arm).__name__}: {arm}"
        else:
            ended[drafter] = Trained(arm=arm, baseline=arms[alone], pretraining_s=member.pretraining_s)
    return ended


def _train(member: _Member, turn: Turn, *, starting: threading.Semaphore, **given: Any) -> ArmRecord:
    """Train one arm, a step at a time; its MLflow run ends with the training."""
    plan = replace(member.plan, start_engine=lambda: started(member.plan.start_engine(), starting))
    with execution_run(member.context, member.recipe) as tracker:
        directory = member.context.directory("train_grpo")
        return train_arm(tracker, turn, recipe=member.recipe, plan=plan, directory=directory, **given)
