"""A recorded demo, for the tests that calibrate on one."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.data import reasoning_tasks
from slipstream.recipe import load_recipe
from slipstream.records.files import read_record
from slipstream.records.run import RunRecord
from slipstream.records.stages import SweepPoint, TuningRecord
from slipstream.records.steps import ArmRecord, StepRecord
from slipstream.stages.support import recipe_layout
from slipstream.tracking.config import sqlite_uri
from slipstream.tracking.mlflow_store import MlflowStore
from slipstream.types import Arm, StageTimes
from tests.standins import STANDINS

_DEMO = Path(__file__).with_name("golden") / "demo_2026_11_21.json"

DemoArms = Callable[[float], tuple[ArmRecord, ...]]
Refusal = Callable[..., str]


@pytest.fixture(autouse=True)
def logging_of_each_test_alone() -> Iterator[None]:
    """A command that a test runs in this process logs to a stream of that test, which is closed after it."""
    ours = logging.getLogger("slipstream")
    handlers, level, propagate = list(ours.handlers), ours.level, ours.propagate
    yield
    ours.handlers[:], ours.propagate = handlers, propagate
    ours.setLevel(level)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in of the package reasoning-gym, here and in the workers that score."""
    monkeypatch.syspath_prepend(str(STANDINS))
    monkeypatch.setenv("PYTHONPATH", f"{STANDINS}:{Path(__file__).parents[2]}")
    _forget_tasks()
    yield
    _forget_tasks()


def _forget_tasks() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
    reasoning_tasks._dataset.cache_clear()
    reasoning_tasks._entry.cache_clear()


@pytest.fixture(scope="session")
def refusal() -> Refusal:
    """What `build(**values)` says when it refuses them."""

    def ask(build: Callable[..., object], **values: object) -> str:
        with pytest.raises(ConfigError) as caught:
            build(**values)
        return str(caught.value)

    return ask


@pytest.fixture(scope="session")
def make_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Puts an empty MLflow store into a root of runs: its tables take seconds to create, and a copy of them nothing."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowStore(sqlite_uri(path))

    def make(root: Path) -> Path:
        shutil.copy(path, root / path.name)
        return root

    return make


@pytest.fixture
def stored_root(tmp_path: Path, make_store: Callable[[Path], Path]) -> Path:
    """A test's own root of runs, with an empty MLflow store."""
    return make_store(tmp_path)


@pytest.fixture(scope="session")
def demo() -> dict[str, Any]:
    """Times and counts of a demo's steps and of its sweep."""
    return json.loads(_DEMO.read_text())


@pytest.fixture(scope="session")
def demo_arms(demo: dict[str, Any]) -> DemoArms:
    """Both arms of the recorded demo, the speculative one's generation `factor` times as long."""

    def build(factor: float) -> tuple[ArmRecord, ...]:
        base = tuple(_step(index, values, demo, 1.0) for index, values in enumerate(demo["autoregressive"]))
        spec = tuple(_step(index, values, demo, factor) for index, values in enumerate(demo["speculative"]))
        return (
            ArmRecord(arm=Arm.AUTOREGRESSIVE, num_speculative_tokens=0, steps=base),
            ArmRecord(arm=Arm.SPECULATIVE, num_speculative_tokens=demo["chosen_k"], steps=spec),
        )

    return build


@pytest.fixture(scope="session")
def demo_tuning(demo: dict[str, Any]) -> TuningRecord:
    """The recorded demo's sweep."""
    points = tuple(
        SweepPoint(
            **point, num_repeats=3, speedup=point["autoregressive_s"] / point["generation_s"], rate_by_position=()
        )
        for point in demo["points"]
    )
    return TuningRecord(chosen_k=demo["chosen_k"], reason="recorded", points=points, schedule=())


def _step(index: int, values: dict[str, Any], demo: dict[str, Any], factor: float) -> StepRecord:
    from tests.unit.report.handmade import step

    generation_s = factor * values["generation_s"]
    times = {"data_s": 0.002, "prepare_s": 0.1, "generation_s": generation_s, "logprob_s": 0.38, "train_s": 1.19}
    return replace(
        step(index, generation_s=generation_s, reward=0.0),
        times=StageTimes(**times, step_s=generation_s + 1.672),
        num_rollouts=demo["num_rollouts"],
        num_response_tokens=values["num_response_tokens"],
        num_truncated=values["num_truncated"],
    )


@pytest.fixture
def run(demo_arms: DemoArms, demo_tuning: TuningRecord) -> RunRecord:
    """The record of a whole run around the recorded demo."""
    recipe = load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
    return replace(
        read_record(RunRecord, Path(__file__).parent / "golden" / "run.json"),
        execution="recorded",
        tuning=demo_tuning,
        arms=demo_arms(1.0),
        asynchronous=(),
        layout=recipe_layout(recipe),
    )
