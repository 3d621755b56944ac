"""Check every variant of an ablation, and say what each part works for."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from flytekit import task

from slipstream import logs
from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.kubernetes.launch_checks import shared_root
from slipstream.stages.context import RunContext
from slipstream.stages.launch import requested
from slipstream.study import apart as stage
from slipstream.study.variants import Grid, Kind, chosen_seeds
from slipstream.types import Workload
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, CLUSTER, on_cpus, runs_locally
from tasks.start_run import execution_name


class PlannedAblation(NamedTuple):
    """What each part works for, by kind."""

    policies: list[RunContext]
    drafts: list[RunContext]
    baselines: list[RunContext]
    variants: list[RunContext]


@task(**on_cpus(CHECKING, retries=0))
@recoverable
def plan_ablation(  # noqa: PLR0913  # one input a line of the launch form
    recipe: str,
    draft_inits: list[DraftInit],
    methods: list[DraftMethod],
    losses: list[str],
    draft_lengths: list[int],
    seeds: list[int],
    workloads: list[Workload],
    num_steps: int | None,
    overrides: list[str],
    kickoff_time: datetime,
    run_root: str,
    reuse_stored: bool,
) -> PlannedAblation:
    """Raises before anything expensive starts if the recipe or the cluster refuses a variant."""
    logs.configure()
    grid = Grid(
        draft_inits=tuple(draft_inits),
        methods=tuple(methods),
        losses=tuple(losses),
        draft_lengths=tuple(draft_lengths),
        seeds=chosen_seeds(seeds, kickoff_time),
        workloads=tuple(workloads),
    )
    planned = stage.plan_ablation(
        recipe,
        grid,
        root=shared_root(run_root, CLUSTER, is_local=runs_locally()),
        execution=execution_name(recipe),
        requested=requested(overrides, num_steps=num_steps),
        cluster=CLUSTER,
        reuse_stored=reuse_stored,
    )
    return PlannedAblation(
        policies=planned[Kind.POLICY],
        drafts=planned[Kind.DRAFT],
        baselines=planned[Kind.BASELINE],
        variants=planned[Kind.VARIANT],
    )
