"""Imports packages once, and forks a worker from itself for each client that asks.

Run as a file: fork_server.py SOCKET MODULE...
"""

import array
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_NAMESPACES = ("mnt", "net", "uts", "ipc", "pid")
_NOT_BEFORE = ("slipstream", "tasks", "workflows", "tests", "ray")


def main(path: str, modules: list[str]) -> None:
    """Import the modules, listen, and fork a worker for each client, until the process that started this one ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # its workers end with their Ray
    del sys.path[0]  # this file's directory
    before = dict(os.environ)
    for name in modules:
        importlib.import_module(name)
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    early = {name.partition(".")[0] for name in sys.modules} & set(_NOT_BEFORE)
    assert not early, f"a worker imports {early} itself"
    gc.freeze()  # collecting in a worker would copy every page that it shares with the others
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"{path}.new")
    listening.listen(64)
    os.rename(f"{path}.new", path)  # whoever sees it can connect
    while True:
        connection, _ = listening.accept()
        with connection:
            if os.fork() == 0:
                listening.close()
                _work(connection, set_by_imports)


def _work(connection: socket.socket, set_by_imports: dict[str, str]) -> NoReturn:
    """Become the worker that a client asks for."""
    request, files = _received(connection)
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _enter_namespaces(client)
    for file, number in zip(files, (1, 2), strict=True):
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
    _reseed()
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


def _received(connection: socket.socket) -> tuple[dict[str, Any], Sequence[int]]:
    """Return a request, and the files that came with it."""
    data, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(2 * 4))
    files = array.array("i")
    for _, _, content in ancillary:
        files.frombytes(content)
    while part := connection.recv(1 << 16):
        data += part
    return json.loads(data), files


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


def _reseed() -> None:
    """Seed numpy anew, without which all workers would draw the same; `random` does so by itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
