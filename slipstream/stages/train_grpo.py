"""Train the arms of a loop with GRPO: their steps in turn on one machine, elsewhere one arm after the other."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts.config import DraftInit
from slipstream.drafts.length import DraftLength, described
from slipstream.drafts.methods import TRAITS
from slipstream.grpo.config import LoopConfig
from slipstream.recipe import Recipe, parameters
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import DraftRecord
from slipstream.records.steps import ArmRecord
from slipstream.stages.context import RunContext, arm_node, require_loop
from slipstream.stages.recipe_engines import draft_length, draft_weights, recipe_engine, sampled
from slipstream.stages.runs import tracked
from slipstream.stages.store import finished
from slipstream.stages.support import decode, draft_init, settled, tokenizer, versions
from slipstream.tracking.tracker import Tracker
from slipstream.train.arm import ArmPlan, Run
from slipstream.train.turns import ALONE, Stopped, Turn, in_turn
from slipstream.types import Arm, ArmLoop, LoopMode, Prompt, arm_name
from slipstream.workers.engines import idle_engines
from slipstream.workers.learners import idle_learners
from slipstream.workers.session import accelerators, connect

logger = logging.getLogger(__name__)

_STEPS_OF_OVERLAP = 8  # steps in a turn of arms in which generation and training overlap


def train_grpo(
    context: RunContext,
    recipe: Recipe,
    arms: Sequence[Arm],
    *,
    policy: Path,
    data: Path,
    draft: Path | None,
    tuning: Path | None,
    loop: ArmLoop = ArmLoop.SYNCHRONOUS,
) -> list[Path]:
    """Train the arms, each from its last checkpoint if there is one; return directories with arm.json and policy.

    On one machine the arms take their steps in turn, so that their times are of the same minutes. Where all of them
    want the same nodes, one is trained after the other.

    Args:
        draft: None, as tuning, where no speculative arm is trained.
        loop: the recipe's own loop, or the synchronous one that it is compared with.
    """
    recipe = in_loop(settled(context, recipe), loop)
    nodes = {arm: arm_node(arm, loop) for arm in arms}
    left = [arm for arm, node in nodes.items() if finished(context, node, "arm.json") is None]
    directories = [context.directory(node) for node in nodes.values()]
    if not left:
        return directories
    connect()
    sets = read_prompt_sets(data)
    member = partial(
        _member, context, recipe, policy=policy, draft=draft, tuning=tuning, loop=loop, validation=sets.validation
    )
    # Imports on this thread: some packages fail when arms in turn import them at once, each on its own thread.
    given = {"prompts": sets.train, "decode": decode(tokenizer(policy))}
    num_steps = steps_a_turn(recipe) if len(arms) > 1 else 0
    if num_steps:
        end_idle()
        with ExitStack() as opened:
            members = {nodes[arm]: partial(opened.enter_context(member(arm)), **given) for arm in left}
            ended = in_turn(members, num_steps=num_steps, needed=members)
            errors = [each for each in ended.values() if isinstance(each, BaseException)]
            for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
                raise error
    else:
        for arm in left:
            end_idle()
            with member(arm) as train_alone:
                train_alone(**given)
    return directories


def train_arm(tracker: Tracker, turn: Turn = ALONE, **given: Any) -> ArmRecord:
    """Train an arm in its directory, and write its record there; `given` are the other fields of `Run`."""
    run = Run(log=tracker.log, turn=turn, **given)
    record = replace(run.train(), versions=versions())
    tracker.log_artifact(write_record(record, run.directory / "arm.json"))
    return record


@contextmanager
def _member(
    context: RunContext,
    recipe: Recipe,
    arm: Arm,
    *,
    policy: Path,
    draft: Path | None,
    tuning: Path | None,
    loop: ArmLoop,
    validation: tuple[Prompt, ...],
) -> Iterator[Callable[..., ArmRecord]]:
    """Yield an arm with its MLflow run, which ends with the block."""
    node, name = arm_node(arm, loop), arm_name(arm, loop)
    length = DraftLength(num_speculative_tokens=0)
    if arm is Arm.SPECULATIVE:
        assert draft is not None and tuning is not None, "a speculative arm has a draft and a measured length"
        length = draft_length(recipe, tuning)
    logger.info("%s: k=%s, %d steps; learner and engine start first", node, length.label, recipe.grpo.num_steps)
    labels = arm_labels(recipe, arm, length)
    table = {"k_by_batch": described(length.schedule)} if length.label == "by_batch" else {}
    with tracked(
        context,
        recipe,
        node,
        labels,
        name=f"{context.execution} {name}",
        params={**parameters(recipe), **labels, **table},
        gpu=accelerators(),
    ) as tracker:
        plan = arm_plan(recipe, arm, policy=policy, draft=draft, length=length, label=name)
        plan = replace(plan, validation=validation)
        directory = context.directory(node)
        yield partial(train_arm, tracker, recipe=recipe, plan=plan, policy=policy, directory=directory)


def end_idle() -> None:
    """End idle processes, so that every arm starts fresh ones: a reused learner was 10 % slower in its steps."""
    idle_engines.end()
    idle_learners.end()


def steps_a_turn(recipe: Recipe) -> int:
    """Number of steps in an arm's turn; 0: one arm is trained after the other.

    An arm that generates while it trains ends its turn with nothing under way, so its turns are long enough to make
    that cheap. An arm whose engines never stop would lose its purpose in turns, and is trained alone.
    """
    if not recipe.placement.has_arms_in_turn or recipe.loop.mode is LoopMode.IN_FLIGHT:
        return 0
    return 1 if recipe.loop.is_synchronous else _STEPS_OF_OVERLAP


def in_loop(recipe: Recipe, loop: ArmLoop) -> Recipe:
    """Recipe with which an arm is trained in that loop; one without an asynchronous loop is refused for it."""
    if loop is ArmLoop.SYNCHRONOUS:
        return replace(recipe, loop=LoopConfig())
    require_loop(recipe, loop)
    return recipe


def arm_plan(
    recipe: Recipe, arm: Arm, *, policy: Path, draft: Path | None, length: DraftLength, label: str = ""
) -> ArmPlan:
    """Plan of an arm that drafts by `length` with the output of `pretrain_draft`, which an arm without drafts lacks."""
    k, is_elsewhere = length.num_speculative_tokens, recipe.draft.init is DraftInit.GENERAL
    drafting = draft if k else None
    return ArmPlan(
        arm=arm,
        num_speculative_tokens=k,
        schedule=length.schedule,
        draft=None if drafting is None else draft_weights(recipe.draft, drafting),
        # Held-out windows lie within a response and engines' do not: of the same text the first steps tell more.
        draft_length=known_length(drafting, k) if drafting is not None and is_elsewhere else None,
        start_engine=partial(
            recipe_engine,
            sampled(recipe, length.sampling),
            policy,
            draft,
            k,
            schedule=length.schedule,
            kv_cache=recipe.loop.in_flight_kv_cache,
        ),
        label=label,
    )


def known_length(draft: Path, k: int) -> float | None:
    """Mean acceptance length of a draft on held-out text at `k`, or at its longest measured length, if any."""
    file = draft / "draft.json"
    if not file.is_file():
        return None
    rates = read_record(DraftRecord, file).heldout_rate_by_position
    if not rates:  # the draft was not trained here
        return None
    return 1.0 + sum(math.prod(rates[: i + 1]) for i in range(min(k, len(rates))))


def arm_labels(recipe: Recipe, arm: Arm, length: DraftLength) -> dict[str, str]:
    """Parameters and tags that tell an arm's run from the others'; an arm that drafts nothing has no draft."""
    drafts = {
        "draft.method": recipe.draft.method.value,
        "draft.init": draft_init(recipe.draft),
        "draft.sampling": length.sampling.value if TRAITS[recipe.draft.method].has_weights else "none",
    }
    speculates = length.num_speculative_tokens > 0
    return {
        "arm": arm.value,
        "k": length.label,
        "loop": recipe.loop.mode.value,
        "max_off_policy_steps": str(recipe.loop.max_off_policy_steps),
        **(drafts if speculates else dict.fromkeys(drafts, "none")),
    }
