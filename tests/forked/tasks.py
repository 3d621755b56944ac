"""Commands of Flyte, forked from a server that has imported flytekit and what our tasks import: 3 s less each."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from slipstream.workers.forked_workers import FORKING, client_command, managed

_IMPORTED = ("flytekit.bin.entrypoint", "kubernetes.client", "matplotlib.axes", "scipy.stats")


def forked(script: str, *arguments: str) -> list[str]:
    """Command that runs a script of Python in a process of its own; the status is 0 whatever the script's."""
    return [*client_command(_sockets()), script, *arguments]


def not_forked(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a driver whose workers start as Ray starts them, or from servers of its own."""
    return {name: value for name, value in environment.items() if name not in FORKING}


@cache
def _sockets() -> Path:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(managed({False: _IMPORTED, True: ()}))
