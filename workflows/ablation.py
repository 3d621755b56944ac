"""A grid of drafts and draft lengths, each trained beside the autoregressive arm, ranked by measured time.

The fan-out is `map_task`s over one task that makes whatever part it is given, because of what Flyte 1.16 can do:

- A failed part must not sink the others. In an array node over a task that is `min_success_ratio`. Over a launch plan,
  flytekit serialises it too, but propeller looks up the *task* of a sub-node that failed, and a launch plan has none
  (nodes/array/handler.go, "to support launchplans we will need to ..."), and flytekit 1.16 runs it locally only over
  lists that are known already. In a `@dynamic`, the workflow that it yields has no failure policy of its own: the
  first failed node ends the others (nodes/dynamic/dynamic_workflow.go).
- A part needs Ray and all GPU nodes. An array node runs any plugin that makes a Kubernetes object, in its mode with
  full state, which flytekit sets for tasks of a plugin. That was read, not run.
- So a part is one task, and one Ray job: it takes data, policy and draft from the store by itself, and no node with
  GPUs is held to find out that there is nothing to do. A part that is tried again goes on from its checkpoints.

How many parts run at once is the profile's `parallel_parts`, because an array node takes its bound at registration.
The kinds of parts follow one another, so the bound holds for all of them together.
"""

# Inside a workflow a task gives promises, which flytekit types as a union of all that a task may give anywhere.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from flytekit import WorkflowFailurePolicy, map_task, workflow

from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.types import Workload
from tasks.ablation import Ranking, fail_ablation, make_part, make_policy, plan_ablation, rank_ablation
from tasks.resources import CLUSTER

# One part of a kind must succeed, or nothing is left to compare. 0 would ask for all of them when run locally.
_ONE_OF_MANY = 0.001


def _each(task: Any) -> Any:
    return map_task(task, concurrency=CLUSTER.parallel_parts, min_success_ratio=_ONE_OF_MANY)


def _ranked(planned: Any) -> Any:
    """Wire the parts of each kind, one kind after the other, and the ranking of the variants."""
    policies = _each(make_policy)(context=planned.policies).with_overrides(name="policies", node_name="policies")
    drafts, baselines, variants = (
        _each(make_part)(context=contexts).with_overrides(name=name, node_name=name)
        for name, contexts in (
            ("drafts", planned.drafts),
            ("baselines", planned.baselines),
            ("variants", planned.variants),
        )
    )
    policies >> drafts >> baselines >> variants  # pyright: ignore[reportUnusedExpression]
    return rank_ablation(contexts=planned.variants, finished=variants).with_overrides(
        name="rank the variants", node_name="rank-ablation"
    )


@workflow(failure_policy=WorkflowFailurePolicy.FAIL_AFTER_EXECUTABLE_NODES_COMPLETE, on_failure=fail_ablation)
def ablation(  # noqa: PLR0913  # one input a line of the launch form
    recipe: str = "tiny",
    draft_inits: list[DraftInit] = [],  # noqa: B006  # flytekit reads the default as a value
    methods: list[DraftMethod] = [],  # noqa: B006
    losses: list[str] = [],  # noqa: B006
    draft_lengths: list[int] = [],  # noqa: B006
    seeds: list[int] = [],  # noqa: B006
    workloads: list[Workload] = [],  # noqa: B006
    num_steps: int | None = None,
    overrides: list[str] = [],  # noqa: B006
    kickoff_time: datetime = datetime(1970, 1, 1, tzinfo=UTC),
    run_root: str = CLUSTER.run_root,
    reuse_stored: bool = True,
) -> Ranking:
    """Train every combination of the lists once, beside the autoregressive arm of its workload and seed, and rank them.

    An empty list keeps what the recipe says. A variant that fails is in the table with its reason; the others go on.
    At most 64 variants.

    Args:
        recipe: name of a file in configs/ without its ending, or a path to one.
        draft_inits: prompts that drafts are pretrained on: in_domain, general.
        methods: speculation methods, named as in vLLM: eagle3.
        losses: losses that drafts are pretrained with: kl_div, tv, lk.
        draft_lengths: draft tokens an iteration (k); 0 chooses the length by measured time for each draft, as no list.
        seeds: integers that drafts, prompts, sampling and training are drawn with; empty takes one from the
            kickoff_time of a schedule, else the recipe's.
        workloads: what the policy is when RL starts: rl_zero is a base model, rl_think one with reasoning traces.
        num_steps: GRPO steps of each arm; left out, the recipe's.
        overrides: fields of the recipe as field=value, one an item, for every variant; not those that a list varies.
        kickoff_time: when a schedule started this; without seeds, its days since 1970-01-01 UTC are the seed.
        run_root: absolute directory on the volume that all pods share.
        reuse_stored: take data, policies and drafts from run_root/store where an earlier execution made them alike.

    Returns:
        ranking: ablation.html, ablation.json and speedups.svg.
    """
    planned = plan_ablation(
        recipe=recipe,
        draft_inits=draft_inits,
        methods=methods,
        losses=losses,
        draft_lengths=draft_lengths,
        seeds=seeds,
        workloads=workloads,
        num_steps=num_steps,
        overrides=overrides,
        kickoff_time=kickoff_time,
        run_root=run_root,
        reuse_stored=reuse_stored,
    ).with_overrides(name="check every variant", node_name="plan-ablation")
    return _ranked(planned)
