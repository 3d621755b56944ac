"""The tasks of an ablation: check every variant, make one part, rank the variants or what a failed one left."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.kubernetes.profile import shared_root
from slipstream.stages.context import RunContext, requested
from slipstream.study import apart as stage
from slipstream.study.variants import Grid, Kind, chosen_seeds
from slipstream.types import Workload
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, CLUSTER, PREPARING, TRAINING, on_cpus, on_gpus, runs_locally
from tasks.start_run import execution_name


class PlannedAblation(NamedTuple):
    """Contexts of the parts, by kind."""

    policies: list[RunContext]
    drafts: list[RunContext]
    baselines: list[RunContext]
    variants: list[RunContext]


class Ranking(NamedTuple):
    """Output of an ablation."""

    ranking: FlyteDirectory


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


@task(**on_cpus(PREPARING))
@recoverable
def make_policy(context: RunContext) -> str:
    """Data and policy of a workload; the part's name."""
    return stage.make_part(context)


@task(**on_gpus(TRAINING))
@recoverable
def make_part(context: RunContext) -> str:
    """A draft, a baseline or a variant, whichever `context` names; the part's name."""
    return stage.make_part(context)


@task(**on_cpus(CHECKING), enable_deck=True, deck_fields=())
@recoverable
def rank_ablation(contexts: list[RunContext], finished: list[str | None]) -> Ranking:
    """ablation.html, which is also the task's deck, ablation.json and speedups.svg.

    `finished` names the variants that did; why the others did not lies under the run's root.
    """
    del finished  # it says when to start
    directory = stage.rank_ablation(Path(contexts[0].root), contexts[0].part_of)
    Deck("ablation", (directory / "ablation.html").read_text())
    return Ranking(ranking=FlyteDirectory(str(directory)))


@task(**on_cpus(CHECKING))
@recoverable
def fail_ablation(  # noqa: PLR0913  # Flyte asks for every input of the workflow, and for the error
    recipe: str,
    draft_inits: list[DraftInit],
    methods: list[DraftMethod],
    losses: list[str],
    draft_lengths: list[int],
    seeds: list[int],
    workloads: list[Workload],
    overrides: list[str],
    kickoff_time: datetime,
    run_root: str,
    reuse_stored: bool,
    num_steps: int | None = None,
    err: FlyteError | None = None,
) -> None:
    """The page of what there is, beside the parts, and the ablation's runs ended."""
    del draft_inits, methods, losses, draft_lengths, seeds, workloads, num_steps, overrides, kickoff_time, reuse_stored
    root = shared_root(run_root, CLUSTER, is_local=runs_locally())
    stage.fail_ablation(root.resolve(), execution_name(recipe), message=err.message if err is not None else "")
