"""Make one part of an ablation, without GPUs or with them."""

from __future__ import annotations

from flytekit import task

from slipstream import logs
from slipstream.stages.context import RunContext
from slipstream.study import apart as stage
from tasks.recoverable import recoverable
from tasks.resources import PREPARING, TRAINING, on_cpus, on_gpus


@task(**on_cpus(PREPARING))
@recoverable
def make_policy(context: RunContext) -> str:
    """Data and policy of a workload; the part's name."""
    logs.configure()
    return stage.make_part(context)


@task(**on_gpus(TRAINING))
@recoverable
def make_part(context: RunContext) -> str:
    """A draft, a baseline or a variant, whichever `context` names; the part's name."""
    logs.configure()
    return stage.make_part(context)
