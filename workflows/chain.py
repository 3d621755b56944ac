"""Workflows that other workflows nest: the stages before the arms, the arms of both loops, the stages after the arms.

A node of a nested workflow is shown in the console's graph as one box, which opens. Propeller names its pods by
`<parent>-0-<child>`, and replaces a name of more than 20 characters by a hash: hence the short names.
"""

# Inside a workflow a task returns promises, which flytekit types as a union of all return types of a task.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages.context import RunContext
from slipstream.types import ArmLoop, Arms
from tasks.certify_losslessness import Report, certify_losslessness, require_lossless
from tasks.evaluate_aime import evaluate_aime
from tasks.prepare_data import prepare_data
from tasks.prepare_policy import prepare_policy
from tasks.pretrain_draft import pretrain_draft
from tasks.project_speedup import project_speedup
from tasks.report_speedup import report_speedup
from tasks.require_no_drift import require_no_drift
from tasks.train_grpo import train_grpo
from tasks.tune_draft_length import tune_draft_length
from workflows.on_cluster import named, workflow


class Prepared(NamedTuple):
    """Inputs of every arm; without a speculative arm there are no draft and no draft length."""

    data: FlyteDirectory
    policy: FlyteDirectory
    draft: FlyteDirectory | None
    tuning: FlyteDirectory | None


class Loops(NamedTuple):
    """Directories of the arms of each loop, the synchronous one first."""

    trained: list[list[FlyteDirectory]]


@workflow()
def prepare(context: RunContext, recipe: FlyteFile) -> Prepared:
    """Make data, policy, draft and draft length of a run.

    A part of speculative_rl and asynchronous_rl, which is not launched alone. Data, policy and draft come from the
    store under the run root where an earlier execution made the same.

    Args:
        context: execution, run root and store, from start-run.
        recipe: the resolved recipe, from start-run.

    Returns:
        data: prompts and tokenizer.
        policy: policy before RL.
        draft: draft, pretrained.
        tuning: tuning.json with the chosen draft length.
    """
    shared = {"context": context, "recipe": recipe}
    data = named(prepare_data(**shared), "prepare data", "data").data
    policy = named(prepare_policy(**shared, data=data), "prepare policy", "policy").policy
    draft = named(pretrain_draft(**shared, policy=policy, data=data), "pretrain draft", "draft").draft
    tuned = tune_draft_length(**shared, policy=policy, data=data, draft=draft)
    return Prepared(data=data, policy=policy, draft=draft, tuning=named(tuned, "tune draft length", "length").tuning)


@workflow()
def train(  # one input an output of `prepare`
    context: RunContext,
    recipe: FlyteFile,
    arms: Arms,
    policy: FlyteDirectory,
    data: FlyteDirectory,
    draft: FlyteDirectory | None,
    tuning: FlyteDirectory | None,
) -> Loops:
    """Train the arms in the synchronous loop, then in the asynchronous one.

    A part of asynchronous_rl, which is not launched alone.

    Args:
        context: execution, run root and store, from start-run.
        recipe: the resolved recipe, from start-run.
        arms: speculative, autoregressive or both.
        policy: policy before RL, from prepare.
        data: prompts and tokenizer, from prepare.
        draft: draft, from prepare.
        tuning: draft length, from prepare.

    Returns:
        trained: directories of the arms of each loop, the synchronous one first.
    """
    shared = {"context": context, "recipe": recipe, "policy": policy, "data": data, "draft": draft, "tuning": tuning}
    first, second = (
        named(train_grpo(**shared, arms=arms, loop=loop), f"train, {loop.value}", loop.value).trained
        for loop in (ArmLoop.SYNCHRONOUS, ArmLoop.ASYNCHRONOUS)
    )
    first >> second  # pyright: ignore[reportUnusedExpression]  # both want all nodes
    return Loops(trained=[first, second])


@workflow()
def measure(  # one input an output of the other parts
    context: RunContext,
    recipe: FlyteFile,
    data: FlyteDirectory,
    policy: FlyteDirectory,
    draft: FlyteDirectory | None,
    tuning: FlyteDirectory | None,
    arms: list[list[FlyteDirectory]],
    certified: list[FlyteDirectory],
) -> Report:
    """Evaluate every arm, certify the speculative one if there is one, and write the report.

    A part of speculative_rl and asynchronous_rl, which is not launched alone. It fails after the report if speculation
    was not lossless, or if results drifted and tracking.drift.fail is set.

    Args:
        context: execution, run root and store, from start-run.
        recipe: the resolved recipe, from start-run.
        data: prompts and tokenizer, from prepare.
        policy: policy before RL, from prepare.
        draft: draft, from prepare.
        tuning: draft length, from prepare.
        arms: directories of the arms of each loop, from train.
        certified: directories of the arms of the loop whose speculative arm is certified.

    Returns:
        report: report.html, report.json, run.json and drift.json.
    """
    shared: dict[str, Any] = {"context": context, "recipe": recipe}
    start = {"policy": policy, "data": data, "draft": draft, "tuning": tuning}
    evaluated = evaluate_aime(**shared, data=data, policy=policy, arms=arms)
    evaluations = named(evaluated, "evaluate start and arms", "evaluate").evaluations
    certifying = certify_losslessness(**shared, **start, trained=certified)
    certificate = named(certifying, "certify losslessness", "certify").certificate
    evaluations >> certificate  # pyright: ignore[reportUnusedExpression]  # both want all nodes
    projection = named(project_speedup(**shared, tuning=tuning, arms=arms), "project speedup", "project").projection
    results = {"evaluations": evaluations, "certificate": certificate, "projection": projection}
    report = named(report_speedup(**shared, **start, arms=arms, **results), "report speedup", "report").report
    lossless = named(require_lossless(certificate=certificate, report=report), "require lossless", "lossless").report
    return named(require_no_drift(recipe=recipe, report=lossless), "require no drift", "drift")


def behind(run: Any, start: Any) -> dict[str, Any]:
    """Return the inputs that whatever stands behind `prepare` takes of it and of start-run."""
    made = {"policy": start.policy, "data": start.data, "draft": start.draft, "tuning": start.tuning}
    return {"context": run.context, "recipe": run.recipe, **made}


def concluded(run: Any, start: Any, arms: Any, *, certified: Any) -> Any:
    """Wire `measure` behind the arms of each loop."""
    return named(measure(**behind(run, start), arms=arms, certified=certified), "measure", "measure")
