"""The whole chain for a recipe with an asynchronous loop: both arms of GRPO in it, and in the synchronous one."""

# Inside a workflow a task gives promises, which flytekit types as a union of all that a task may give anywhere.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from flytekit import WorkflowFailurePolicy, workflow

from slipstream.types import Arm, ArmLoop, Workload, arm_name
from tasks.certify_losslessness import Report
from tasks.fail_run import fail_run
from tasks.resources import CLUSTER
from tasks.start_run import start_run
from workflows.chain import concluded, prepared, trained


@workflow(failure_policy=WorkflowFailurePolicy.FAIL_AFTER_EXECUTABLE_NODES_COMPLETE, on_failure=fail_run)
def asynchronous_rl(  # noqa: PLR0913  # one input a line of the launch form
    recipe: str = "tiny_async",
    workload: Workload | None = None,
    num_steps: int | None = None,
    seed: int | None = None,
    overrides: list[str] = [],  # noqa: B006  # flytekit reads the default as a value, and hands on a copy
    max_off_policy_steps: int | None = None,
    run_root: str = CLUSTER.run_root,
    resume_execution: str = "",
    reuse_stored: bool = True,
) -> Report:
    """Train the same recipe with and without speculation, synchronously and asynchronously, and compare all four arms.

    Args:
        recipe: name of a file in configs/ without its ending, or a path to one; its loop must be asynchronous,
            as tiny_async's is, or become so by max_off_policy_steps.
        workload: what the policy is when RL starts: rl_zero is a base model, rl_think one that writes reasoning
            traces; left out, the recipe's.
        num_steps: GRPO steps of each of the four arms; left out, the recipe's.
        seed: integer that prompts, sampling and training are drawn with, shared by all arms; left out, the recipe's.
        overrides: fields of the recipe as field=value, one an item, as in grpo.group_size=16; units are in the
            fields' names. An unknown field or a value that breaks a rule ends the execution within seconds.
        max_off_policy_steps: steps by which rollouts may lag behind the policy that learns from them; left out,
            the recipe's. A synchronous recipe becomes one_step_off, unless overrides set loop.mode.
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
        loop=ArmLoop.ASYNCHRONOUS,
    ).with_overrides(name="check the recipe", node_name="start-run")
    start = prepared(run)
    arms = trained(start, [ArmLoop.SYNCHRONOUS, ArmLoop.ASYNCHRONOUS])
    return concluded(start, arms, certified=arm_name(Arm.SPECULATIVE, ArmLoop.ASYNCHRONOUS))
