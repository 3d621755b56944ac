"""Tasks of a bake-off: compare drafters on one policy, with their steps in turn."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError
from flytekit.types.file import FlyteFile

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.stages.context import RunContext
from slipstream.study import interleaved as stage
from slipstream.study.variants import Grid
from slipstream.types import Workload
from tasks.deliverables import handed_on, model_of, recipe_of, records_of
from tasks.fail_run import end_failed
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, TRAINING, on_cpus, on_gpus


class BakeOff(NamedTuple):
    """Output of a bake-off."""

    comparison: FlyteDirectory


class Drafters(NamedTuple):
    """Names of the drafters of a bake-off."""

    drafters: list[str]


@task(**on_cpus(retries=0))
@recoverable(CHECKING)
def check_drafters(
    context: RunContext,
    recipe: FlyteFile,
    methods: list[DraftMethod],
    inits: list[DraftInit],
    online: list[DraftOnline],
    num_speculative_tokens: int,
) -> Drafters:
    """Check every drafter against the recipe before any expensive work."""
    grid = _grid(methods, inits, online, num_speculative_tokens)
    return Drafters(drafters=stage.check_drafters(context, recipe_of(recipe), grid))


@task(**on_gpus())
@recoverable(TRAINING)
def bake_off(
    context: RunContext,
    recipe: FlyteFile,
    policy: FlyteDirectory,
    data: FlyteDirectory,
    methods: list[DraftMethod],
    inits: list[DraftInit],
    online: list[DraftOnline],
    num_speculative_tokens: int,
) -> BakeOff:
    """Train with every drafter; writes bake_off.html (also the task's deck), bake_off.json and speedups.svg."""
    directory = stage.bake_off(
        context,
        recipe_of(recipe),
        _grid(methods, inits, online, num_speculative_tokens),
        policy=model_of(context, policy),
        data=records_of(data),
    )
    Deck("bake-off", (directory / "bake_off.html").read_text())
    records = ("bake_off.html", "bake_off.json", "*.svg")
    return BakeOff(comparison=handed_on(context, "bake_off", directory, records=records))


@task(**on_cpus())
@recoverable(CHECKING)
def fail_bake_off(  # noqa: PLR0913  # Flyte asks for every input of the workflow, and for the error
    recipe: str,
    methods: list[DraftMethod],
    inits: list[DraftInit],
    online: list[DraftOnline],
    num_speculative_tokens: int,
    overrides: list[str],
    run_root: str,
    reuse_stored: bool,
    workload: Workload | None = None,
    num_steps: int | None = None,
    seed: int | None = None,
    err: FlyteError | None = None,
) -> None:
    """Write failure.md and failure.json beside the execution's stages, and end its runs in MLflow."""
    del methods, inits, online, num_speculative_tokens, workload, num_steps, seed, overrides, reuse_stored
    end_failed(recipe, run_root, err, stages=("prepare_data", "prepare_policy", "bake_off"))


def _grid(methods: list[DraftMethod], inits: list[DraftInit], online: list[DraftOnline], k: int) -> Grid:
    return Grid(methods=tuple(methods), draft_inits=tuple(inits), online=tuple(online), draft_lengths=(k,))
