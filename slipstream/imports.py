"""Importing large packages, in processes that are started often."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection within the block, and none ever of what it imported.

    An import of thousands of modules makes almost no garbage, but sets off collections that look through all of them:
    a fifth of the time that vLLM takes to import (docs/log.md).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
