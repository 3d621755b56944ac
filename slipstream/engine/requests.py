"""Requests to an engine: prompts in groups, and a seed for every rollout.

A rollout's seed follows from its prompt, its place in the group and the call's seed alone. So its tokens do not depend
on how many engines there are, on which one it runs, on the order of the prompts or on what else is in the batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """One prompt and one seed a rollout; `index` is its place among the prompts of the call."""

    index: int
    prompt: Prompt
    seeds: tuple[int, ...]


def group_requests(prompts: Sequence[Prompt], *, group_size: int, seed: int) -> tuple[GroupRequest, ...]:
    """One request a prompt. A prompt that stands there again goes on counting its samples: no seed is used twice."""
    num_seen: Counter[str] = Counter()
    requests = []
    for index, prompt in enumerate(prompts):
        first = num_seen[prompt.id]
        num_seen[prompt.id] += group_size
        seeds = tuple(rollout_seed(seed, prompt.id, sample) for sample in range(first, first + group_size))
        requests.append(GroupRequest(index=index, prompt=prompt, seeds=seeds))
    return tuple(requests)


def rollout_seed(seed: int, prompt_id: str, sample: int) -> int:
    """Seed of one rollout, in [0, 2**63): every engine's generators take such numbers.

    A hash, so that neighbouring calls, prompts and samples share nothing.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
