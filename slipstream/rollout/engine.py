"""The protocol of a rollout engine: what the GRPO loop, tuning and evaluation ask of it, and nothing more.

Moving weights into an engine has a protocol of its own (`slipstream.refit.gate`), and so has the certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.records import AcceptanceStats, AutopilotStep
from slipstream.rollout.config import SamplingConfig
from slipstream.rollout.requests import GroupRequest
from slipstream.types import Prompt, RolloutGroup


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
    """One call of `generate`: `len(prompts)` groups in the order of the prompts.

    `generation_s` is the wall time of the engine that took longest, on its own clock, without the transport of prompts
    and rollouts. `acceptance` is None for an engine without a draft. `engine_idle_fraction` is the share of
    `generation_s` that engines spent without work, over all engines: 0 for a single one. `num_engine_restarts` counts
    engines that were lost and replaced since the call before. `running` are the engines' steps by running batch, and
    `autopilot` is what decided whether to draft, None where nothing does.
    """

    groups: tuple[RolloutGroup, ...]
    acceptance: AcceptanceStats | None
    generation_s: float
    num_engine_restarts: int = 0
    engine_idle_fraction: float = 0.0
    running: tuple[RunningTime, ...] = ()
    autopilot: AutopilotStep | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """What one engine did in one call: the groups that it finished, by `GroupRequest.index`, and when it worked."""

    groups: tuple[tuple[int, RolloutGroup], ...]
    acceptance: AcceptanceStats | None  # of all that it generated in the call, in unfinished groups too
    started_s: float  # on the engine's own clock
    ended_s: float
    running: tuple[RunningTime, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One rollout, and how many of its tokens each step of the engine gave: the draft windows it was made of.

    The first window is the prefill's one token, drawn without a draft. In each later one token i (from 1) stands at
    position i of the draft; position k + 1 is the bonus token. The last window may be cut short by the end.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    window_lengths: tuple[int, ...]
    policy_version: int
    draft_version: int | None


class Engine(Protocol):
    """Running engines that hold one version of the policy and, if they speculate, one of the draft."""

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample `group_size` rollouts a prompt; the same `seed` and weights give the same rollouts.

        Each depends on the seed, its prompt and its place in the group alone: see `slipstream.rollout.requests`.
        """
        ...


class InFlightEngine(Protocol):
    """Running engines whose rollouts go on while new weights enter: nothing here waits for a batch.

    One thread calls all of this, and refits the engines between two calls of `advance`.
    """

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        """Queue these groups, each on the engine that has the most room; `index` is unique over a whole training."""
        ...

    def advance(self, *, max_s: float) -> Portion:
        """Run all engines until one completes a group, or for `max_s` seconds; the groups that were completed."""
        ...

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        """Start the unfinished rollouts of these groups anew, with other seeds, under the present weights.

        Returns how many rollouts that were.
        """
        ...

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        """Groups that were submitted and are not complete."""
        ...
