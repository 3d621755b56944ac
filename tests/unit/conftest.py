"""What tests of several rooms are given: a command, an error, a store, a stand-in of a package."""

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.config import ConfigError
from slipstream.data import reasoning_tasks
from slipstream.tracking.config import sqlite_uri
from slipstream.tracking.mlflow_store import MlflowStore
from tests.standins import STANDINS

Command = Callable[..., str]
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


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command; gives what it printed, or what it said of an error where another `status` is expected."""

    def run(*arguments: object, status: int = 0) -> str:
        assert cli.main([str(each) for each in arguments]) == status
        printed, said = capsys.readouterr()
        return said if status else printed

    return run


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
