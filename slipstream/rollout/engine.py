"""The protocol of a rollout engine: what the GRPO loop, tuning and evaluation ask of it, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.records import AcceptanceStats
from slipstream.rollout.config import SamplingConfig
from slipstream.types import Prompt, RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """One call of `generate`: `len(prompts)` groups in the order of the prompts.

    `generation_s` is the engine's own wall time, without the transport of prompts and rollouts.
    `acceptance` is None for an engine without a draft.
    """

    groups: tuple[RolloutGroup, ...]
    acceptance: AcceptanceStats | None
    generation_s: float


class RolloutEngine(Protocol):
    """A running engine that holds one version of the policy and, if it speculates, one of the draft."""

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample `group_size` rollouts a prompt; the same `seed` and weights give the same rollouts."""
        ...

    def close(self) -> None:
        """Free the engine's memory and processes."""
        ...
