"""Config of the verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from slipstream.config import Checked, PositiveFloat, PositiveInt, ge, within

MAX_ANSWER_CHARS = 512
"""Longer answers score 0 unread; a request must fit into a pipe's buffer, or writing it could block."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Checked, path="reward"):
    """How long and in how many processes answers are verified."""

    # A function of one's own as FILE:NAME, with verl's signature; None: the final answer is compared as mathematics.
    function: str | None = None
    max_failed_fraction: Annotated[float, within("[0, 1]")] = 0.1  # more failures of the function end the run
    timeout_s: PositiveFloat = 5.0  # for one answer; then its worker is killed and the answer scores 0
    num_workers: PositiveInt = 1
    worker_memory_gib: Annotated[float, ge(0.5)] = 2.0
