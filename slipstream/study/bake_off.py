"""Train with every drafter from one policy, their steps in turn with those of an autoregressive arm.

Each drafter has an engine and a learner of its own. As many live at once as `tuning.max_live_engines` allows, the
autoregressive arm among them; it runs anew beside each such group.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts.length import DraftLength
from slipstream.recipe import Recipe, parameters
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import DraftRecord
from slipstream.records.steps import ArmRecord
from slipstream.stages.context import RunContext
from slipstream.stages.execution import NOTE
from slipstream.stages.pretrain_draft import pretrain_draft
from slipstream.stages.recipe_engines import draft_weights
from slipstream.stages.runs import execution_run, tracked
from slipstream.stages.store import finished
from slipstream.stages.support import decode, settled, tokenizer
from slipstream.stages.train_grpo import arm_plan
from slipstream.study.bake_off_field import entrant_recipe
from slipstream.study.bake_off_page import write_bake_off
from slipstream.study.bake_off_ranking import answer, judge, ranked, result_metrics
from slipstream.study.bake_off_records import BakeOffRecord, Dropout, Entrant, Result
from slipstream.tracking import ABLATION, KIND_TAG, RunStatus, Tracker
from slipstream.train.arm import ArmPlan, train
from slipstream.train.turns import Stopped, Turn, in_turn
from slipstream.types import Arm, Prompt
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)

NODE = "bake_off"
_BASELINE = "autoregressive"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """One arm of a group: an entrant, or the autoregressive one."""

    context: RunContext
    recipe: Recipe
    plan: ArmPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """An entrant whose draft is there."""

    entrant: Entrant
    context: RunContext
    recipe: Recipe
    draft: Path
    pretraining_s: float


def check_drafters(context: RunContext, recipe: Recipe, field: Sequence[Entrant], *, k: int) -> None:
    """Refuse what the recipe cannot do with one of the entrants, before anything expensive starts.

    Raises:
        ConfigError: the error names the entrant.
    """
    for entrant in field:
        entrant_recipe(recipe, entrant, k)
    context.directory(NODE)  # by which an execution is known for a bake-off


def bake_off(
    context: RunContext, recipe: Recipe, field: Sequence[Entrant], *, k: int, policy: Path, data: Path
) -> Path:
    """Compare the entrants; a directory with bake_off.html, bake_off.json and a figure.

    One that fails is in the table with its reason, and the others go on.

    Args:
        k: draft tokens an iteration, the same for all.
    """
    done = finished(context, NODE, "bake_off.json")
    if done is not None:
        return done
    recipe = settled(context, recipe)
    directory = context.directory(NODE)
    connect()
    with tracked(context, recipe, NODE, {"k": str(k)}) as tracker:
        ready, dropouts = _pretrained(context, recipe, field, k=k, policy=policy, data=data)
        results: list[Result] = []
        for number, group in enumerate(_groups(ready, recipe.tuning.max_live_engines - 1), start=1):
            logger.info("bake_off: %s, their steps in turn", ", ".join(each.entrant.name for each in group))
            found, lost = _compared(context, recipe, group, number=number, k=k, policy=policy, data=data)
            results += found
            dropouts += lost
        record = BakeOffRecord(
            execution=context.execution,
            recipe=recipe.name,
            workload=recipe.workload.value,
            dtype=recipe.learner.dtype.value,
            results=ranked(results),
            dropouts=tuple(dropouts),
        )
        for path in write_bake_off(record, directory):
            tracker.log_artifact(path)
        tracker.log(result_metrics(record))
    run = execution_run(context, recipe)
    run.log(result_metrics(record))
    # Of many arms, as an ablation is: beside executions of the chain, which have two, it would be misread.
    run.set_tags({NOTE: answer(record), "num_dropouts": str(len(record.dropouts)), KIND_TAG: ABLATION})
    run.close()
    logger.info("bake_off: %s", answer(record))
    return directory


def _pretrained(
    context: RunContext, recipe: Recipe, field: Sequence[Entrant], *, k: int, policy: Path, data: Path
) -> tuple[list[_Ready], list[Dropout]]:
    """The drafts of all entrants; those that differ in their training during RL alone share one."""
    from slipstream.drafts.compatibility import require_fit

    ready: list[_Ready] = []
    dropouts: list[Dropout] = []
    for entrant in field:
        own = replace(context, execution=f"{context.execution}/{entrant.name}")
        theirs = entrant_recipe(recipe, entrant, k)
        execution_run(own, theirs, params=parameters(theirs)).detach()
        try:
            draft = pretrain_draft(own, theirs, policy=policy, data=data)
            weights = draft_weights(theirs.draft, draft)
            require_fit(theirs.draft, policy, weights, max_model_len=theirs.engine.max_model_len)
        except Exception as error:
            execution_run(own, theirs).close(RunStatus.FAILED)
            logger.exception("bake_off: %s drops out, the others go on", entrant.name)
            dropouts.append(_dropout(entrant, error))
            continue
        seconds = read_record(DraftRecord, draft / "draft.json").elapsed_s if entrant.init is not None else 0.0
        ready.append(_Ready(entrant=entrant, context=own, recipe=theirs, draft=draft, pretraining_s=seconds))
    return ready, dropouts


def _groups(ready: Sequence[_Ready], size: int) -> Iterator[Sequence[_Ready]]:
    """Of `size` at most, as even as can be."""
    num = -(-len(ready) // size)
    for index in range(num):
        yield ready[index * len(ready) // num : (index + 1) * len(ready) // num]


def _compared(
    context: RunContext, recipe: Recipe, group: Sequence[_Ready], *, number: int, k: int, policy: Path, data: Path
) -> tuple[list[Result], list[Dropout]]:
    """One group beside an autoregressive arm of its own.

    Raises:
        Exception: that arm failed: there is nothing to compare with.
    """
    alone = replace(context, execution=f"{context.execution}/{_BASELINE}-{number}")
    base_recipe = entrant_recipe(recipe, group[0].entrant, k)
    execution_run(alone, base_recipe, params=parameters(base_recipe)).detach()
    members = {
        _BASELINE: _Member(
            context=alone,
            recipe=base_recipe,
            plan=arm_plan(
                base_recipe,
                Arm.AUTOREGRESSIVE,
                policy=policy,
                draft=policy,
                length=DraftLength(num_speculative_tokens=0),
            ),
        )
    }
    for each in group:
        plan = arm_plan(
            each.recipe,
            Arm.SPECULATIVE,
            policy=policy,
            draft=each.draft,
            length=DraftLength(num_speculative_tokens=k),
            label=each.entrant.name,
        )
        members[each.entrant.name] = _Member(context=each.context, recipe=each.recipe, plan=plan)
    arms = _trained(members, policy=policy, prompts=read_prompt_sets(data).train)
    baseline = arms[_BASELINE]
    if isinstance(baseline, BaseException):
        raise baseline
    results: list[Result] = []
    dropouts: list[Dropout] = []
    for each in group:
        arm = arms[each.entrant.name]
        if isinstance(arm, BaseException):
            logger.error("bake_off: %s drops out, the others went on", each.entrant.name, exc_info=arm)
            dropouts.append(_dropout(each.entrant, arm))
        else:
            results.append(judge(each.entrant, arm, baseline, pretraining_s=each.pretraining_s))
    return results, dropouts


def _trained(
    members: Mapping[str, _Member], *, policy: Path, prompts: Sequence[Prompt]
) -> dict[str, ArmRecord | BaseException]:
    """The arms of all members, or what ended them."""
    starting = threading.Semaphore(min(member.recipe.tuning.num_starting for member in members.values()))

    def run(name: str, turn: Turn) -> ArmRecord:
        member = members[name]
        directory = member.context.directory("train_grpo")
        with _ended(execution_run(member.context, member.recipe)) as tracker:
            record = train(
                member.recipe,
                replace(member.plan, start_engine=partial(_started, member.plan, starting)),
                policy=policy,
                prompts=prompts,
                decode=decode(tokenizer(policy)),
                directory=directory,
                log=tracker.log,
                turn=turn,
            )
            tracker.log_artifact(write_record(record, directory / "arm.json"))
        return record

    return in_turn({name: partial(run, name) for name in members})


@contextmanager
def _started(plan: ArmPlan, starting: threading.Semaphore) -> Iterator[RemoteEngine]:
    """The plan's engine, of which only so many start at once."""
    with ExitStack() as opened:
        with starting:
            engine = opened.enter_context(plan.start_engine())
        yield engine


@contextmanager
def _ended(tracker: Tracker) -> Iterator[Tracker]:
    """The run of a member, ended with the block."""
    try:
        yield tracker
    except Stopped:
        tracker.close(RunStatus.KILLED)
        raise
    except BaseException as error:
        tracker.close(RunStatus.of_error(type(error)))
        raise
    tracker.close()


def _dropout(entrant: Entrant, error: BaseException) -> Dropout:
    return Dropout(entrant=entrant, reason=f"{type(error).__name__}: {error}")
