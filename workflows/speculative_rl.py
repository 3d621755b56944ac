"""The whole chain: data, policy, draft, draft length, both arms of GRPO, evaluation, certificate, report."""

# Inside a workflow a task gives promises, which flytekit types as a union of all that a task may give anywhere.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from slipstream.types import Arm, Workload
from tasks.certify_losslessness import certify_losslessness, require_lossless
from tasks.evaluate_aime import evaluate_aime
from tasks.prepare_data import prepare_data
from tasks.prepare_policy import prepare_policy
from tasks.pretrain_draft import pretrain_draft
from tasks.project_speedup import project_speedup
from tasks.report_speedup import report_speedup
from tasks.start_run import start_run
from tasks.train_grpo import train_grpo
from tasks.tune_draft_length import tune_draft_length


@workflow
def speculative_rl(
    recipe: str = "tiny",
    workload: Workload = Workload.RL_ZERO,
    num_steps: int = 0,
    seed: int = 0,
    run_root: str = "runs",
    resume_execution: str = "",
    reuse_stored: bool = True,
) -> FlyteDirectory:
    """Train the same recipe with and without speculation, prove that it changes no distribution, report the speedup.

    Args:
        recipe: name of a file in configs/, or a path to one.
        workload: what the policy is when RL starts.
        num_steps: GRPO steps of each arm; 0 keeps the recipe's.
        seed: of prompts, sampling and training; both arms share it.
        run_root: directory that every task sees; checkpoints and the tracking spool lie there.
        resume_execution: name of an execution under run_root to go on with: what it finished is not done again, and
            a recipe other than the one that it was started with is refused. Empty starts a new one.
        reuse_stored: take data, policy and draft from run_root/store where an earlier execution made them from the
            same sections of the recipe. Nothing that is measured is ever taken from there.
    """
    run = start_run(
        recipe=recipe,
        workload=workload,
        num_steps=num_steps,
        seed=seed,
        run_root=run_root,
        resume_execution=resume_execution,
        reuse_stored=reuse_stored,
    )
    data = prepare_data(context=run.context, recipe=run.recipe)
    policy = prepare_policy(context=run.context, recipe=run.recipe, data=data)
    draft = pretrain_draft(context=run.context, recipe=run.recipe, policy=policy, data=data)
    tuning = tune_draft_length(context=run.context, recipe=run.recipe, policy=policy, data=data, draft=draft)
    baseline = train_grpo(
        context=run.context,
        recipe=run.recipe,
        policy=policy,
        data=data,
        draft=draft,
        tuning=tuning,
        arm=Arm.AUTOREGRESSIVE,
    )
    speculative = train_grpo(
        context=run.context,
        recipe=run.recipe,
        policy=policy,
        data=data,
        draft=draft,
        tuning=tuning,
        arm=Arm.SPECULATIVE,
    )
    evaluations = [
        evaluate_aime(context=run.context, recipe=run.recipe, data=data, model=model, policy=name)
        for name, model in (
            ("start", policy),
            (Arm.AUTOREGRESSIVE.value, baseline),
            (Arm.SPECULATIVE.value, speculative),
        )
    ]
    certificate = certify_losslessness(
        context=run.context,
        recipe=run.recipe,
        policy=policy,
        trained=speculative,
        data=data,
        draft=draft,
        tuning=tuning,
    )
    projection = project_speedup(context=run.context, recipe=run.recipe, tuning=tuning, arms=[baseline, speculative])
    report = report_speedup(
        context=run.context,
        recipe=run.recipe,
        policy=policy,
        data=data,
        draft=draft,
        tuning=tuning,
        arms=[baseline, speculative],
        evaluations=evaluations,
        certificate=certificate,
        projection=projection,
    )
    return require_lossless(certificate=certificate, report=report)
