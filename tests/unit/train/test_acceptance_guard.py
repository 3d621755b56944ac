"""The guard against acceptance that collapses after a refit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slipstream.records.steps import AcceptanceStats
from slipstream.train.acceptance_guard import AcceptanceCollapse, AcceptanceGuard
from tests.unit.sampled import accepted


def drawn(random: np.random.Generator, rate: float) -> AcceptanceStats:
    """1,000 drafts of three tokens, each accepted with chance `rate`."""
    counts = (random.random((1000, 3)) < rate).cumprod(axis=1).sum(axis=0)
    return accepted(1000, *(int(count) for count in counts))


def of_length(length: float, num_drafts: int = 10**8) -> AcceptanceStats:
    """Of drafts that are accepted whole or not at all, by default so many that their number adds no scatter."""
    num_positions = max(1, math.ceil(length - 1))
    return accepted(num_drafts, *[round((length - 1) / num_positions * num_drafts)] * num_positions)


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


def test_a_step_of_a_schedule_with_few_drafts_or_none_stops_no_run() -> None:
    """Drafts of 3 tokens had 2.1 accepted; that 3 of them are rejected whole is no wonder, that 30 are is one."""
    history, none = [accepted(1000, 800, 700, 600)] * 8, accepted(0, 0, 0, 0)
    guard = AcceptanceGuard(history, may_rest=True)
    guard.check(none, policy_version=8)
    with pytest.raises(AcceptanceCollapse, match="last 8 steps"):
        guard.check(accepted(30, 0, 0, 0), policy_version=9)
    guard.check(accepted(3, 0, 0, 0), policy_version=9)
    with pytest.raises(AcceptanceCollapse):
        AcceptanceGuard(history).check(none, policy_version=8)  # of one length throughout


MOVING = [3.9, 3.91, 3.9, 3.89, 3.9, 3.91, 3.9, 3.8, 3.6, 3.4, 3.1, 2.8, 2.5, 2.2, 2.0, 1.9]


def test_a_policy_that_moves_away_from_its_draft_is_warned_of_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = AcceptanceGuard()
    for step, length in enumerate(MOVING):
        guard.check(of_length(length, num_drafts=1000), policy_version=step)
    (message,) = caplog.messages
    assert "from 3.90 to 3.60, step by step, up to policy version 8: the policy moves away from its draft" in message
    assert "draft.online.when: when_stale" in message


@pytest.mark.parametrize("num_steps", range(6, 12))
def test_a_draft_that_is_damaged_while_the_policy_begins_to_move_still_stops_the_run(num_steps: int) -> None:
    guard = AcceptanceGuard(of_length(length, num_drafts=1000) for length in MOVING[:num_steps])
    with pytest.raises(AcceptanceCollapse):
        guard.check(of_length(1.05, num_drafts=1000), policy_version=num_steps)


def test_half_of_what_was_accepted_is_taken_and_anything_lower_is_not() -> None:
    """Of 64 drafts 56 had their token accepted; 28 are half, six deviations of nearly 1/2 / 8 lie above that."""
    AcceptanceGuard([accepted(64, 56)] * 6).check(accepted(64, 28), policy_version=0)
    with pytest.raises(AcceptanceCollapse) as caught:
        AcceptanceGuard([accepted(64, 56)] * 6).check(accepted(64, 27), policy_version=9)
    assert str(caught.value) == (
        "mean acceptance length must stay near that of the last 6 steps, 1.88, and at least at 1.44, got 1.42 at "
        "policy version 9. Likely: the draft was not refitted with the policy, or twice for one; the prefix cache is "
        "stale; the draft's positions end before max_model_len; prompts of another kind; a policy that a few steps "
        "moved far from its draft, which draft.online.when: when_stale trains during RL, and draft.autopilot switches "
        "off where it loses"
    )


BANDS: dict[str, tuple[list[float], float, float | None]] = {
    # half at 3.6 and half at 4.0: 1.4826 x 0.2 = 0.2965 (their deviation is 0.2191), so 3.8 - 1.779 = 2.021
    "steps of two kinds scatter by their median distance": ([3.6, 4.0] * 3, 2.03, 2.01),
    # five at 4.0 and one, the first, at 3.3: median distance 0, deviation 0.2858, so 4 - 1.715 = 2.285
    "one step apart scatters by the sample deviation": ([3.3] + [4.0] * 5, 2.30, 2.27),
    "five steps are no band": ([2.0] * 5, 1.1, None),
    "six steps are": ([2.0] * 6, 1.51, 1.1),
    # half of what was accepted is 2.5; of 20 steps one at 1.0 leaves, with a deviation of 0.6708, all that can be
    "the first of 21 steps is forgotten": ([1.0] + [4.0] * 20, 2.51, 2.0),
    "the first of 20 is not": ([1.0] + [4.0] * 19, 2.0, None),
    # from 4.0 to 3.7 in three steps: twice as fast it is at 3.5 next, and half of what that accepts is 2.25
    "a fall goes on as the last four steps": ([4.0, 4.0, 4.1, *[4.0] * 12, 4.1, 4.0, 3.98, 3.9, 3.7], 2.251, 2.249),
}


@pytest.mark.parametrize(("history", "taken", "refused"), BANDS.values(), ids=BANDS)
def test_a_band_ends_where_it_is_worked_out_by_hand(history: list[float], taken: float, refused: float | None) -> None:
    def check(length: float) -> None:
        AcceptanceGuard(of_length(each) for each in history).check(of_length(length), policy_version=0)

    check(taken)
    if refused is not None:
        with pytest.raises(AcceptanceCollapse):
            check(refused)


def test_a_fall_of_few_drafts_has_six_deviations_of_their_number() -> None:
    """From 3.0 to 2.5 in three steps leads to 2.167; 64 drafts of two tokens deviate by 0.1233, six by 0.740."""
    history = [of_length(length) for length in [*[3.0] * 17, 2.9, 2.7, 2.5]]
    AcceptanceGuard(history).check(accepted(64, 14, 14), policy_version=0)  # 1.438, above 1.427
    with pytest.raises(AcceptanceCollapse, match=r"at least at 1\.43, got 1\.41"):
        AcceptanceGuard(history).check(accepted(64, 13, 13), policy_version=0)


def test_a_second_step_below_the_band_is_no_warning_nor_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """18 of 36 drafts deviate by 1/12: six of them below 2.0 is where this step lies."""
    AcceptanceGuard([of_length(2.0)] * 6).check(accepted(36, 18), policy_version=0)
    assert not caplog.records
    # After 3.0 the deviation of 20 steps is 0.2236, the band's end 2.658 and half of what is accepted 1.67.
    guard = AcceptanceGuard([of_length(4.0)] * 20)
    for length in (3.0, 2.6):
        guard.check(of_length(length), policy_version=0)
    assert len(caplog.records) == 1
