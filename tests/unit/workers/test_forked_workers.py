"""A worker that is forked from a server is as if it had been started by itself."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.workers import forked_workers
from slipstream.workers.forked_workers import DIRECTORY, FORKING, HOOK, client_command, managed
from tests.forked.processes import environment_of

_WORKER = """
import json, os, sys
import own  # on its PYTHONPATH
told = {"argv": sys.argv[1:], "cwd": os.getcwd(), "mark": os.environ.get("MARK"), "own": own.VALUE, "pid": os.getpid(),
        "parent": os.getppid(), "has_xmlrpc": "xmlrpc.client" in sys.modules, "name": __name__}
print(json.dumps(told), flush=True)
sys.stdin.read()
if "wait" in sys.argv:
    import time
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    with managed({False: ["xmlrpc.client"], True: []}) as directory:
        yield directory


def _start(tmp_path: Path, sockets: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    worker = tmp_path / "worker.py"
    worker.write_text(_WORKER)
    (tmp_path / "own.py").write_text("VALUE = 7")
    command = [*client_command(sockets), str(worker), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), **variables}
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )


def _told(tmp_path: Path, sockets: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    output, _ = _start(tmp_path, sockets, *arguments, **variables).communicate(timeout=60)
    return json.loads(output)


def test_it_has_the_clients_arguments_directory_environment_and_path(tmp_path: Path, sockets: Path) -> None:
    told = _told(tmp_path, sockets, "--a=1", "b c", MARK="mine")
    own = {"argv": ["--a=1", "b c"], "cwd": str(tmp_path), "mark": "mine", "own": 7, "name": "__main__"}
    assert own.items() <= told.items()
    assert told["has_xmlrpc"]


def test_workers_share_a_server_unless_libraries_read_other_environments(tmp_path: Path, sockets: Path) -> None:
    one, like, other = (
        _told(tmp_path, sockets, MARK=mark, OMP_NUM_THREADS=threads) for mark, threads in ("11", "21", "12")
    )
    assert one["parent"] == like["parent"] != other["parent"]
    assert (one["mark"], like["mark"]) == ("1", "2")


def test_its_own_environment_is_shown_and_its_end_ends_the_client(tmp_path: Path, sockets: Path) -> None:
    client = _start(tmp_path, sockets, "wait", MARK="shown")
    assert client.stdout is not None
    told = json.loads(client.stdout.readline())
    assert b"MARK=shown" in environment_of(Path("/proc") / str(told["pid"])).split(b"\0")
    assert client.poll() is None
    os.kill(told["pid"], 9)
    assert client.wait(timeout=60) == 0


def test_without_a_server_or_with_one_that_cannot_import_the_client_becomes_the_worker(tmp_path: Path) -> None:
    client = _start(tmp_path, tmp_path / "none", MARK="alone")
    told = json.loads(client.communicate(timeout=60)[0])
    assert (told["pid"], told["mark"], told["own"], told["has_xmlrpc"]) == (client.pid, "alone", 7, False)
    with managed({False: ["no_such_module"], True: []}) as directory:
        first, second = (_told(tmp_path, directory, MARK=mark) for mark in ("first", "second"))
    assert (first["mark"], second["mark"]) == ("first", "second")
    assert not first["has_xmlrpc"]


def test_a_local_ray_without_gpus_has_its_workers_forked_within_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FORKING, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with forked_workers.forked_workers():
        directory = os.environ[DIRECTORY]
        assert os.environ[HOOK] == "slipstream.workers.forked_workers.fork_workers"
        assert (Path(directory) / "manager").is_socket()
        with forked_workers.forked_workers():
            assert os.environ[DIRECTORY] == directory
        runtime = forked_workers.fork_workers({"env_vars": {"A": "b"}})
        assert runtime["env_vars"] == {"A": "b"}
        assert shlex.split(runtime["py_executable"]) == client_command(Path(directory))
    assert not Path(directory).exists()
    assert not {*FORKING} & os.environ.keys()
    monkeypatch.setenv("RAY_ADDRESS", "ray://cluster:10001")
    with forked_workers.forked_workers():
        assert not {*FORKING} & os.environ.keys()


# As on a host with a GPU: torch's own check sets CUDA up unless it is told to ask NVML. Who does is noted. A CPU build
# cannot be made to answer for a GPU by other means.
_GPU_HOST = """
import importlib, os, sys
import torch

touched, asked = [], []

def is_available():
    asked.append(1)
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
        touched.append("cudaGetDeviceCount")
    return True

torch.cuda.is_available = is_available
torch.cuda._lazy_init = lambda: touched.append("cuInit")
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(asked), touched)
"""


def test_what_is_imported_before_learners_are_forked_leaves_cuda_alone(tmp_path: Path) -> None:
    """A process that is forked from one with CUDA has none: a learner would compute on the CPU."""
    seen: list[dict[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked_workers.subprocess, "Popen", lambda command, *, env, **_: seen.append(env))
        forked_workers._start(tmp_path / "log", {}, [])
    command = [sys.executable, "-c", _GPU_HOST, *forked_workers._OF_LEARNERS]
    child = subprocess.run(command, env=seen[0], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    num_asked, touched = child.stdout.splitlines()[-1].split(None, 1)
    assert int(num_asked) > 0  # so that the answer matters
    assert touched == "[]"
