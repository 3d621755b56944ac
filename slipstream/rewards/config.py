"""Config of the verifier."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require

MAX_ANSWER_CHARS = 4096
"""A request must fit into a pipe's buffer, or writing it could block on a worker that hangs."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How long and in how many processes answers are verified."""

    timeout_s: float = 5.0  # for one answer; then its worker is killed and the answer scores 0
    num_workers: int = 1
    max_answer_chars: int = 512  # longer answers score 0 unread
    worker_memory_gib: float = 2.0

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "reward.timeout_s", "must be > 0", self.timeout_s)
        require(self.num_workers > 0, "reward.num_workers", "must be > 0", self.num_workers)
        require(
            0 < self.max_answer_chars <= MAX_ANSWER_CHARS,
            "reward.max_answer_chars",
            f"must lie in [1, {MAX_ANSWER_CHARS}]",
            self.max_answer_chars,
        )
        require(self.worker_memory_gib >= 0.5, "reward.worker_memory_gib", "must be >= 0.5", self.worker_memory_gib)
