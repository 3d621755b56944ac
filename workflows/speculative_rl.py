"""The whole chain: data, policy, draft, draft length, both arms of GRPO, evaluation, certificate, report."""

# Inside a workflow a task gives promises, which flytekit types as a union of all that a task may give anywhere.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from flytekit import WorkflowFailurePolicy, workflow

from slipstream.types import Arm, Workload
from tasks.certify_losslessness import Report, certify_losslessness, require_lossless
from tasks.evaluate_aime import evaluate_aime
from tasks.fail_run import fail_run
from tasks.prepare_data import prepare_data
from tasks.prepare_policy import prepare_policy
from tasks.pretrain_draft import pretrain_draft
from tasks.project_speedup import project_speedup
from tasks.report_speedup import report_speedup
from tasks.require_no_drift import require_no_drift
from tasks.resources import CLUSTER
from tasks.start_run import start_run
from tasks.train_grpo import train_grpo
from tasks.tune_draft_length import tune_draft_length


@workflow(failure_policy=WorkflowFailurePolicy.FAIL_AFTER_EXECUTABLE_NODES_COMPLETE, on_failure=fail_run)
def speculative_rl(  # noqa: PLR0913  # one input a line of the launch form
    recipe: str = "tiny",
    workload: Workload = Workload.RL_ZERO,
    num_steps: int = 0,
    seed: int = 0,
    overrides: list[str] = [],  # noqa: B006  # flytekit reads the default as a value, and hands on a copy
    max_off_policy_steps: int = 0,
    run_root: str = CLUSTER.run_root,
    resume_execution: str = "",
    reuse_stored: bool = True,
) -> Report:
    """Train the same recipe with and without speculation, prove that it changes no distribution, report the speedup.

    Args:
        recipe: name of a file in configs/ without its ending, or a path to one; tiny and qwen3_8b are two.
        workload: what the policy is when RL starts: rl_zero is a base model, rl_think one that writes reasoning traces.
        num_steps: GRPO steps of each arm; 0 keeps the recipe's.
        seed: integer that prompts, sampling and training are drawn with; both arms share it.
        overrides: fields of the recipe as field=value, one an item, as in grpo.group_size=16; units are in the
            fields' names. An unknown field or a value that breaks a rule ends the execution within seconds.
        max_off_policy_steps: steps by which rollouts may lag behind the policy; only 0, synchronous, is there so far.
        run_root: absolute directory on the volume that all pods share; checkpoints and tracking spool lie there.
        resume_execution: name of an execution under run_root to go on with, its finished stages not done again; a
            recipe other than the one that it was started with is refused. Empty starts a new one.
        reuse_stored: take data, policy and draft from run_root/store where an earlier execution made them from the
            same sections of the recipe. Nothing that is measured is ever taken from there.

    Returns:
        report: report.html, report.json, run.json and drift.json; the execution fails after them if speculation was
            not lossless, or if results drifted and tracking.drift.fail says so.
    """
    run = start_run(
        recipe=recipe,
        workload=workload,
        num_steps=num_steps,
        seed=seed,
        overrides=overrides,
        max_off_policy_steps=max_off_policy_steps,
        run_root=run_root,
        resume_execution=resume_execution,
        reuse_stored=reuse_stored,
    ).with_overrides(name="check the recipe", node_name="start-run")
    shared = {"context": run.context, "recipe": run.recipe}
    data = prepare_data(**shared).with_overrides(name="prepare data", node_name="prepare-data").data
    policy = (
        prepare_policy(**shared, data=data).with_overrides(name="prepare policy", node_name="prepare-policy").policy
    )
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
    baseline, speculative = (
        train_grpo(**shared, policy=policy, data=data, draft=draft, tuning=tuning, arm=arm)
        .with_overrides(name=f"train {arm.value}", node_name=f"train-{arm.value}")
        .trained
        for arm in (Arm.AUTOREGRESSIVE, Arm.SPECULATIVE)
    )
    if CLUSTER.runs_one_at_a_time:
        baseline >> speculative  # pyright: ignore[reportUnusedExpression]
    evaluations = [
        evaluate_aime(**shared, data=data, model=model, policy=name)
        .with_overrides(name=f"evaluate {name}", node_name=f"evaluate-{name}")
        .evaluation
        for name, model in (
            ("start", policy),
            (Arm.AUTOREGRESSIVE.value, baseline),
            (Arm.SPECULATIVE.value, speculative),
        )
    ]
    certificate = (
        certify_losslessness(**shared, policy=policy, trained=speculative, data=data, draft=draft, tuning=tuning)
        .with_overrides(name="certify losslessness", node_name="certify-losslessness")
        .certificate
    )
    projection = (
        project_speedup(**shared, tuning=tuning, arms=[baseline, speculative])
        .with_overrides(name="project speedup", node_name="project-speedup")
        .projection
    )
    report = (
        report_speedup(
            **shared,
            policy=policy,
            data=data,
            draft=draft,
            tuning=tuning,
            arms=[baseline, speculative],
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
    return require_no_drift(recipe=run.recipe, report=lossless).with_overrides(
        name="require no drift", node_name="require-no-drift"
    )
