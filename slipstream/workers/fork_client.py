"""Client that Ray starts as a worker: it has a `fork_server` fork the real one, and lives as long as that does.

Run as a file by an interpreter without site-packages: the standard library alone, and little of it.
"""

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
    connection, is_forked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), b""
    with suppress(OSError):  # whoever forks has ended, or was killed
        connection.connect(f"{directory}/manager")
        socket.send_fds(connection, [request], [1, 2])  # the worker has this process's output
        is_forked = connection.recv(1)
    if not is_forked:
        os.execv(sys.executable, [sys.executable, *argv])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a worker does, from the keyboard
    with suppress(ConnectionError):
        connection.recv(1)  # the worker says nothing more, and its end closes the connection


if __name__ == "__main__":
    main()
