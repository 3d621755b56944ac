"""Models of a few thousand parameters, and one Ray for all tests of a session."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from slipstream.workers.forked_workers import forked_workers

# The same examples each time: no commit fails by luck. No test is judged by absolute time: a first example pays for
# cold caches, and the machine is shared.
settings.register_profile("slipstream", derandomize=True, deadline=None)
settings.load_profile("slipstream")
# To look for more: `--hypothesis-profile explore` draws others each time.
settings.register_profile("explore", max_examples=1000, deadline=None)
# For `make mutants`, which runs every test many times: the same few examples each time.
settings.register_profile("mutants", derandomize=True, max_examples=10, deadline=None, database=None)

_CLUSTER = "tests/cluster/"
# Seconds of the files that take longer than half a minute on two cores, and of the longest unit tests. A wrong figure
# costs time alone.
_SECONDS = {
    _CLUSTER: 300,
    "tests/integration/test_gpu_check.py": 180,
    "tests/integration/test_pods.py": 155,
    "tests/faults/test_killed_runs.py": 70,
    "tests/integration/test_interrupt.py": 115,
    "tests/integration/test_lost_pods.py": 100,
    "tests/faults/test_killed_drivers.py": 90,
    "tests/faults/test_engine_faults.py": 80,
    "tests/integration/test_studies.py": 100,
    "tests/integration/test_speculation_methods.py": 125,
    "tests/integration/test_megatron_parallel.py": 45,
    "tests/integration/test_vllm_engine.py": 50,
    "tests/integration/test_placement.py": 60,
    "tests/integration/test_experts_refit.py": 60,
    "tests/integration/test_in_flight_engine.py": 50,
    "tests/integration/test_tensor_parallel_engine.py": 45,
    "tests/browser/test_mlflow.py": 45,
    "tests/integration/test_families_engine.py": 60,
    "tests/integration/test_draft_schedule.py": 50,
    "tests/integration/test_experts.py": 40,
    "tests/integration/test_shared_cores.py": 40,
    "tests/integration/test_workflow.py": 55,
    "tests/integration/test_brought_drafts.py": 35,
    "tests/unit/workflows/test_launch_plans.py": 25,
    "tests/unit/test_recipe_fields.py": 20,
    "tests/unit/drafts/test_online.py": 15,
    "tests/unit/report/test_report.py": 12,
    "tests/unit/stages/test_prepare_data.py": 20,
}


def pytest_configure(config: pytest.Config) -> None:
    """Have Ray's workers forked, in the process that starts those that run tests."""
    if not hasattr(config, "workerinput"):
        stack = ExitStack()
        stack.enter_context(forked_workers())
        config.add_cleanup(stack.close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Start the files in the order of the collection under `--dist loadfile`, each in one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        """The cluster's tests run in one process: they share their hosts, and another would wait for them."""

        def _split_scope(self, nodeid: str) -> str:
            return _CLUSTER if nodeid.startswith(_CLUSTER) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the longest files first, so that at the end no process waits long for another.

    Under `make mutants` those that mirror the changed module come first: they are short, and find most.
    """
    items.sort(key=lambda item: -_seconds(item.nodeid))
    module = os.environ.get("MUTANT_UNDER_TEST", "").partition(".x")[0]
    *packages, name = module.split(".")
    mirror = "/".join(["unit", *packages[1:], f"test_{name}.py"])
    items.sort(key=lambda item: not str(item.path).endswith(mirror))


def _seconds(nodeid: str) -> float:
    """About how long the tests of an item's file take together."""
    path = _CLUSTER if nodeid.startswith(_CLUSTER) else nodeid.partition("::")[0]
    return _SECONDS.get(path, 0 if path.startswith("tests/unit/") else 20)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    from slipstream.workers.session import connect

    connect()
    yield


@pytest.fixture(scope="session")
def make_policy() -> Callable[[Path, int], Path]:
    """Writes a random policy of the given seed."""
    return _make_policy


@pytest.fixture(scope="session")
def make_draft() -> Callable[[Path, Path, int], Path]:
    return _make_draft


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make_policy(tmp_path_factory.mktemp("policy"), 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Policies `old` and `new` with a random draft each."""
    root = tmp_path_factory.mktemp("models [a]*")  # vLLM searches weights by a glob pattern
    policies = {name: _make_policy(root / name, seed) for name, seed in (("old", 0), ("new", 1))}
    return policies | {f"{name}_draft": _make_draft(root / f"{name}_draft", path, 5) for name, path in policies.items()}


def _make_policy(path: Path, seed: int, **shape: int) -> Path:
    """The random policy of gpu-check, at the sizes of the tests."""
    from slipstream.gpu_check.check_stages import random_policy

    return random_policy(path, seed, **{"head_dim": 32, "max_position_embeddings": 512, **shape})


def _make_draft(path: Path, policy: Path, seed: int) -> Path:
    from slipstream.drafts.config import DraftConfig
    from slipstream.drafts.eagle3 import build_draft, save_draft

    save_draft(build_draft(policy, DraftConfig(seed=seed)), path)
    return path


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's `caplog` without the messages of threads that earlier tests left running, such as a tracker's."""
    earlier = set(threading.enumerate()) - {threading.current_thread()}

    def is_own(record: logging.LogRecord) -> bool:
        return threading.current_thread() not in earlier

    caplog.handler.addFilter(is_own)
    yield caplog
    caplog.handler.removeFilter(is_own)
