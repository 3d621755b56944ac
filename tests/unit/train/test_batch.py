"""From scored rollouts to a training batch, and how far engine and learner disagree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.grpo.config import LossConfig, LossKind
from slipstream.train import batch as batch_module
from slipstream.train.batch import assemble, chosen, have_signal, mismatch
from slipstream.types import Prompt, RolloutGroup, TrainBatch, VersionSpan
from tests.unit.sampled import rollout
from tests.unit.train.world import CONFIG

PROMPT = Prompt(id="0", text="0", token_ids=(1, 0), answer="7")
ROLLOUT = rollout((7, 2), (-0.5, -0.25))
GROUP = RolloutGroup(prompt=PROMPT, rollouts=(ROLLOUT, ROLLOUT))


def test_assemble_joins_prompt_and_response() -> None:
    batch = assemble([GROUP], [1.0, 0.0], policy_version=0, draft_version=None, config=CONFIG)
    assert batch.token_ids == ((1, 0, 7, 2), (1, 0, 7, 2))
    assert batch.prompt_lengths == (2, 2)
    assert batch.rollout_logprobs == ((-0.5, -0.25),) * 2
    assert batch.advantages == (0.5, -0.5)
    assert batch.policy_version == 0


@pytest.mark.parametrize(
    ("num_wanted", "kept"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])]
)
def test_the_first_groups_with_signal_are_trained_on_and_the_first_without_fill_the_step(
    num_wanted: int, kept: list[int]
) -> None:
    """Groups 1, 3 and 4 have signal."""
    rewards = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.5, 1.0]
    groups = [replace(GROUP, prompt=replace(PROMPT, id=str(number))) for number in range(5)]
    assert have_signal(rewards, 5).tolist() == [False, True, False, True, True]
    found, of_groups = chosen(groups, rewards, num_wanted=num_wanted)
    assert found == [groups[index] for index in kept]
    assert of_groups == [reward for index in kept for reward in rewards[2 * index : 2 * index + 2]]


def test_the_kind_of_loss_chooses_the_baseline() -> None:
    """Of rewards 1, 0 and 0 the group's mean is 1/3, and the mean of the others 0, 1/2 and 1/2."""
    group = replace(GROUP, rollouts=(ROLLOUT,) * 3)
    for kind, expected in ((LossKind.DAPO, (2 / 3, -1 / 3, -1 / 3)), (LossKind.RLOO, (1.0, -0.5, -0.5))):
        config = replace(CONFIG, loss=LossConfig(kind=kind))
        batch = assemble([group], [1.0, 0.0, 0.0], config=config, policy_version=0, draft_version=None)
        assert batch.advantages == pytest.approx(expected)


def test_routes_travel_with_their_rollouts_where_they_are_replayed() -> None:
    config = replace(CONFIG, router_replay=True)
    routes = [np.full((3, 2, 2), number) for number in range(2)]
    routed = replace(GROUP, rollouts=tuple(replace(ROLLOUT, routes=each) for each in routes))
    batch = assemble([routed], [1.0, 0.0], config=config, policy_version=0, draft_version=None)
    assert [each is own for each, own in zip(batch.routes, routes, strict=True)] == [True, True]
    assert assemble([routed], [1.0, 0.0], config=CONFIG, policy_version=0, draft_version=None).routes == ()
    with pytest.raises(LookupError, match=r"router_replay needs the routes of 2 rollouts, got those of 0"):
        assemble([GROUP], [1.0, 0.0], config=config, policy_version=0, draft_version=None)


def test_a_response_that_was_cut_off_does_not_count_where_the_loss_leaves_it_out() -> None:
    """Its reward still enters the mean of its group; a batch without such a response is the one without the filter."""
    cut = replace(GROUP, rollouts=(ROLLOUT, rollout((7, 7), is_cut=True)))
    found = []
    for is_filtered, groups in ((False, [GROUP, cut]), (True, [GROUP, cut]), (True, [GROUP, GROUP])):
        config = replace(CONFIG, loss=LossConfig(filter_overlong=is_filtered))
        found.append(assemble(groups, [1.0, 0.0] * 2, config=config, policy_version=0, draft_version=None))
    assert [batch.counts for batch in found] == [(), (True, True, True, False), ()]
    assert found[1] == replace(found[0], counts=found[1].counts)
    assert found[1].advantages == (0.5, -0.5) * 2


def test_rollouts_of_another_draft_stop_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"must come from draft version 3, got \{None\}"):
        assemble([GROUP], [1.0, 0.0], policy_version=0, draft_version=3, config=CONFIG)


def _spanned(*spans: tuple[int, int | None, int]) -> RolloutGroup:
    """A rollout of two tokens after one without spans; `spans` are policy version, draft version, number of tokens."""
    versions = tuple(VersionSpan(policy_version=p, draft_version=d, num_tokens=n) for p, d, n in spans)
    first = replace(ROLLOUT, policy_version=spans[0][0], draft_version=spans[0][1])
    return replace(GROUP, rollouts=(first, replace(first, versions=versions)))


def _assembled(group: RolloutGroup, *, policy_version: int, draft_version: int | None = None, **lag: Any) -> TrainBatch:
    return assemble(
        [group], [1.0, 0.0], policy_version=policy_version, draft_version=draft_version, config=CONFIG, **lag
    )


def test_tokens_within_the_lag_become_a_batch_of_the_version_that_learns() -> None:
    assert _assembled(_spanned((3, None, 1), (5, None, 1)), policy_version=5, max_lag=2).policy_version == 5


@pytest.mark.parametrize(
    ("spans", "max_lag", "message"),
    [
        (((3, None, 1), (5, None, 1)), 1, r"from policy versions 4 to 5, got \[3\]"),
        (((4, None, 1), (6, None, 1)), 1, r"from policy versions 4 to 5, got \[6\]"),
        (((5, None, 1), (4, None, 1)), 0, r"from policy version 5, got \[4\]"),
        (((5, None, 1),), 0, r"each of 2 tokens of a rollout must carry its version, got 1"),
    ],
)
def test_a_token_that_is_too_old_too_new_or_of_nobody_stops_the_run(
    spans: tuple[tuple[int, None, int], ...], max_lag: int, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        _assembled(_spanned(*spans), policy_version=5, max_lag=max_lag)


def test_a_token_must_come_from_a_draft_that_was_published_with_its_policy() -> None:
    published = {(3, 0), (4, 1), (5, 1)}
    group = _spanned((4, 1, 1), (5, 1, 1))
    assert _assembled(group, policy_version=5, draft_version=1, max_lag=1, published=published)
    with pytest.raises(RuntimeError, match=r"must come from draft version 1, got \{0\}"):
        _assembled(_spanned((4, 0, 2)), policy_version=5, draft_version=1, max_lag=1, published=published)
    with pytest.raises(RuntimeError, match=r"must come from draft version 1, got \{0\}"):
        _assembled(_spanned((4, 0, 2)), policy_version=5, draft_version=1, max_lag=1)


def test_drafts_that_were_published_with_a_policy_are_all_named_and_those_of_other_policies_are_not() -> None:
    published = [(4, 2), (4, 1), (5, 3)]
    with pytest.raises(RuntimeError) as caught:
        _assembled(_spanned((4, 0, 2)), policy_version=5, draft_version=3, max_lag=1, published=published)
    assert str(caught.value) == "rollouts must come from draft version 1 or 2, got {0}"


def test_no_version_comes_before_the_first() -> None:
    with pytest.raises(RuntimeError) as caught:
        _assembled(_spanned((2, None, 2)), policy_version=1, max_lag=3)
    assert str(caught.value) == "rollouts must come from policy versions 0 to 1, got [2]"
    with pytest.raises(RuntimeError) as caught:
        _assembled(_spanned((9, None, 2)), policy_version=5, max_lag=3)
    assert str(caught.value) == "rollouts must come from policy versions 2 to 5, got [9]"


def test_a_lag_is_none_unless_it_is_given() -> None:
    with pytest.raises(RuntimeError, match=r"from policy version 5, got \[4\]"):
        assemble([_spanned((4, None, 2))], [1.0, 0.0], policy_version=5, draft_version=None, config=CONFIG)


def test_mismatch_by_hand() -> None:
    """Gaps (rollout - trainer) of 0 and log 4: ratios 1 and 1/4, so k1 = log(4) / 2 and k3 = (1/4 - 1 + log 4) / 2."""
    gap = mismatch([(-1.0, -1.0)], [np.array([-1.0, -1.0 - np.log(4.0)], dtype=np.float32)])

    assert gap.k1 == pytest.approx(np.log(4.0) / 2, abs=1e-6)
    assert gap.k3 == pytest.approx((np.log(4.0) - 0.75) / 2, abs=1e-6)
    assert gap.mean == gap.k1
    assert gap.largest == pytest.approx(np.log(4.0), abs=1e-6)
    assert gap.outside_fraction == 0.5


def test_a_ratio_on_the_bands_edge_counts_as_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "_AGREEMENT", (1.0, 1.0))
    gap = mismatch([(-1.0, -1.0)], [np.array([-1.0, -1.0], dtype=np.float32)])
    assert gap.outside_fraction == 0.0


def test_a_rollout_with_a_nan_logprob_never_becomes_a_batch() -> None:
    broken = replace(GROUP.rollouts[0], rollout_logprobs=(-0.5, float("nan")))
    group = replace(GROUP, rollouts=(broken, *GROUP.rollouts[1:]))
    with pytest.raises(FloatingPointError, match=r"^1 response tokens have a NaN or infinite logprob$"):
        assemble([group], [1.0, 0.0], policy_version=0, draft_version=None, config=CONFIG)


def test_a_group_is_scaled_where_it_is_asked_for_and_whole_numbers_are_rewards_too() -> None:
    """Rewards 2, 0 have the deviation sqrt(2), so they become 1 / sqrt(2) and its negative."""
    config = replace(CONFIG, scale_advantages_by_std=True)
    batch = assemble([GROUP], [2, 0], config=config, policy_version=0, draft_version=None)
    assert batch.advantages == pytest.approx((0.5**0.5, -(0.5**0.5)), abs=1e-5)


def test_rewards_go_to_their_own_group() -> None:
    other = replace(GROUP, prompt=replace(PROMPT, token_ids=(1, 5, 6)))
    batch = assemble([GROUP, other], [1.0, 0.0, 0.5, 0.5], policy_version=0, draft_version=None, config=CONFIG)
    assert batch.advantages == (0.5, -0.5, 0.0, 0.0)
    assert (batch.prompt_lengths, batch.token_ids[2]) == ((2, 2, 3, 3), (1, 5, 6, 7, 2))


def test_only_the_broken_tokens_are_counted() -> None:
    with pytest.raises(FloatingPointError, match=r"^2 response tokens have a NaN or infinite logprob$"):
        mismatch([(0.0, float("nan"), float("-inf"), 0.0, 0.0)], [np.zeros(5, dtype=np.float32)])


def test_the_band_is_a_factor_of_two() -> None:
    """Ratios of trainer to rollout probability: 0.4, 0.6, 1.9 and 2.1; the first and the last lie outside."""
    trainer = np.log(np.array([0.4, 0.6, 1.9, 2.1])).astype(np.float32)
    assert mismatch([(0.0,) * 4], [trainer]).outside_fraction == 0.5
