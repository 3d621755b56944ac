"""How a refit is checked, and the state that an engine reports about it."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require


class RefitError(RuntimeError):
    """An engine does not hold what the learner published: going on would train on another policy's rollouts."""


@dataclass(frozen=True, kw_only=True)
class RefitConfig:
    """How often a refit is checked tensor by tensor; versions and cache resets are checked every time."""

    check_every_steps: int = 1
    max_probe_difference: float = 0.1  # nats a token, where an engine hides its tensors and only its logprobs show

    def __post_init__(self) -> None:
        require(self.check_every_steps >= 1, "refit.check_every_steps", "must be >= 1", self.check_every_steps)
        require(self.max_probe_difference > 0, "refit.max_probe_difference", "must be > 0", self.max_probe_difference)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """What an engine says it holds, and how often it forgot its cached prefixes."""

    policy_version: int
    policy_digest: str  # of the bytes that the last refit read; empty before the first
    draft_version: int | None
    num_prefix_cache_resets: int
