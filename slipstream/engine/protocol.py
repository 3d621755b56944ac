"""The protocol of rollout engines: what the GRPO loop, tuning and evaluation ask of them, and nothing more.

Moving weights into engines has a protocol of its own (`slipstream.refit.gate`), and so has the certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipstream.engine.config import SamplingConfig
from slipstream.records.steps import AcceptanceStats, AutopilotStep
from slipstream.types import Prompt, RolloutGroup, VersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningTime:
    """An engine's steps while `num_running` rollouts ran, those that computed a prompt left out."""

    num_running: int
    num_steps: int
    num_tokens: int  # of all rollouts
    elapsed_s: float

    def plus(self, other: RunningTime) -> RunningTime:
        """Both together; of one running batch."""
        return RunningTime(
            num_running=self.num_running,
            num_steps=self.num_steps + other.num_steps,
            num_tokens=self.num_tokens + other.num_tokens,
            elapsed_s=self.elapsed_s + other.elapsed_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """Result of one call of `generate`: `len(prompts)` groups in the order of the prompts.

    `generation_s` is the wall time of the engine that took longest, on its own clock, without the transport of prompts
    and rollouts. `acceptance` is None for an engine without a draft. `engine_idle_fraction` is the share of
    `generation_s` that engines spent without work, over all engines: 0 for a single one. `num_engine_restarts` counts
    engines that were lost and replaced since the call before, and `num_regenerated` the rollouts that were therefore
    asked for more than once. `running` are the engines' steps by running batch, and
    `autopilot` is what decided whether to draft, None where nothing does.
    """

    groups: tuple[RolloutGroup, ...]
    acceptance: AcceptanceStats | None
    generation_s: float
    num_engine_restarts: int = 0
    num_regenerated: int = 0
    engine_idle_fraction: float = 0.0
    running: tuple[RunningTime, ...] = ()
    autopilot: AutopilotStep | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Work of one engine in one call: the groups that it finished, by `GroupRequest.index`, and when it worked.

    Of several engines, which share no clock, it is what they did together, from 0 to the mean of the times they worked.
    """

    groups: tuple[tuple[int, RolloutGroup], ...]
    acceptance: AcceptanceStats | None  # of all that it generated in the call, in unfinished groups too
    started_s: float  # on the engine's own clock
    ended_s: float
    running: tuple[RunningTime, ...] = ()
    num_regenerated: int = 0  # rollouts that were submitted again since the call before, for an engine was lost


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Directories of weights, and their versions."""

    policy: Path
    policy_version: int
    draft: Path | None = None
    draft_version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One rollout, and how many of its tokens each step of the engine gave: the draft windows it was made of.

    The first window is the prefill's one token, sampled without a draft. In each later one token i (from 1) stands at
    position i of the draft; position k + 1 is the bonus token. The last window may be cut short by the end.
    `versions` are those of a `Rollout`.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    window_lengths: tuple[int, ...]
    policy_version: int
    draft_version: int | None
    versions: tuple[VersionSpan, ...] = ()

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """The version of each token."""
        if not self.versions:
            return (self.policy_version,) * len(self.token_ids)
        return tuple(span.policy_version for span in self.versions for _ in range(span.num_tokens))


class Engines(Protocol):
    """Running engines that hold one version of the policy and, if they speculate, one of the draft."""

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample `group_size` rollouts a prompt; the same `seed` and weights give the same rollouts.

        Each depends on the seed, its prompt and its place in the group alone: see `slipstream.engine.requests`.
        """
        ...
