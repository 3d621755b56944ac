"""Imports packages once, and forks a worker from itself for each request.

Run as a file: fork_server.py FILE MODULE..., the number of the open socket from which requests come.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = ("mnt", "net", "uts", "ipc", "pid")
_NOT_BEFORE = ("slipstream", "tasks", "workflows", "tests", "ray")
MOST_BYTES = 1 << 20
"""Size of the largest request."""


def main(file: int, modules: list[str]) -> None:
    """Import the modules, and fork a worker for each request, until the process that sends them ends."""
    del sys.path[0]  # this file's directory
    before = dict(os.environ)
    for name in modules:
        importlib.import_module(name)
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    early = {name.partition(".")[0] for name in sys.modules} & set(_NOT_BEFORE)
    assert not early, f"a worker imports {early} itself"
    gc.freeze()  # collecting in a worker would copy every page that it shares with the others
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    requests = socket.socket(fileno=file)
    while True:
        request, files, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not request:
            return  # the workers end with their Ray
        if os.fork() == 0:
            requests.close()
            _work(json.loads(request), files, set_by_imports)
        for each in files:
            os.close(each)


def _work(request: dict[str, Any], files: list[int], set_by_imports: dict[str, str]) -> NoReturn:
    """Become the worker that a client asks for, whose output and connection are `files`."""
    *output, connected = files
    connection = socket.socket(fileno=connected)  # open until the worker ends, for which the client waits
    connection.send(b"1")
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _enter_namespaces(client)
    for file, number in zip(output, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"] | set_by_imports)
    _show_environment()
    tempfile.tempdir = None  # read from the environment again
    argv = request["argv"]
    sys.argv[:] = argv
    on_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(Path(argv[0]).parent), *on_path]
    if "numpy" in sys.modules:  # else all workers would draw the same; `random` seeds itself anew
        sys.modules["numpy"].random.seed()
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


def _enter_namespaces(client: int) -> None:
    """Enter the namespaces of the client where they differ: it may run on a host or in a pod of its own."""
    own, theirs = (Path(f"/proc/{pid}/ns") for pid in ("self", client))
    others = [name for name in _NAMESPACES if os.readlink(own / name) != os.readlink(theirs / name)]
    files = [os.open(theirs / name, os.O_RDONLY) for name in others]
    for file in files:
        if _LIBC.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns {others}")
        os.close(file)
    if "pid" in others and os.fork():  # children alone are in it
        os._exit(0)


def _show_environment() -> None:
    """Show the environment in a file in memory that nobody closes: the kernel shows the server's as every worker's."""
    file = os.memfd_create("environ")
    os.write(file, "\0".join(f"{name}={value}" for name, value in os.environ.items()).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
