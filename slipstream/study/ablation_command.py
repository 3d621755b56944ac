"""`slipstream ablation`: one ablation on this machine, and its ranked table."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from slipstream import demo
from slipstream.config import require
from slipstream.drafts.config import FRESH_INITS, DraftInit, DraftMethod
from slipstream.records.files import read_record
from slipstream.stages.context import handed_on, new_execution, requested
from slipstream.study.ablation_grid import Grid, variant_recipes
from slipstream.study.ablation_ranking import answer, ranked_table
from slipstream.study.ablation_records import AblationRecord
from slipstream.types import Workload

_PAGE = "rank_ablation"
_DRAFT_LENGTHS = (3, 7)


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationLaunch:
    """What the workflow is started with."""

    recipe: str
    grid: Grid
    num_steps: int | None  # None keeps the recipe's
    overrides: tuple[str, ...]
    execution: str
    reuse_stored: bool = True

    def command(self, root: Path) -> list[str]:
        """`pyflyte run` and the workflow's inputs."""
        grid = self.grid
        return [
            *demo.pyflyte_run("ablation"),
            *("--recipe", self.recipe),
            *("--draft_inits", json.dumps(grid.draft_inits)),
            *("--methods", json.dumps(grid.methods)),
            *("--losses", json.dumps(grid.losses)),
            *("--draft_lengths", json.dumps(grid.draft_lengths)),
            *("--seeds", json.dumps(grid.seeds)),
            *("--workloads", json.dumps(grid.workloads)),
            *demo.given_inputs(num_steps=self.num_steps),
            *("--overrides", json.dumps(self.overrides)),
            *("--run_root", str(root)),
            "--reuse_stored" if self.reuse_stored else "--no_reuse_stored",
        ]


def add_options(command: argparse.ArgumentParser) -> None:
    """The grid's lists; without any of them the grid is a small one."""
    command.add_argument("--recipe", default="tiny")
    command.add_argument("--draft-inits", nargs="+", choices=list(DraftInit), default=[])
    command.add_argument("--methods", nargs="+", choices=list(DraftMethod), default=[])
    command.add_argument("--losses", nargs="+", default=[])
    command.add_argument("--draft-lengths", nargs="+", type=int, default=[], help="k; 0: by measured time")
    command.add_argument("--seeds", nargs="+", type=int, default=[])
    command.add_argument("--workloads", nargs="+", choices=list(Workload), default=[])
    command.epilog = (
        f"A list that is left out keeps what the recipe says. Without any: --draft-inits {' '.join(FRESH_INITS)} "
        f"--draft-lengths {' '.join(map(str, _DRAFT_LENGTHS))}."
    )
    command.add_argument("--num-steps", type=int, help="GRPO steps an arm; default: the recipe's")
    command.add_argument("--overrides", nargs="+", default=[], metavar="FIELD=VALUE", help="of every variant's recipe")
    command.add_argument("--run-root", default="runs")
    command.add_argument("--fresh", action="store_true", help="make data, policies and drafts anew, though stored")


def launched(options: argparse.Namespace) -> AblationLaunch:
    """What the options ask for.

    Raises:
        ConfigError: the grid or a variant's recipe breaks a rule.
    """
    grid = Grid(
        draft_inits=tuple(map(DraftInit, options.draft_inits)),
        methods=tuple(map(DraftMethod, options.methods)),
        losses=tuple(options.losses),
        draft_lengths=tuple(options.draft_lengths),
        seeds=tuple(options.seeds),
        workloads=tuple(map(Workload, options.workloads)),
    )
    if grid == Grid():
        grid = Grid(draft_inits=FRESH_INITS, draft_lengths=_DRAFT_LENGTHS)
    overrides = handed_on(options.overrides)
    variant_recipes(options.recipe, grid, requested(overrides, num_steps=options.num_steps))
    return AblationLaunch(
        recipe=demo.handed_on_recipe(options.recipe),
        grid=grid,
        num_steps=options.num_steps,
        overrides=overrides,
        execution=new_execution(f"ablation-{Path(options.recipe).stem}"),
        reuse_stored=not options.fresh,
    )


def result(root: Path, execution: str) -> str:
    """What is printed at the end: the ranked table, the answer, and where the page lies."""
    page = root / execution / _PAGE
    require((page / "ablation.json").is_file(), "the ablation", "must have left a ranking", str(page))
    record = read_record(AblationRecord, page / "ablation.json")
    return "\n\n".join(["", ranked_table(record), *answer(record), f"page: {page / 'ablation.html'}"])
