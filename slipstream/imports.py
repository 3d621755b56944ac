"""Faster import of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection within the block, and exempt what it imported from later collections.

    An import of thousands of modules makes almost no garbage, but triggers collections that scan all of them: a fifth
    of vLLM's import time (research/log.md).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
