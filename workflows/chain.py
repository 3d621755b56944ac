"""Wiring that the workflows share: the stages before the arms, the arms, and the stages after the arms.

These functions are called inside a workflow and add its nodes in the order of the calls.
"""

# Inside a workflow a task returns promises, which flytekit types as a union of all return types of a task.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slipstream.types import ArmLoop
from tasks.certify_losslessness import certify_losslessness, require_lossless
from tasks.evaluate_aime import evaluate_aime
from tasks.prepare_data import prepare_data
from tasks.prepare_policy import prepare_policy
from tasks.pretrain_draft import pretrain_draft
from tasks.project_speedup import project_speedup
from tasks.report_speedup import report_speedup
from tasks.require_no_drift import require_no_drift
from tasks.train_grpo import train_grpo
from tasks.tune_draft_length import tune_draft_length


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Promises of every arm's inputs."""

    shared: Mapping[str, Any]  # run and recipe, inputs of every task
    data: Any
    policy: Any
    draft: Any
    tuning: Any


def data_and_policy(shared: Mapping[str, Any]) -> tuple[Any, Any]:
    """Wire data and policy of a run; `shared` holds the inputs of every task."""
    data = prepare_data(**shared).with_overrides(name="prepare data", node_name="prepare-data").data
    policy = (
        prepare_policy(**shared, data=data).with_overrides(name="prepare policy", node_name="prepare-policy").policy
    )
    return data, policy


def prepared(run: Any) -> Prepared:
    """Wire data, policy, draft and draft length of the run that `start_run` opened."""
    shared = {"context": run.context, "recipe": run.recipe}
    data, policy = data_and_policy(shared)
    draft = (
        pretrain_draft(**shared, policy=policy, data=data)
        .with_overrides(name="pretrain draft", node_name="pretrain-draft")
        .draft
    )
    tuning = (
        tune_draft_length(**shared, policy=policy, data=data, draft=draft)
        .with_overrides(name="tune draft length", node_name="tune-draft-length")
        .tuning
    )
    return Prepared(shared=shared, data=data, policy=policy, draft=draft, tuning=tuning)


def trained(start: Prepared, arms: Any, loops: Iterable[ArmLoop]) -> list[Any]:
    """Wire the training in each of the loops; returns the promise of each loop's arms."""
    found: list[Any] = []
    for loop in loops:
        name = "train" if loop is ArmLoop.SYNCHRONOUS else f"train-{loop.value}"
        found.append(
            train_grpo(
                **start.shared,
                policy=start.policy,
                data=start.data,
                draft=start.draft,
                tuning=start.tuning,
                arms=arms,
                loop=loop,
            )
            .with_overrides(name=name.replace("-", ", "), node_name=name)
            .trained
        )
    return found


def concluded(start: Prepared, arms: list[Any]) -> Any:
    """Wire evaluations of the policy before RL and of every arm, the certificate of the last loop, and the report."""
    evaluations = (
        evaluate_aime(**start.shared, data=start.data, policy=start.policy, arms=arms)
        .with_overrides(name="evaluate", node_name="evaluate")
        .evaluations
    )
    certificate = (
        certify_losslessness(
            **start.shared,
            policy=start.policy,
            trained=arms[-1],
            data=start.data,
            draft=start.draft,
            tuning=start.tuning,
        )
        .with_overrides(name="certify losslessness", node_name="certify-losslessness")
        .certificate
    )
    # All of these tasks need the same machine or nodes: each runs alone, after the arms.
    for before, after in pairwise([*arms, evaluations, certificate]):
        before >> after  # pyright: ignore[reportUnusedExpression]
    projection = (
        project_speedup(**start.shared, tuning=start.tuning, arms=arms)
        .with_overrides(name="project speedup", node_name="project-speedup")
        .projection
    )
    report = (
        report_speedup(
            **start.shared,
            policy=start.policy,
            data=start.data,
            draft=start.draft,
            tuning=start.tuning,
            arms=arms,
            evaluations=evaluations,
            certificate=certificate,
            projection=projection,
        )
        .with_overrides(name="report speedup", node_name="report-speedup")
        .report
    )
    lossless = (
        require_lossless(certificate=certificate, report=report)
        .with_overrides(name="require lossless", node_name="require-lossless")
        .report
    )
    return require_no_drift(recipe=start.shared["recipe"], report=lossless).with_overrides(
        name="require no drift", node_name="require-no-drift"
    )
