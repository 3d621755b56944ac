"""The guard against acceptance that collapses after a refit."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.records import AcceptanceStats
from slipstream.train.acceptance_guard import AcceptanceCollapse, AcceptanceGuard, sampling_deviation


def stats(*by_position: int, num_drafts: int = 1000) -> AcceptanceStats:
    accepted = sum(by_position)
    return AcceptanceStats(
        num_drafts=num_drafts,
        num_draft_tokens=num_drafts * len(by_position),
        num_accepted_tokens=accepted,
        accepted_by_position=by_position,
        mean_acceptance_length=1 + accepted / num_drafts,
        acceptance_rate=accepted / (num_drafts * len(by_position)),
        rate_by_position=tuple(count / num_drafts for count in by_position),
    )


def drawn(random: np.random.Generator, rate: float) -> AcceptanceStats:
    """1,000 drafts of three tokens, each accepted with chance `rate`."""
    accepted = (random.random((1000, 3)) < rate).cumprod(axis=1).sum(axis=0)
    return stats(*(int(count) for count in accepted))


def test_a_draft_that_was_not_refitted_stops_the_run_and_names_the_likely_causes() -> None:
    random = np.random.default_rng(0)
    guard = AcceptanceGuard()
    for step in range(10):
        guard.check(drawn(random, 0.8), policy_version=step)

    with pytest.raises(AcceptanceCollapse, match=r"at policy version 10\. Likely: the draft was not refitted"):
        guard.check(drawn(random, 0.2), policy_version=10)


def test_the_scatter_of_a_healthy_run_never_stops_it() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        guard = AcceptanceGuard()
        for step in range(200):
            guard.check(drawn(random, 0.8 + 0.02 * random.normal()), policy_version=step)


def test_a_slow_decline_takes_the_band_along() -> None:
    random = np.random.default_rng(1)
    guard = AcceptanceGuard()
    for step in range(200):
        guard.check(drawn(random, 0.8 - 0.002 * step), policy_version=step)


def test_a_resumed_run_knows_its_band() -> None:
    random = np.random.default_rng(2)
    guard = AcceptanceGuard(drawn(random, 0.8) for _ in range(6))

    with pytest.raises(AcceptanceCollapse):
        guard.check(drawn(random, 0.2), policy_version=6)


def test_a_young_run_has_no_band_yet() -> None:
    guard = AcceptanceGuard()
    guard.check(stats(900, 800, 700), policy_version=0)
    guard.check(stats(100, 10, 1), policy_version=1)


def test_sampling_deviation_by_hand() -> None:
    """Half of 100 drafts have one token accepted, the others none: variance 1/4, standard error 1/2 / 10."""
    assert sampling_deviation(stats(50, 0, num_drafts=100)) == pytest.approx(0.05)
