"""Workflow `asynchronous_rl`: the whole chain, with both arms of GRPO in a synchronous and an asynchronous loop."""

# Inside a workflow a task returns promises, which flytekit types as a union of all return types of a task.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false

from __future__ import annotations

from slipstream.types import ArmLoop, Arms, Workload
from tasks.certify_losslessness import Report
from tasks.fail_run import fail_run
from tasks.resources import CLUSTER
from tasks.start_run import start_run
from workflows.chain import behind, concluded, prepare, train
from workflows.on_cluster import named, workflow


@workflow(on_failure=fail_run)
def asynchronous_rl(  # noqa: PLR0913  # one input a line of the launch form
    recipe: str = CLUSTER.recipe_8b if CLUSTER.gpu is not None else "tiny_async",
    workload: Workload | None = None,
    num_steps: int | None = None,
    seed: int | None = None,
    overrides: list[str] = [],  # noqa: B006  # flytekit reads the default as a value, and passes a copy
    max_off_policy_steps: int | None = None,
    arms: Arms = Arms.BOTH,
    run_root: str = CLUSTER.run_root,
    resume_execution: str | None = None,
    reuse_stored: bool = True,
) -> Report:
    """Train a recipe with and without speculation, synchronously and asynchronously, and compare all four arms.

    It trains four arms from one policy: autoregressive and speculative, in the synchronous loop and in an asynchronous
    one, whose rollouts lag behind the policy. All stages with GPUs follow one another and take all nodes of the
    profile: a run costs about the sum of four arms.

    Args:
        recipe: name of a file in configs/ without its extension, or a path to a recipe. Its loop must be asynchronous,
            as in tiny_async, or be made asynchronous by max_off_policy_steps.
        workload: kind of policy at the start of RL: rl_zero is a base model, rl_think a model with reasoning traces;
            default: the recipe's.
        num_steps: GRPO steps of each of the four arms; default: the recipe's.
        seed: integer seed of prompts, sampling and training, shared by all arms; default: the recipe's.
        overrides: recipe fields as field=value, one an item, as in grpo.group_size=16; a field's name contains its
            unit. An unknown field or an invalid value ends the execution within seconds.
        max_off_policy_steps: largest lag of rollouts behind the trained policy, in steps; default: the recipe's. A
            synchronous recipe becomes one_step_off, unless overrides set loop.mode.
        arms: speculative, autoregressive or both: one arm alone has no baseline, and so no speedup; autoregressive
            alone makes no draft.
        run_root: absolute directory on the shared volume of all pods, for checkpoints and the tracking spool.
        resume_execution: name of an execution under run_root to resume; its finished stages are kept, and a changed
            recipe is refused. Default: a new execution.
        reuse_stored: reuse data, policy and draft that earlier executions with equal recipe sections kept in
            run_root/store. Measurements are never reused.

    Returns:
        report: report.html, report.json, run.json and drift.json. The execution fails after the report if speculation
            was not lossless, or if results drifted and tracking.drift.fail is set.
    """
    started = start_run(
        recipe=recipe,
        workload=workload,
        num_steps=num_steps,
        seed=seed,
        overrides=overrides,
        max_off_policy_steps=max_off_policy_steps,
        arms=arms,
        run_root=run_root,
        resume_execution=resume_execution,
        reuse_stored=reuse_stored,
        loop=ArmLoop.ASYNCHRONOUS,
    )
    run = named(started, "check the recipe", "start-run")
    start = named(prepare(context=run.context, recipe=run.recipe), "prepare", "prepare")
    trained = named(train(**behind(run, start), arms=arms), "train in both loops", "train").trained
    return concluded(run, start, trained, certified=trained[1])
