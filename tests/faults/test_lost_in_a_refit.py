"""Processes that die while weights travel over gloo: the run goes on, and ends as one that nothing disturbed."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import merge
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.steps import ArmRecord
from slipstream.workers.calls import RayEngineControl
from tests.faults.test_killed_runs import assert_equal
from tests.small import RECIPE, train_arm

pytestmark = pytest.mark.slow

LOST = {
    "engine": {"num_engines": 2},
    "grpo": {"checkpoint_every_steps": 1},
    "refit": {"channel": "gloo", "bucket_mib": 0.02, "timeout_s": 60.0},  # of 0.6 MB
}


class FatalControl:
    """A `RayEngineControl`, in the learner's rank 0, whose third transfer never ends: a process is killed, once."""

    def __init__(self, control: RayEngineControl, victim: int | None, mark: Path) -> None:
        """Kill the process `victim`, None for the one that sends; `mark` remembers that it is done."""
        self._control, self._victim, self._mark = control, victim, mark
        self._num_left = 3

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._control, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return FatalControl, (self._control, self._victim, self._mark)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._num_left -= 1
        if self._num_left == 0 and not self._mark.exists():
            self._mark.touch()
            if self._victim is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                os.kill(self._victim, signal.SIGSTOP)  # the transfer waits meanwhile
                threading.Timer(0.5, os.kill, [self._victim, signal.SIGKILL]).start()
        self._control.update_weights(update_info)


class BesetEngines:
    """Real engines; a process dies in the third refit of a run."""

    def __init__(self, engines: Any, victim: Callable[[Any], int | None], mark: Path) -> None:
        self._engines, self._victim, self._mark = engines, victim, mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines, name)

    def control(self, *args: Any, **kwargs: Any) -> FatalControl:
        control = self._engines.control(*args, **kwargs)
        return FatalControl(control, self._victim(self._engines), self._mark)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("tiny", overrides=merge(RECIPE, LOST))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ray_session: None, recipe: Recipe, policy: Path) -> ArmRecord:
    return train_arm(recipe, policy, tmp_path_factory.mktemp("whole"))


def test_an_engine_that_dies_while_it_receives_weights_is_replaced_and_the_run_ends_equal(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: ArmRecord, caplog: pytest.LogCaptureFixture
) -> None:
    """The other engine has a part of the weights by then, and takes all of them again."""
    beset = partial(BesetEngines, victim=lambda engines: engines.workers[1].pid, mark=tmp_path / "killed")
    record = train_arm(recipe, policy, tmp_path, within=beset)

    assert_equal(record, whole)
    assert [step.num_engine_restarts for step in record.steps] == [0, 0, 1, 0]
    assert re.search(r"engine 1 on [\d.]+ died during a transfer of weights .*restart 1 of at most 3", caplog.text)
    assert "the learner restarts" not in caplog.text


def test_a_learner_that_dies_while_it_sends_weights_starts_anew_beside_the_same_engines(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: ArmRecord, caplog: pytest.LogCaptureFixture
) -> None:
    beset = partial(BesetEngines, victim=lambda engines: None, mark=tmp_path / "killed")
    record = train_arm(recipe, policy, tmp_path, within=beset)

    assert_equal(record, whole)
    assert [step.num_engine_restarts for step in record.steps] == [0, 0, 0, 0]
    assert re.search(r"learner rank 0 on [\d.]+ died during sending the policy", caplog.text)
    assert "the learner restarts from its last checkpoint, restart 1 of at most 1" in caplog.text
