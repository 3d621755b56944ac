"""Commands of Flyte, forked from a server that has imported flytekit and what our tasks import: 3 s less each."""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from tests.forked.manager import managed

_IMPORTED = ("flytekit.bin.entrypoint", "kubernetes.client", "matplotlib.axes", "scipy.stats")


def forked(script: str, *arguments: str) -> list[str]:
    """Command that runs a script of Python in a process of its own; the status is 0 whatever the script's."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("client.py")), str(_sockets()), script, *arguments]


@cache
def _sockets() -> Path:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(managed({False: _IMPORTED, True: ()}))
