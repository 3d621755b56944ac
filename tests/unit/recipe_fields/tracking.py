"""Probes of where a run is tracked, and what the simulator is told of it."""

from __future__ import annotations

import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.recipe import Recipe, write_recipe
from slipstream.stages import start_run, support
from slipstream.tracking import tracker
from tests.unit.recipe_fields.base import Check, Tools


def tracked_run(recipe: Recipe, tools: Tools) -> object:
    """Where a run of the recipe is tracked, and how patiently."""
    seen: list[Any] = []

    class Thread:
        def __init__(self, spool: Any, *, uri: str, config: Any) -> None:
            seen.append(uri)

        def start(self) -> None:
            """Nothing is replayed."""

        def finish(self, wait_s: float) -> None:
            seen.append(wait_s)

    class Noting(tracker.Tracker):
        def __init__(self, config: Any, header: Any, *, root: Path) -> None:
            seen.append((header.experiment, header.tags))
            super().__init__(config, header, root=root)

    tools.patch.setattr(tracker, "_ReplayThread", Thread)
    tools.patch.setattr(tracker, "import_mlflow", seen.append)
    tools.patch.setattr(support, "Tracker", Noting)
    path = write_recipe(recipe, tools.directory / "recipe.yaml")
    root = tools.directory / "root"
    context, _ = start_run.start_run(str(path), workload=None, root=root, execution="e", overrides={})
    return [str(each).replace(str(root), "root") for each in seen], context.experiment, context.workload


def replay_pauses(recipe: Recipe, tools: Tools) -> object:
    """How long the thread that replays a run's points pauses, and how long it lets the server take."""
    seen: list[Any] = []
    tools.patch.setattr(tracker, "MlflowStore", lambda uri, request_timeout_s: seen.append(request_timeout_s))
    tools.patch.setattr(tracker, "SpoolReplay", lambda path, store: SimpleNamespace(advance=lambda: False))
    spool = SimpleNamespace(path=tools.directory / "spool", sync=lambda: None)
    thread = tracker._ReplayThread(typing.cast(Any, spool), uri="u", config=recipe.tracking)
    waits = SimpleNamespace(is_set=lambda: len(seen) > 1, wait=seen.append)
    thread._finishing = typing.cast(Any, waits)
    thread.run()
    return seen


def layout(recipe: Recipe, _: Tools) -> object:
    return support.recipe_layout(recipe)


CHECKS = {
    "name": Check("other", tracked_run),
    "tracking.uri": Check("http://localhost:1", tracked_run),
    "tracking.experiment": Check("elsewhere", tracked_run),
    "tracking.request_timeout_s": Check(3, tracked_run),
    "tracking.close_wait_s": Check(1.0, tracked_run),
    "tracking.replay_every_s": Check(1.0, replay_pauses),
    "simulator.model": Check("qwen3-8b", layout),
    "simulator.hardware": Check("gb200", layout),
}
