"""Protocol of rollout engines for the GRPO loop, tuning and evaluation, requests to them, and their results.

A rollout's seed follows from its prompt, its place in the group and the call's seed alone. The rollout's tokens
therefore do not depend on the number of engines, its engine, the order of the prompts or the batch.

`slipstream.refit.channel` has the protocol for a refit, `slipstream.losslessness.sampling` the certificate's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.engine.acceptance import combine
from slipstream.engine.config import SamplingConfig
from slipstream.records.steps import AcceptanceStats, AutopilotStep
from slipstream.types import Prompt, RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """A prompt with a seed for each of its rollouts; `index` is the prompt's place in the call."""

    index: int
    prompt: Prompt
    seeds: tuple[int, ...]


def group_requests(prompts: Sequence[Prompt], *, group_size: int, seed: int) -> tuple[GroupRequest, ...]:
    """Make a request for each prompt; a repeated prompt continues its sample numbers, so no seed is used twice."""
    num_seen: Counter[str] = Counter()
    requests = []
    for index, prompt in enumerate(prompts):
        first = num_seen[prompt.id]
        num_seen[prompt.id] += group_size
        seeds = tuple(rollout_seed(seed, prompt.id, sample) for sample in range(first, first + group_size))
        requests.append(GroupRequest(index=index, prompt=prompt, seeds=seeds))
    return tuple(requests)


def rollout_seed(seed: int, prompt_id: str, sample: int) -> int:
    """Compute the seed of one rollout, in [0, 2**63), the range of an engine's generators.

    The seed is a hash, so that neighbouring calls, prompts and samples get unrelated seeds.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningTime:
    """Decoding steps of an engine with `num_running` rollouts in the batch, without steps that compute a prompt."""

    num_running: int
    num_steps: int
    num_tokens: int  # over all rollouts
    elapsed_s: float


def summed(times: Iterable[RunningTime]) -> tuple[RunningTime, ...]:
    """Sum decoding steps by the size of the running batch."""
    by_batch: dict[int, list[RunningTime]] = {}
    for time in times:
        by_batch.setdefault(time.num_running, []).append(time)
    return tuple(
        RunningTime(
            num_running=num_running,
            num_steps=sum(time.num_steps for time in same),
            num_tokens=sum(time.num_tokens for time in same),
            elapsed_s=sum(time.elapsed_s for time in same),
        )
        for num_running, same in sorted(by_batch.items())
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """Result of one call of `generate`: a group for each prompt, in the order of the prompts.

    Attributes:
        acceptance: None for an engine without a draft.
        generation_s: wall time of the slowest engine on its own clock, without transport of prompts and rollouts.
        num_engine_restarts: engines that were lost and replaced since the call before.
        num_regenerated: rollouts that were sampled again because an engine was lost.
        num_preemptions: preemptions of rollouts whose KV cache had to make room for others and was recomputed.
        engine_idle_fraction: share of `generation_s` that engines were idle, over all engines; 0 for a single engine.
        running: the engines' decoding steps by running batch.
        autopilot: state of the controller that switches drafting on and off; None without a controller.
        num_calls: calls of `generate` that the result covers, with the same weights.
        extra_generation_s: `generation_s` of all of them but the first.
    """

    groups: tuple[RolloutGroup, ...]
    acceptance: AcceptanceStats | None
    generation_s: float
    num_engine_restarts: int = 0
    num_regenerated: int = 0
    num_preemptions: int = 0
    engine_idle_fraction: float = 0.0
    running: tuple[RunningTime, ...] = ()
    autopilot: AutopilotStep | None = None
    num_calls: int = 1
    extra_generation_s: float = 0.0


def joined(results: Sequence[GenerationResult]) -> GenerationResult:
    """Join the results of calls that followed one another with the same weights; none of them had an autopilot."""
    if len(results) == 1:
        return results[0]
    generation_s = sum(result.generation_s for result in results)
    idle_s = sum(result.engine_idle_fraction * result.generation_s for result in results)
    acceptances = [result.acceptance for result in results if result.acceptance is not None]
    return GenerationResult(
        groups=tuple(group for result in results for group in result.groups),
        acceptance=combine(acceptances) if acceptances else None,
        generation_s=generation_s,
        num_engine_restarts=sum(result.num_engine_restarts for result in results),
        num_regenerated=sum(result.num_regenerated for result in results),
        num_preemptions=sum(result.num_preemptions for result in results),
        engine_idle_fraction=idle_s / generation_s if generation_s else 0.0,
        running=summed(time for result in results for time in result.running),
        num_calls=len(results),
        extra_generation_s=generation_s - results[0].generation_s,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Result of one engine's call: the groups that it completed, by `GroupRequest.index`, and its time.

    A portion joined from several engines, which share no clock, runs from 0 to the engines' mean busy time.
    """

    groups: tuple[tuple[int, RolloutGroup], ...]
    acceptance: AcceptanceStats | None  # over all tokens of the call, also those of unfinished groups
    started_s: float  # on the engine's own clock
    ended_s: float
    running: tuple[RunningTime, ...] = ()
    num_regenerated: int = 0  # rollouts that were submitted again since the call before, as an engine was lost
    num_preemptions: int = 0
    num_engine_restarts: int = 0  # since the call before


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One rollout with its draft windows: the number of tokens from each step of the engine.

    The first window is the prefill's one token, sampled without a draft. In a later window token i (from 1) stands at
    position i of the draft, and position k + 1 is the bonus token. The end of the rollout may cut the last window.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    window_lengths: tuple[int, ...]
    policy_versions: tuple[int, ...]  # of each token


class Engines(Protocol):
    """Running engines with one version of the policy and, if they speculate, one version of the draft."""

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample `group_size` rollouts a prompt.

        A rollout depends on the weights, `seed`, its prompt and its place in the group alone.
        """
        ...
