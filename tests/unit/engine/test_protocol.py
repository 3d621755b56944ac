"""Seeds of rollouts: from the call's seed, the prompt and the sample alone."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.protocol import group_requests, rollout_seed
from slipstream.types import Prompt


def prompt(name: str) -> Prompt:
    return Prompt(id=name, text="", token_ids=(1,), answer="")


def test_a_seed_is_63_bits_of_the_hash_of_what_it_stands_for() -> None:
    digest = hashlib.blake2b(b"5/problem/2", digest_size=8).digest()
    assert rollout_seed(5, "problem", 2) == int.from_bytes(digest, "big") // 2
    assert 0 <= rollout_seed(5, "problem", 2) < 2**63


def test_a_prompt_that_comes_again_counts_its_samples_on_and_no_other_counts() -> None:
    first, other, again = group_requests([prompt("a"), prompt("b"), prompt("a")], group_size=2, seed=1)
    assert first.seeds + again.seeds == tuple(rollout_seed(1, "a", sample) for sample in range(4))
    assert other.seeds == tuple(rollout_seed(1, "b", sample) for sample in range(2))
    assert [request.index for request in (first, other, again)] == [0, 1, 2]


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_no_two_rollouts_share_a_seed(names: list[str], group_size: int, seed: int) -> None:
    calls = [group_requests([prompt(name) for name in names], group_size=group_size, seed=s) for s in (seed, seed + 1)]
    seeds = [seed for requests in calls for request in requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == 2 * len(names) * group_size
