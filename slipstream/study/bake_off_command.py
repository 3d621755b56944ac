"""`slipstream bakeoff`: drafters side by side on this machine, and their table."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from slipstream import demo
from slipstream.config import require
from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.recipe import load_recipe
from slipstream.records.files import read_record
from slipstream.report.reference import read_reference
from slipstream.stages.context import add_inputs, handed_on, new_execution, requested
from slipstream.study.bake_off_field import entrant_recipe, entrants
from slipstream.study.bake_off_ranking import answer, bake_off_table
from slipstream.study.bake_off_records import BakeOffRecord
from slipstream.types import Workload

_PAGE = "bake_off"
_METHODS = (DraftMethod.EAGLE3, DraftMethod.DRAFT_MODEL, DraftMethod.NGRAM)
_INITS = (DraftInit.IN_DOMAIN, DraftInit.GENERAL)
_ONLINE = (DraftOnline.OFF, DraftOnline.ALWAYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class BakeOffLaunch:
    """What the workflow is started with."""

    recipe: str
    methods: tuple[DraftMethod, ...]
    inits: tuple[DraftInit, ...]
    online: tuple[DraftOnline, ...]
    num_speculative_tokens: int
    workload: Workload | None  # None keeps the recipe's, here and below
    num_steps: int | None
    seed: int | None
    overrides: tuple[str, ...]
    execution: str
    reuse_stored: bool = True

    def command(self, root: Path) -> list[str]:
        """`pyflyte run` and the workflow's inputs."""
        return [
            *demo.pyflyte_run("bake_off"),
            *("--recipe", self.recipe),
            *("--methods", json.dumps(self.methods)),
            *("--inits", json.dumps(self.inits)),
            *("--online", json.dumps(self.online)),
            *("--num_speculative_tokens", str(self.num_speculative_tokens)),
            *demo.given_inputs(workload=self.workload, num_steps=self.num_steps, seed=self.seed),
            *("--overrides", json.dumps(self.overrides)),
            *("--run_root", str(root)),
            "--reuse_stored" if self.reuse_stored else "--no_reuse_stored",
        ]


def add_options(command: argparse.ArgumentParser) -> None:
    """Who takes part, and for how long."""
    command.add_argument("--recipe", default="tiny")
    command.add_argument("--methods", nargs="+", choices=list(DraftMethod), default=list(_METHODS))
    command.add_argument("--inits", nargs="+", choices=list(DraftInit), default=list(_INITS))
    command.add_argument("--online", nargs="+", choices=list(DraftOnline), default=list(_ONLINE))
    command.add_argument("--num-speculative-tokens", type=int, default=3, help="k, the same for all drafters")
    add_inputs(command)
    command.add_argument("--overrides", nargs="+", default=[], metavar="FIELD=VALUE", help="of the recipe")
    command.add_argument("--run-root", default="runs")
    command.add_argument("--fresh", action="store_true", help="make data, policy and drafts anew, though stored")


def launched(options: argparse.Namespace) -> BakeOffLaunch:
    """What the options ask for.

    Raises:
        ConfigError: the recipe refuses a drafter.
    """
    methods, inits = tuple(map(DraftMethod, options.methods)), tuple(map(DraftInit, options.inits))
    online, overrides = tuple(map(DraftOnline, options.online)), handed_on(options.overrides)
    inputs = {"workload": options.workload, "num_steps": options.num_steps, "seed": options.seed}
    recipe = load_recipe(options.recipe, overrides=requested(overrides, **inputs))
    for entrant in entrants(methods, inits, online):
        entrant_recipe(recipe, entrant, options.num_speculative_tokens)
    return BakeOffLaunch(
        recipe=demo.handed_on_recipe(options.recipe),
        methods=methods,
        inits=inits,
        online=online,
        num_speculative_tokens=options.num_speculative_tokens,
        **inputs,
        overrides=overrides,
        execution=new_execution(f"bakeoff-{Path(options.recipe).stem}"),
        reuse_stored=not options.fresh,
    )


def result(root: Path, execution: str) -> str:
    """What is printed at the end: the table, the answer, and where the page lies."""
    page = root / execution / _PAGE
    require((page / "bake_off.json").is_file(), "the bake-off", "must have left a comparison", str(page))
    record = read_record(BakeOffRecord, page / "bake_off.json")
    return "\n\n".join(
        ["", bake_off_table(record, read_reference()), answer(record), f"page: {page / 'bake_off.html'}"]
    )
