"""Hook by which Ray starts `client` for every worker that has an environment of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forked.manager import managed

DIRECTORY = "SLIPSTREAM_FORKED_WORKERS"
"""Names the directory of sockets."""

HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Names a function that Ray calls in whoever connects to it."""


def fork_workers(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """The runtime environment of a job, with the client for its Python."""
    client = Path(__file__).with_name("client.py")
    return {**(runtime_env or {}), "py_executable": f"{sys.executable} -I -S {client} {os.environ[DIRECTORY]}"}


def hooked() -> dict[str, str]:
    """The environment of a driver whose workers are forked; empty where none are."""
    if DIRECTORY not in os.environ:
        return {}
    return {HOOK: f"{__name__}.{fork_workers.__name__}", DIRECTORY: os.environ[DIRECTORY]}


@contextmanager
def forked_workers() -> Iterator[None]:
    """All Ray that is connected to in the block, here and in what inherits the environment, has its workers forked."""
    with managed() as directory:
        os.environ[DIRECTORY] = str(directory)
        os.environ.update(hooked())
        try:
            yield
        finally:
            del os.environ[DIRECTORY], os.environ[HOOK]


def not_forked(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a driver whose workers start as Ray starts them."""
    return {name: value for name, value in environment.items() if name not in (DIRECTORY, HOOK)}
