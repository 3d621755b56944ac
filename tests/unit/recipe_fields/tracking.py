"""Probes of where a run is tracked, and what the simulator is told of it."""

import typing
from types import SimpleNamespace
from typing import Any

from slipstream.recipe import Recipe, write_recipe
from slipstream.records.files import write_record
from slipstream.report.drift import find_drift
from slipstream.stages import report_speedup, runs, start_run, support
from slipstream.tracking import tracker
from slipstream.tracking.mlflow_store import Execution
from slipstream.tracking.spool import read_events
from tests.unit.recipe_fields.base import Check, Tools, checks


def tracked_run(recipe: Recipe, tools: Tools) -> object:
    """Where a run of the recipe is tracked, and how patiently."""
    seen: list[Any] = []

    class Thread:
        def __init__(self, spool: Any, *, uri: str, config: Any, command: str) -> None:
            seen.append(uri)

        def start(self) -> None:
            """Nothing is replayed."""

        def finish(self, wait_s: float) -> None:
            seen.append(wait_s)

    class Noting(tracker.Tracker):
        def __init__(self, config: Any, **run: Any) -> None:
            super().__init__(config, **run)
            header = next(event.header for event in read_events(self._spool.path) if event.header is not None)
            seen.append((header.experiment, header.tags))

    tools.patch.setattr(tracker, "_ReplayThread", Thread)
    tools.patch.setattr(tracker, "import_mlflow", lambda: None)
    tools.patch.setattr(runs, "Tracker", Noting)
    path = write_recipe(recipe, tools.directory / "recipe.yaml")
    root = tools.directory / "root"
    start_run.start_run(str(path), root=root, execution="e", overrides={})
    return [str(each).replace(str(root), "root") for each in seen]


def replay_pauses(recipe: Recipe, tools: Tools) -> object:
    """How long the thread that replays a run's points pauses."""
    seen: list[Any] = []
    tools.patch.setattr(tracker, "MlflowStore", lambda uri: None)
    tools.patch.setattr(tracker, "SpoolReplay", lambda path, store: SimpleNamespace(advance=lambda: False))
    spool = SimpleNamespace(path=tools.directory / "spool", sync=lambda: None)
    thread = tracker._ReplayThread(typing.cast(Any, spool), uri="u", config=recipe.tracking, command="")
    waits = SimpleNamespace(is_set=lambda: len(seen) > 0, wait=seen.append)
    thread._finishing = typing.cast(Any, waits)
    thread.run()
    return seen


def drift_verdict(recipe: Recipe, tools: Tools) -> object:
    """What a report says of results that are 1.5 % above those of six executions, and what the last task does then."""
    earlier = [_execution(number, value) for number, value in enumerate((1.0, 1.0, 1.001, 0.999, 1.0, 1.0))]
    tags = {"workload": "w", "hardware": "h"}
    subject = Execution(name="now", metrics={"result/mean_acceptance_length": 1.015}, tags=tags)
    record = find_drift(subject, earlier, recipe.tracking.drift)
    write_record(record, tools.directory / report_speedup.DRIFT_FILE)
    try:
        report_speedup.require_no_drift(recipe, tools.directory)
    except report_speedup.DriftError as error:
        return record, str(error)
    return record, "goes on"


def _execution(number: int, value: float) -> Execution:
    metrics, tags = {"result/lossless": 1.0, "result/mean_acceptance_length": value}, {"workload": "w", "hardware": "h"}
    return Execution(name=str(number), status="FINISHED", metrics=metrics, tags=tags)


def layout(recipe: Recipe, _: Tools) -> object:
    return support.recipe_layout(recipe)


CHECKS = {
    "name": Check("other", tracked_run),
    **checks("tracking", tracked_run, uri="http://localhost:1", experiment="elsewhere", close_wait_s=1.0),
    "tracking.replay_every_s": Check(1.0, replay_pauses),
    **checks("tracking.drift", drift_verdict, num_executions=5, fail=True),
    **checks("simulator", layout, model="qwen3-8b", hardware="gb200"),
}
