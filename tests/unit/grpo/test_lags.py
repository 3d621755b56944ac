"""Ratios and correction of a step's tokens by their lag, worked by hand."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest

from slipstream.grpo.config import Correction, Level, LossConfig
from slipstream.grpo.lags import effective_sample_size, lag_stats
from slipstream.records.steps import LagStats
from slipstream.types import Prompt, Rollout, RolloutGroup, TrainBatch, VersionSpan
from tests.unit.sampled import rollout

PROMPT = Prompt(id="0", text="0", token_ids=(1, 0), answer="7")
CONFIG = LossConfig(correction=Correction.TOKEN, truncated_importance_sampling=2.0)


def _rollout(num_tokens: int, *spans: tuple[int, int], version: int = 5) -> Rollout:
    """Of tokens with logprob 0; `spans` are pairs of version and number of tokens."""
    return rollout(
        (7,) * num_tokens,
        policy_version=spans[0][0] if spans else version,
        versions=tuple(VersionSpan(policy_version=v, draft_version=None, num_tokens=n) for v, n in spans),
    )


def _stats(rollouts: list[Rollout], ratios: list[list[float]], loss: LossConfig = CONFIG) -> tuple[LagStats, ...]:
    batch = TrainBatch(
        token_ids=tuple(PROMPT.token_ids + rollout.token_ids for rollout in rollouts),
        prompt_lengths=(2,) * len(rollouts),
        rollout_logprobs=tuple(rollout.rollout_logprobs for rollout in rollouts),
        advantages=(0.0,) * len(rollouts),
        policy_version=5,
    )
    before = [np.log(np.array(row)).astype(np.float32) for row in ratios]
    groups = [RolloutGroup(prompt=PROMPT, rollouts=(rollout,)) for rollout in rollouts]
    return lag_stats(groups, batch, before, loss)


def test_a_rollout_that_new_weights_entered_counts_under_each_of_its_versions() -> None:
    """Version 5 trains. Ratios 3 (lag 1), 1 and 0.5 (lag 0), then 1 and 1 (lag 2)."""
    rollouts = [_rollout(3, (4, 1), (5, 2)), _rollout(2, version=3)]
    young, middle, old = _stats(rollouts, [[3.0, 1.0, 0.5], [1.0, 1.0]])
    # lag, tokens, mean and largest ratio, changed share, effective sample
    assert astuple(young) == pytest.approx((0, 2, 0.75, 1.0, 0.0, 1.5**2 / (2 * 1.25)))
    assert astuple(middle) == pytest.approx((1, 1, 3.0, 3.0, 1.0, 1.0))
    assert astuple(old) == pytest.approx((2, 2, 1.0, 1.0, 0.0, 1.0))


def test_a_whole_responses_weight_changes_for_all_of_its_tokens() -> None:
    """Product 3, capped at 2, for both tokens of the first; the second keeps 0.5."""
    (found,) = _stats([_rollout(2), _rollout(1)], [[3.0, 1.0], [0.5]], replace(CONFIG, correction=Correction.SEQUENCE))
    assert found.clipped_fraction == pytest.approx(2 / 3)
    assert found.ratio_mean == pytest.approx(1.5)  # of tokens, whatever the weights are of
    assert found.effective_sample_size == pytest.approx(4.5**2 / (3 * 8.25))


def test_a_masked_token_weighs_nothing_and_counts_as_changed() -> None:
    """Band 0.5 to 2: by token 0.4 falls out; by sequence sqrt(0.4) = 0.63 stays in."""
    band = replace(CONFIG, mask_band=(0.5, 2.0))
    for ratios, loss, clipped, size in (
        ([0.4, 1.0], band, 0.5, 0.5),
        ([0.4, 1.0], replace(band, mask_level=Level.SEQUENCE), 0.0, 1.4**2 / (2 * 1.16)),
        ([0.4], band, 1.0, 0.0),
        ([4.0, 1.0], LossConfig(), 0.0, 1.0),  # without a correction all weigh the same
    ):
        (found,) = _stats([_rollout(len(ratios))], [ratios], loss)
        assert (found.clipped_fraction, found.effective_sample_size) == (clipped, pytest.approx(size))
        assert found.ratio_max == pytest.approx(max(ratios))


def test_a_ratio_beyond_all_numbers_is_shown_as_a_finite_one() -> None:
    rollout = replace(_rollout(1), rollout_logprobs=(-5000.0,))
    (found,) = _stats([rollout], [[1.0]])
    assert found.ratio_max == pytest.approx(np.exp(100.0))
    assert found.effective_sample_size == 1.0


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([0.0, 0.0], 0.0), ([], 0.0), ([2.0, 0.0, 2.0, 0.0], 0.5), ([3e-155], 1.0), ([1e-200, 3e-200], 0.8)],
)
def test_the_effective_sample_of_weights_worked_by_hand(weights: list[float], expected: float) -> None:
    assert effective_sample_size(np.array(weights)) == pytest.approx(expected)
