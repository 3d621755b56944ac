"""Config of the verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from slipstream.config import Checked, PositiveFloat, PositiveInt, ge, within

MAX_ANSWER_CHARS = 4096
"""A request must fit into a pipe's buffer, or writing it could block on a worker that hangs."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Checked, path="reward"):
    """How long and in how many processes answers are verified."""

    timeout_s: PositiveFloat = 5.0  # for one answer; then its worker is killed and the answer scores 0
    num_workers: PositiveInt = 1
    max_answer_chars: Annotated[int, within(f"[1, {MAX_ANSWER_CHARS}]")] = 512  # longer answers score 0 unread
    worker_memory_gib: Annotated[float, ge(0.5)] = 2.0
