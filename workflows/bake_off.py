"""Workflow `bake_off`: all drafters on one policy, with their steps in turn, ranked by measured time."""

# Inside a workflow a task returns promises, which flytekit types as a union of all return types of a task.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.types import ArmLoop, Workload
from tasks.bake_off import BakeOff, check_drafters, fail_bake_off
from tasks.bake_off import bake_off as compare
from tasks.prepare_data import prepare_data
from tasks.prepare_policy import prepare_policy
from tasks.resources import CLUSTER
from tasks.start_run import start_run
from workflows.on_cluster import RECIPE, named, workflow


@workflow(on_failure=fail_bake_off)
def bake_off(  # noqa: PLR0913  # one input a line of the launch form
    recipe: str = RECIPE,
    methods: list[DraftMethod] = [DraftMethod.EAGLE3, DraftMethod.NGRAM],  # noqa: B006  # flytekit reads the default as a value
    inits: list[DraftInit] = [DraftInit.IN_DOMAIN, DraftInit.GENERAL],  # noqa: B006
    online: list[DraftOnline] = [DraftOnline.OFF, DraftOnline.ALWAYS],  # noqa: B006
    num_speculative_tokens: int = 3,
    workload: Workload | None = None,
    num_steps: int | None = None,
    seed: int | None = None,
    overrides: list[str] = [],  # noqa: B006
    run_root: str = CLUSTER.run_root,
    reuse_stored: bool = True,
) -> BakeOff:
    """Train with every drafter from one policy, in turn with an autoregressive arm, and rank all by time.

    One task, over all nodes of the profile, trains the same policy with each drafter, step by step in turn. A failed
    drafter is listed with its reason and does not stop the others.

    Args:
        recipe: name of a file in configs/ without its extension, or a path to a recipe.
        methods: speculation methods, named as in vLLM: eagle3, dflash, draft_model, ngram, suffix, history.
        inits: prompts for the pretraining of drafts: in_domain, general; ignored by methods without pretraining.
        online: training of the draft during RL: off, always, when_stale; ignored by methods without such training.
        num_speculative_tokens: draft tokens an iteration (k), at least 1, equal for all drafters.
        workload: kind of policy at the start of RL: rl_zero is a base model, rl_think a model with reasoning traces;
            default: the recipe's.
        num_steps: GRPO steps of each arm; default: the recipe's.
        seed: integer seed of prompts, sampling and training; default: the recipe's.
        overrides: recipe fields as field=value, one an item.
        run_root: absolute directory on the shared volume of all pods.
        reuse_stored: reuse data, policies and drafts that executions with equal settings kept in run_root/store.

    Returns:
        comparison: bake_off.html, bake_off.json and speedups.svg.
    """
    started = start_run(
        recipe=recipe,
        workload=workload,
        num_steps=num_steps,
        seed=seed,
        overrides=overrides,
        run_root=run_root,
        reuse_stored=reuse_stored,
        loop=ArmLoop.SYNCHRONOUS,
    )
    run = named(started, "check the recipe", "start-run")
    field = {"methods": methods, "inits": inits, "online": online, "num_speculative_tokens": num_speculative_tokens}
    shared = {"context": run.context, "recipe": run.recipe}
    checked = named(check_drafters(**shared, **field), "check every drafter", "check-drafters")
    data = named(prepare_data(**shared), "prepare data", "prepare-data").data
    policy = named(prepare_policy(**shared, data=data), "prepare policy", "prepare-policy").policy
    checked.drafters >> data  # pyright: ignore[reportUnusedExpression]
    return named(compare(**shared, **field, policy=policy, data=data), "compare drafters", "bake-off")
