"""Config of the verifier."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slipstream.config import LARGEST, NUMBER, Checked, Int, PositiveFloat, PositiveInt

MAX_ANSWER_CHARS = 4096
"""A request must fit into a pipe's buffer, or writing it could block on a worker that hangs."""


class RewardConfig(Checked, path="reward"):
    """How long and in how many processes answers are verified."""

    timeout_s: PositiveFloat = 5.0
    """Seconds for one answer; then its worker is killed and the answer scores 0. Set it higher for slow rewards."""
    num_workers: PositiveInt = 1
    """Processes that verify answers. Set it where rewards take a noticeable part of a step."""
    max_answer_chars: Annotated[Int, Field(ge=1, le=MAX_ANSWER_CHARS)] = 512
    """Characters of the longest answer; longer ones score 0 unread. Set it for tasks with long answers."""
    worker_memory_gib: Annotated[float, Field(ge=0.5, le=LARGEST), NUMBER] = 2.0
    """Memory of one worker, in GiB, beyond which its answer scores 0. Set it for rewards that load data."""
