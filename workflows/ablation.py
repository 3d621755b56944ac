"""Workflow `ablation`: a grid of drafts and draft lengths, each trained beside the autoregressive arm and ranked.

Each kind of parts is a `map_task` over one task that makes any part. Reasons, from Flyte 1.16:

- A failed part must not fail the others. An array node over a task supports that by `min_success_ratio`. Over a launch
  plan, propeller looks up the *task* of a failed sub-node, which a launch plan does not have (nodes/array/handler.go,
  "to support launchplans we will need to ..."), and flytekit 1.16 runs an array of launch plans locally only over known
  lists. The workflow of a `@dynamic` has no failure policy: the first failed node aborts the others
  (nodes/dynamic/dynamic_workflow.go).
- A part needs Ray and all GPU nodes. An array node runs every plugin that creates a Kubernetes object, in the mode with
  full state, which flytekit sets for tasks of a plugin. This was read in the code, and not run.
- So a part is one task and one Ray job, which reads data, policy and draft from the store; no GPU node is held for a
  part that needs no work. A retried part resumes from its checkpoints.

The profile's `parallel_parts` bounds the number of parts at once, because an array node's bound is set at registration.
The kinds of parts run one after another, so the bound holds for all parts together.
"""

# Inside a workflow a task returns promises, which flytekit types as a union of all return types of a task.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from flytekit import map_task

from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.types import Workload
from tasks.ablation import Ranking, fail_ablation, make_part, make_policy, plan_ablation, rank_ablation
from tasks.resources import CLUSTER
from workflows.on_cluster import RECIPE, named, workflow

# One part of a kind must succeed, or nothing is left to compare. A local run reads 0 as all parts.
_ONE_OF_MANY = 0.001


def _each(task: Any, name: str, contexts: Any) -> Any:
    """Wire an array of parts; flytekit gives the name of an override to the parts, so that of the array is set here."""
    parts = map_task(task, concurrency=CLUSTER.parallel_parts, min_success_ratio=_ONE_OF_MANY)(context=contexts)
    array = named(parts, name, name)
    if array.ref is not None:  # on one machine there is no graph
        array.ref.node.metadata._name = name
    return array


def _ranked(planned: Any) -> Any:
    """Wire the parts, one kind after the other, and the ranking of the variants."""
    policies = _each(make_policy, "policies", planned.policies)
    drafts, baselines, variants = (
        _each(make_part, name, contexts)
        for name, contexts in (
            ("drafts", planned.drafts),
            ("baselines", planned.baselines),
            ("variants", planned.variants),
        )
    )
    policies >> drafts >> baselines >> variants  # pyright: ignore[reportUnusedExpression]
    ranked = rank_ablation(contexts=planned.variants, finished=variants)
    return named(ranked, "rank the variants", "rank-ablation")


@workflow(on_failure=fail_ablation)
def ablation(  # noqa: PLR0913  # one input a line of the launch form
    recipe: str = RECIPE,
    draft_inits: list[DraftInit] = [],  # noqa: B006  # flytekit reads the default as a value
    methods: list[DraftMethod] = [],  # noqa: B006
    losses: list[str] = [],  # noqa: B006
    draft_lengths: list[int] = [],  # noqa: B006
    seeds: list[int] = [],  # noqa: B006
    workloads: list[Workload] = [],  # noqa: B006
    num_steps: int | None = None,
    overrides: list[str] = [],  # noqa: B006
    seed_of_the_day: bool = False,
    run_root: str = CLUSTER.run_root,
    reuse_stored: bool = True,
) -> Ranking:
    """Train every combination of the lists beside the autoregressive arm of its workload and seed, and rank them.

    An empty list keeps the recipe's value. A failed variant is listed with its reason and does not stop the others.
    The grid has at most 64 variants. Each draft, baseline and variant is one task over all nodes of the profile, one
    after another: an ablation costs about an arm for each of them.

    Args:
        recipe: name of a file in configs/ without its extension, or a path to a recipe.
        draft_inits: prompts for the pretraining of drafts: in_domain, general.
        methods: speculation methods, named as in vLLM: eagle3, dflash, draft_model, ngram, suffix, history.
        losses: pretraining losses of eagle3 drafts: kl_div, tv, lk, lk_hybrid.
        draft_lengths: draft tokens an iteration (k); 0, or an empty list, tunes k by measured time for each draft.
        seeds: integer seeds of drafts, prompts, sampling and training; an empty list takes the recipe's, or the day's.
        workloads: kinds of policy at the start of RL: rl_zero is a base model, rl_think a model with reasoning traces.
        num_steps: GRPO steps of each arm; default: the recipe's.
        overrides: recipe fields of every variant as field=value, one an item; fields that a list varies are refused.
        seed_of_the_day: without seeds, the days since 1970-01-01 UTC are the seed, as schedules have it.
        run_root: absolute directory on the shared volume of all pods.
        reuse_stored: reuse data, policies and drafts that earlier executions with equal settings kept in
            run_root/store.

    Returns:
        ranking: ablation.html, ablation.json and speedups.svg.
    """
    plan = plan_ablation(
        recipe=recipe,
        draft_inits=draft_inits,
        methods=methods,
        losses=losses,
        draft_lengths=draft_lengths,
        seeds=seeds,
        workloads=workloads,
        num_steps=num_steps,
        overrides=overrides,
        seed_of_the_day=seed_of_the_day,
        run_root=run_root,
        reuse_stored=reuse_stored,
    )
    return _ranked(named(plan, "check every variant", "plan-ablation"))
