"""Tasks of an ablation: check every variant, make one part, rank the variants, report a failure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.stages.context import RunContext, requested
from slipstream.study import apart as stage
from slipstream.study.variants import Grid, Kind, chosen_seeds, day_seed
from slipstream.types import Workload
from tasks.deliverables import handed_on
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, CLUSTER, PREPARING, TRAINING, on_cpus, on_gpus, root_of
from tasks.start_run import execution_name


class PlannedAblation(NamedTuple):
    """Contexts of the parts of an ablation, by kind."""

    policies: list[RunContext]
    drafts: list[RunContext]
    baselines: list[RunContext]
    variants: list[RunContext]


class Ranking(NamedTuple):
    """Output of an ablation."""

    ranking: FlyteDirectory


@task(**on_cpus(retries=0))
@recoverable(CHECKING)
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
    seed_of_the_day: bool,
    run_root: str,
    reuse_stored: bool,
) -> PlannedAblation:
    """Check every variant against recipe and cluster before any expensive work, and list the parts to make."""
    grid = Grid(
        draft_inits=tuple(draft_inits),
        methods=tuple(methods),
        losses=tuple(losses),
        draft_lengths=tuple(draft_lengths),
        seeds=chosen_seeds(seeds, day=day_seed(datetime.now(UTC)) if seed_of_the_day else None),
        workloads=tuple(workloads),
    )
    planned = stage.plan_ablation(
        recipe,
        grid,
        root=root_of(run_root),
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


@task(**on_cpus())
@recoverable(PREPARING)
def make_policy(context: RunContext) -> str:
    """Make data and policy of a workload; returns the part's name."""
    return stage.make_part(context)


@task(**on_gpus(has_deck=False))
@recoverable(TRAINING)
def make_part(context: RunContext) -> str:
    """Make the draft, baseline or variant that `context` names; returns the part's name."""
    return stage.make_part(context)


@task(**on_cpus(), enable_deck=True, deck_fields=())
@recoverable(CHECKING)
def rank_ablation(contexts: list[RunContext], finished: list[str | None]) -> Ranking:
    """Rank the variants in ablation.html, which is also the task's deck, ablation.json and speedups.svg.

    `finished` holds the names of finished variants; the reasons of failed ones lie under the run's root.
    """
    del finished  # this input only makes the task wait for the variants
    whole = replace(contexts[0], execution=contexts[0].part_of)
    directory = stage.rank_ablation(Path(whole.root), whole.execution)
    Deck("ablation", (directory / "ablation.html").read_text())
    records = ("ablation.html", "ablation.json", "*.svg")
    return Ranking(ranking=handed_on(whole, "rank_ablation", directory, records=records))


@task(**on_cpus())
@recoverable(CHECKING)
def fail_ablation(  # noqa: PLR0913  # Flyte asks for every input of the workflow, and for the error
    recipe: str,
    draft_inits: list[DraftInit],
    methods: list[DraftMethod],
    losses: list[str],
    draft_lengths: list[int],
    seeds: list[int],
    workloads: list[Workload],
    overrides: list[str],
    seed_of_the_day: bool,
    run_root: str,
    reuse_stored: bool,
    num_steps: int | None = None,
    err: FlyteError | None = None,
) -> None:
    """Rank the finished variants, and end the ablation's runs in MLflow."""
    del draft_inits, methods, losses, draft_lengths, seeds, workloads
    del num_steps, overrides, seed_of_the_day, reuse_stored
    message = err.message if err is not None else ""
    stage.fail_ablation(root_of(run_root).resolve(), execution_name(recipe), message=message)
