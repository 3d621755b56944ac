"""The process of a pod: forked from a server that has imported the packages which tasks import, 10 s each time else.

None of our modules is imported before the fork: each is read under the pod's own environment, as in a container.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forked.processes import fork_server
from tests.forked.shown import environment_of

_OFTEN_S = 0.02
_CLONE_NEWNS = 0x00020000  # of sched.h


@dataclass(frozen=True, kw_only=True)
class Pod:
    command: tuple[str, ...]  # pyflyte-execute and its arguments
    working: Path
    log: Path
    environment: Mapping[str, str]
    has_small_shm: bool  # 64 MiB, as a container has unless it asks for more; takes root


@dataclass(frozen=True, kw_only=True)
class Running:
    pod: Pod
    process: BaseProcess

    def wait_until(self, is_so: Callable[[], bool], *, every_s: float = _OFTEN_S) -> bool:
        """Wait for something to happen; False if the pod ended before."""
        while self.process.is_alive():
            if is_so():
                return True
            time.sleep(every_s)
        return False

    def says(self, text: str) -> bool:
        return text in self.pod.log.read_text()

    def kill(self) -> None:
        """End it as a node does that goes away: it writes no last word."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)


def start(pod: Pod) -> Running:
    pod.log.touch()  # a watcher may read it before the pod writes
    process = fork_server().Process(target=_execute, args=(pod,), daemon=True)
    process.start()
    return Running(pod=pod, process=process)


def ray_processes(title: str, *, of: Running) -> list[int]:
    """A pod's processes of Ray that call themselves `title`, as in `EngineProcess.generate` while that method runs."""
    mark = str(of.pod.working).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if says(int(path.name), title) and mark in environment_of(path):
                found.append(int(path.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def says(pid: int, title: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{title}".encode())
    except OSError:
        return False


def _execute(pod: Pod) -> None:
    assert not {"slipstream", "tasks"} & sys.modules.keys(), "a pod imports our modules itself"
    with pod.log.open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    os.chdir(pod.working)
    os.environ.clear()
    os.environ.update(pod.environment)
    tempfile.tempdir = None  # read from the environment again
    if pod.has_small_shm:
        _small_shm()
    from flytekit.bin.entrypoint import execute_task_cmd

    sys.path[:0] = pod.environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = list(pod.command)
    execute_task_cmd()


def _small_shm() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=64m", "shm", "/dev/shm"]):
        subprocess.run(["mount", *command], check=True)
