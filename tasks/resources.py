"""What every task shares: image, resources and cache. The place to look before a launch on a cluster.

A small role runs on CPU; a large one needs the accelerators that engine and learner share. On a laptop Flyte ignores
requests, so the same code runs there.
"""

from __future__ import annotations

import os

from flytekit import Cache, Resources

IMAGE = os.environ.get("SLIPSTREAM_IMAGE", "slipstream:latest")
"""Built from the Dockerfile at the root, or from images/gpu.Dockerfile for the tasks that need an accelerator."""

SMALL = Resources(cpu="2", mem="8Gi")
GPUS = os.environ.get("SLIPSTREAM_GPUS", "")
LARGE = Resources(cpu="2", mem="12Gi", gpu=GPUS) if GPUS else Resources(cpu="2", mem="12Gi")

RETRIES = 2
"""A retried task finds its checkpoints and its MLflow run by execution and node."""

CACHE = Cache(version="1", ignored_inputs=("context",))
"""For tasks whose inputs determine their output. Measured tasks are not cached: a timing belongs to its own run."""
