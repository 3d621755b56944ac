"""A worker that is forked from a server is as if it had been started by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.workers import forked_workers
from slipstream.workers.forked_workers import client_command, managed

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
        forked_workers._start(tmp_path / "server", {}, [])
    child = subprocess.run(
        [sys.executable, "-c", _GPU_HOST, *forked_workers._OF_LEARNERS],
        env=seen[0],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    num_asked, touched = child.stdout.splitlines()[-1].split(None, 1)
    assert int(num_asked) > 0  # so that the answer matters
    assert touched == "[]"
