"""Command `slipstream study` with its presets `ablation` and `bakeoff`: train variants here and print their table."""

from __future__ import annotations

import argparse
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream import run_command
from slipstream.config import require
from slipstream.drafts.config import FRESH_INITS, DraftInit, DraftMethod, DraftOnline
from slipstream.recipe import load_recipe
from slipstream.records.files import read_record
from slipstream.stages.context import add_set, handed_on, new_execution, requested
from slipstream.study.variants import Grid, Study, drafter_recipes, variant_recipes
from slipstream.types import Workload

PRESETS = {
    "study": "train variants of a draft here, one by one or alternating their steps, and rank them",
    "ablation": "train a grid of drafts and draft lengths here, and rank them",
    "bakeoff": "compare drafters on one policy here, alternating their steps",
}
"""Help text of each command."""
_AXES: dict[str, tuple[type, list[str]]] = {
    "methods": (DraftMethod, ["--methods"]),
    "draft_inits": (DraftInit, ["--draft-inits", "--inits"]),
    "losses": (str, ["--losses"]),
    "draft_lengths": (int, ["--draft-lengths", "--num-speculative-tokens"]),
    "online": (DraftOnline, ["--online"]),
    "seeds": (int, ["--seeds", "--seed"]),
    "workloads": (Workload, ["--workloads", "--workload"]),
}
"""Lists that span the grid, each with its type and flags."""
_APART = {"draft_inits": FRESH_INITS, "draft_lengths": (3, 7)}
_IN_TURN = {
    "methods": (DraftMethod.EAGLE3, DraftMethod.DRAFT_MODEL, DraftMethod.NGRAM),
    "draft_inits": FRESH_INITS,
    "online": (DraftOnline.OFF, DraftOnline.ALWAYS),
    "draft_lengths": (3,),
}
_EPILOG = (
    "An omitted list keeps the recipe's value. An ablation without any list has --draft-inits in_domain general "
    "--draft-lengths 3 7. A bake-off has one length, seed and workload, and its omitted lists are "
    "--methods eagle3 draft_model ngram --draft-inits in_domain general --online off always --draft-lengths 3. An "
    "ablation tunes a length (k) of 0 by measured time."
)


def add_options(command: argparse.ArgumentParser, preset: str) -> None:
    """Add the options of a study: the lists that span the grid, and settings of all variants."""
    command.add_argument("--recipe", default="tiny")
    for name, (kind, flags) in _AXES.items():
        choices = list(kind) if issubclass(kind, StrEnum) else None
        command.add_argument(*flags, dest=name, nargs="+", default=[], type=str if choices else kind, choices=choices)
    command.add_argument("--num-steps", type=int, help="GRPO steps an arm; default: the recipe's")
    add_set(command, "--overrides")
    command.add_argument("--run-root", default="runs")
    command.add_argument("--fresh", action="store_true", help="make data, policies and drafts again, even if stored")
    if preset == "study":
        command.add_argument("--in-turn", action="store_true", help="alternate the steps of all variants: a bake-off")
    command.set_defaults(preset=preset, **({} if preset == "study" else {"in_turn": preset == "bakeoff"}))
    command.epilog = _EPILOG


def launched(options: argparse.Namespace) -> run_command.Launch:
    """Build the launch that the options ask for, once grid and recipes of all variants are checked."""
    overrides = handed_on(options.set)
    grid = _grid(options)
    if options.in_turn:
        inputs: dict[str, Any] = {"workload": next(iter(grid.workloads), None), "seed": next(iter(grid.seeds), None)}
        changes = requested(overrides, num_steps=options.num_steps, **inputs)
        drafter_recipes(load_recipe(options.recipe, overrides=changes), grid)
        inputs |= {"methods": grid.methods, "inits": grid.draft_inits, "online": grid.online}
        inputs["num_speculative_tokens"] = grid.draft_lengths[0]
    else:
        variant_recipes(options.recipe, grid, requested(overrides, num_steps=options.num_steps))
        inputs = {name: values for name, values in vars(grid).items() if name != "online"}
    recipe = run_command.handed_on_recipe(options.recipe)
    inputs |= {"recipe": recipe, "num_steps": options.num_steps, "overrides": overrides}
    return run_command.Launch(
        workflow=Study.BAKE_OFF if options.in_turn else Study.ABLATION,
        inputs=inputs,
        execution=new_execution(f"{options.preset}-{Path(options.recipe).stem}"),
        reuse_stored=not options.fresh,
    )


def _grid(options: argparse.Namespace) -> Grid:
    """Build the grid from the given lists and the preset's defaults."""
    given = {name: tuple(map(kind, getattr(options, name))) for name, (kind, _) in _AXES.items()}
    if not options.in_turn:
        rule = "must be left out without steps in turn"
        require(not given["online"], "--online", rule, options.online, "an ablation keeps the recipe's")
        return Grid(**(given if any(given.values()) else _APART))
    rule = "must be left out with steps in turn"
    require(not given["losses"], "--losses", rule, options.losses, "override draft.eagle3.loss, for all of them")
    rule = "must name at most one value with steps in turn"
    for name in ("draft_lengths", "seeds", "workloads"):
        require(len(given[name]) <= 1, _AXES[name][1][0], rule, getattr(options, name), "an ablation takes several")
    return Grid(**given | {name: given[name] or values for name, values in _IN_TURN.items()})


def result(root: Path, launch: run_command.Launch) -> str:
    """Return the text to print at the end: tables, answers, and the path of the page."""
    from slipstream.study.ranking import StudyRecord
    from slipstream.study.study_page import answers, study_text

    page = root / launch.execution / Study(launch.workflow).node / f"{launch.workflow}.html"
    require(page.with_suffix(".json").is_file(), "the study", "must have left a ranking", str(page.parent))
    record = read_record(StudyRecord, page.with_suffix(".json"))
    return "\n\n".join(["", study_text(record), *answers(record), f"page: {page}"])
