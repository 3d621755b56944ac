"""Requests to an engine: prompts in groups, and a seed for every rollout.

A rollout's seed follows from its prompt, its place in the group and the call's seed alone. The rollout's tokens
therefore do not depend on the number of engines, its engine, the order of the prompts or the batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.types import Prompt


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
