"""The environment of a process of Ray as others see it, forked or not."""

from __future__ import annotations

import os
from pathlib import Path

_SHOWN = "/memfd:environ"  # what `server` makes for a worker: the kernel shows its own environment as every worker's


def environment_of(process: Path) -> bytes:
    """As in /proc: what the process in that directory was started with, a zero byte between variables.

    Raises:
        OSError: it has ended.
    """
    for file in (process / "fd").iterdir():
        if os.readlink(file).startswith(_SHOWN):
            return file.read_bytes()
    return (process / "environ").read_bytes()
