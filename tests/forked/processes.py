"""Processes for tests, forked from a server that has imported the packages that ranks and tasks import: 5 to 10 s each.

None of our modules is imported before the fork. What is called in a process is imported there by its name.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

_IMPORTED = (
    *("flytekit.bin.entrypoint", "s3fs", "ray", "torch", "speculators.models.eagle3.core"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.qwen3.modeling_qwen3"),
    *(f"megatron.core.{name}" for name in ("models.gpt", "distributed", "optimizer", "pipeline_parallel")),
    *("mlflow.tracking.client", "mlflow.store.tracking.sqlalchemy_store"),
)


def fork_server() -> ForkServerContext:
    """Where processes are forked from; it starts with the first one, and is the only one of the process that asks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, "tests.integration.pods"])
    return context


def environment_of(process: Path) -> bytes:
    """As in /proc: what the process in that directory was started with, a zero byte between variables.

    The kernel shows a forked worker the server's own environment; the worker's is in a file that the server made.

    Raises:
        OSError: it has ended.
    """
    for file in (process / "fd").iterdir():
        if os.readlink(file).startswith("/memfd:environ"):
            return file.read_bytes()
    return (process / "environ").read_bytes()
