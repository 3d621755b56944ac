"""Config of the verifier."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slipstream.config import LARGEST, NUMBER, Checked, PositiveFloat, PositiveInt, Probability

MAX_ANSWER_CHARS = 512
"""Longer answers score 0 unread; a request must fit into a pipe's buffer, or writing it could block."""


class RewardConfig(Checked, path="reward"):
    """Reward and the processes that compute it."""

    function: str | None = None
    """Reward of your own as `FILE:NAME`, with verl's arguments; null compares mathematics. Set it for your task."""
    max_failed_fraction: Probability = 0.1
    """Share of a step's responses for which `function` may fail; more end the run. Set it by how sure you are of it."""
    timeout_s: PositiveFloat = 5.0
    """Seconds for one answer; then its worker is killed and the answer scores 0. Set it higher for slow rewards."""
    num_workers: PositiveInt = 1
    """Processes that verify answers. Set it where rewards take a noticeable part of a step."""
    worker_memory_gib: Annotated[float, Field(ge=0.5, le=LARGEST), NUMBER] = 2.0
    """Memory of one worker, in GiB, beyond which its answer scores 0. Set it for rewards that load data."""
