"""Client that Ray starts as a worker: it has a `fork_server` fork the real one, and lives as long as that does.

Run as a file by an interpreter without site-packages: the standard library alone, and little of it.
"""

import array
import json
import os
import signal
import socket
import sys
from contextlib import suppress


def main() -> None:
    """Have the worker forked, or become it if nobody forks."""
    directory, *argv = sys.argv[1:]
    request = json.dumps({"argv": argv, "environment": dict(os.environ), "cwd": os.getcwd()}).encode()
    try:
        worker = connected(ask(f"{directory}/manager", request).decode())
        send(worker, request)
    except OSError:  # whoever forks has ended, or was killed
        os.execv(sys.executable, [sys.executable, *argv])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a worker does, from the keyboard
    with suppress(ConnectionError):
        worker.recv(1)  # the worker says nothing, and its end closes the connection


def send(worker: socket.socket, request: bytes) -> None:
    """Ask a server for a worker with this process's output."""
    files = array.array("i", [1, 2])
    sent = worker.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    worker.sendall(request[sent:])
    worker.shutdown(socket.SHUT_WR)


def ask(path: str, request: bytes) -> bytes:
    """Return the answer to `request`; whoever answers closes the connection."""
    with connected(path) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return received(connection)


def connected(path: str) -> socket.socket:
    """Connect to a socket in the file system."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return connection


def received(connection: socket.socket) -> bytes:
    """Return all that the other side sends until it closes its side."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
