"""From scored rollouts to a training batch, how far engine and learner disagree, and rollouts that wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.config import LossConfig, LossKind
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.steps import AutopilotStep
from slipstream.rewards.reward import RewardResult
from slipstream.train import batch as batch_module
from slipstream.train.batch import Pending, Scored, Submitted, assemble, chosen, have_signal, mismatch
from slipstream.types import FinishReason, Prompt, RolloutGroup, TrainBatch, VersionSpan
from tests.unit.sampled import accepted, rollout
from tests.unit.train.world import CONFIG, PROMPTS, drawn

PROMPT = Prompt(id="0", text="0", token_ids=(1, 0), answer="7")
ROLLOUT = rollout((7, 2), (-0.5, -0.25))
GROUP = RolloutGroup(prompt=PROMPT, rollouts=(ROLLOUT, ROLLOUT))
RLOO, SCALED = {"loss": LossConfig(kind=LossKind.RLOO)}, {"scale_advantages_by_std": True}


def assembled(
    *groups: RolloutGroup, rewards: Sequence[float] = (1.0, 0.0), grpo: dict[str, Any] | None = None, **how: Any
) -> TrainBatch:
    """The batch of groups of version 0 without a draft, unless `how` says others; `grpo` are fields of the recipe."""
    versions = {"policy_version": 0, "draft_version": None} | how
    return assemble(groups or [GROUP], rewards, config=replace(CONFIG, **(grpo or {})), **versions)


def test_assemble_joins_prompt_and_response_and_gives_rewards_to_their_own_group() -> None:
    other = replace(GROUP, prompt=replace(PROMPT, token_ids=(1, 5, 6)))
    batch = assembled(GROUP, other, rewards=[1.0, 0.0, 0.5, 0.5])
    assert batch.token_ids == ((1, 0, 7, 2),) * 2 + ((1, 5, 6, 7, 2),) * 2
    assert batch.prompt_lengths == (2, 2, 3, 3)
    assert batch.rollout_logprobs == ((-0.5, -0.25),) * 4
    assert batch.advantages == (0.5, -0.5, 0.0, 0.0)
    assert batch.policy_version == 0


@pytest.mark.parametrize(
    ("num_wanted", "kept"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])]
)
def test_groups_with_signal_come_first_and_others_fill_the_step(num_wanted: int, kept: list[int]) -> None:
    """Groups 1, 3 and 4 have signal."""
    rewards = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.5, 1.0]
    groups = [replace(GROUP, prompt=replace(PROMPT, id=str(number))) for number in range(5)]
    assert have_signal(rewards, 5).tolist() == [False, True, False, True, True]
    found, of_groups = chosen(groups, rewards, num_wanted=num_wanted)
    assert found == [groups[index] for index in kept]
    assert of_groups == [reward for index in kept for reward in rewards[2 * index : 2 * index + 2]]


@pytest.mark.parametrize(
    ("rewards", "how", "expected"),
    [
        ((1.0, 0.0, 0.0), {"loss": LossConfig(kind=LossKind.DAPO)}, (2 / 3, -1 / 3, -1 / 3)),  # the group's mean is 1/3
        ((1.0, 0.0, 0.0), RLOO, (1.0, -0.5, -0.5)),  # the means of the others are 0, 1/2 and 1/2
        ((2, 0), SCALED, (0.5**0.5, -(0.5**0.5))),  # whole numbers of deviation sqrt(2)
    ],
    ids=["the group's mean", "the others' mean", "the group's deviation"],
)
def test_the_kind_of_loss_chooses_the_baseline_and_the_recipe_the_scale(
    rewards: tuple[float, ...], how: dict[str, Any], expected: tuple[float, ...]
) -> None:
    group = replace(GROUP, rollouts=(ROLLOUT,) * len(rewards))
    assert assembled(group, rewards=rewards, grpo=how).advantages == pytest.approx(expected, abs=1e-5)


def test_routes_travel_with_their_rollouts_where_they_are_replayed() -> None:
    routes = [np.full((3, 2, 2), number) for number in range(2)]
    routed = replace(GROUP, rollouts=tuple(replace(ROLLOUT, routes=each) for each in routes))
    batch = assembled(routed, grpo={"router_replay": True})
    assert [each is own for each, own in zip(batch.routes, routes, strict=True)] == [True, True]
    assert assembled(routed).routes == ()
    with pytest.raises(LookupError, match=r"router_replay needs the routes of 2 rollouts, got those of 0"):
        assembled(grpo={"router_replay": True})


def test_a_response_that_was_cut_off_does_not_count_where_the_loss_leaves_it_out() -> None:
    """Its reward still enters the mean of its group; a batch without such a response is the one without the filter."""
    cut = replace(GROUP, rollouts=(ROLLOUT, rollout((7, 7), is_cut=True)))
    plain, filtered, whole = (
        assembled(GROUP, other, rewards=[1.0, 0.0] * 2, grpo={"loss": LossConfig(filter_overlong=is_filtered)})
        for is_filtered, other in ((False, cut), (True, cut), (True, GROUP))
    )
    assert [batch.counts for batch in (plain, filtered, whole)] == [(), (True, True, True, False), ()]
    assert filtered == replace(plain, counts=filtered.counts)
    assert filtered.advantages == (0.5, -0.5) * 2


def test_rollouts_of_another_draft_stop_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"must come from draft version 3, got \{None\}"):
        assembled(draft_version=3)


def spanned(*spans: tuple[int, int | None, int]) -> RolloutGroup:
    """A rollout of two tokens after one without spans; `spans` are policy version, draft version, number of tokens."""
    versions = tuple(VersionSpan(policy_version=p, draft_version=d, num_tokens=n) for p, d, n in spans)
    first = replace(ROLLOUT, policy_version=spans[0][0], draft_version=spans[0][1])
    return replace(GROUP, rollouts=(first, replace(first, versions=versions)))


@pytest.mark.parametrize(
    ("spans", "policy_version", "lag", "message"),
    [
        (((3, None, 1), (5, None, 1)), 5, {"max_lag": 1}, r"from policy versions 4 to 5, got \[3\]$"),
        (((4, None, 1), (6, None, 1)), 5, {"max_lag": 1}, r"from policy versions 4 to 5, got \[6\]$"),
        (((5, None, 1), (4, None, 1)), 5, {}, r"^rollouts must come from policy version 5, got \[4\]$"),
        (((5, None, 1),), 5, {}, r"each of 2 tokens of a rollout must carry its version, got 1"),
        # no version comes before the first
        (((2, None, 2),), 1, {"max_lag": 3}, r"^rollouts must come from policy versions 0 to 1, got \[2\]$"),
        (((9, None, 2),), 5, {"max_lag": 3}, r"^rollouts must come from policy versions 2 to 5, got \[9\]$"),
    ],
)
def test_a_token_that_is_too_old_too_new_or_of_nobody_stops_the_run(
    spans: tuple[tuple[int, None, int], ...], policy_version: int, lag: dict[str, Any], message: str
) -> None:
    within_the_lag = assembled(spanned((3, None, 1), (5, None, 1)), policy_version=5, max_lag=2)
    assert within_the_lag.policy_version == 5
    with pytest.raises(RuntimeError, match=message):
        assembled(spanned(*spans), policy_version=policy_version, **lag)


def test_a_token_must_come_from_a_draft_that_was_published_with_its_policy() -> None:
    """Drafts that were published with a policy are all named, and those of other policies are not."""
    published = [(3, 0), (4, 1), (5, 1)]
    how: dict[str, Any] = {"policy_version": 5, "draft_version": 1, "max_lag": 1}
    assert assembled(spanned((4, 1, 1), (5, 1, 1)), **how, published=published)
    for pairs, named in ((published, "1"), (None, "1"), ([(4, 2), (4, 1), (5, 3)], "1 or 2")):
        with pytest.raises(RuntimeError) as caught:
            assembled(spanned((4, 0, 2)), **how, published=pairs)
        assert str(caught.value) == f"rollouts must come from draft version {named}, got {{0}}"


def test_mismatch_by_hand() -> None:
    """Gaps (rollout - trainer) of 0 and log 4: ratios 1 and 1/4, so k1 = log(4) / 2 and k3 = (1/4 - 1 + log 4) / 2."""
    gap = mismatch([(-1.0, -1.0)], [np.array([-1.0, -1.0 - np.log(4.0)], dtype=np.float32)])
    assert gap.k1 == pytest.approx(np.log(4.0) / 2, abs=1e-6)
    assert gap.k3 == pytest.approx((np.log(4.0) - 0.75) / 2, abs=1e-6)
    assert gap.mean == gap.k1
    assert gap.largest == pytest.approx(np.log(4.0), abs=1e-6)
    assert gap.outside_fraction == 0.5


def test_the_band_is_a_factor_of_two_with_its_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios of trainer to rollout probability: 0.4, 0.6, 1.9 and 2.1; the first and the last lie outside."""
    trainer = np.log(np.array([0.4, 0.6, 1.9, 2.1])).astype(np.float32)
    assert mismatch([(0.0,) * 4], [trainer]).outside_fraction == 0.5
    monkeypatch.setattr(batch_module, "_AGREEMENT", (1.0, 1.0))
    assert mismatch([(-1.0, -1.0)], [np.array([-1.0, -1.0], dtype=np.float32)]).outside_fraction == 0.0


def test_a_rollout_with_a_nan_logprob_never_becomes_a_batch() -> None:
    broken = replace(ROLLOUT, rollout_logprobs=(-0.5, float("nan")))
    with pytest.raises(FloatingPointError, match=r"^1 response tokens have a NaN or infinite logprob$"):
        assembled(replace(GROUP, rollouts=(broken, ROLLOUT)))
    with pytest.raises(FloatingPointError, match=r"^2 response tokens have a NaN or infinite logprob$"):
        mismatch([(0.0, float("nan"), float("-inf"), 0.0, 0.0)], [np.zeros(5, dtype=np.float32)])


ACCEPTED = accepted(3, 2, 0)
SPANS = (
    VersionSpan(policy_version=3, draft_version=None, num_tokens=1),
    VersionSpan(policy_version=4, draft_version=2, num_tokens=1),
)


def pending() -> Pending:
    whole, mixed = drawn(PROMPTS[0], "w", "1", (3, None), 2), drawn(PROMPTS[1], "w", "2", (3, None), 2)
    odd = replace(
        mixed.rollouts[0],
        token_ids=(5, 6),
        rollout_logprobs=(-0.1, -1e-300),
        finish_reason=FinishReason.LENGTH,
        versions=SPANS,
        draft_version=1,
    )
    result = GenerationResult(
        groups=(whole, replace(mixed, rollouts=(odd, mixed.rollouts[1]))),
        acceptance=ACCEPTED,
        generation_s=0.1,
        num_engine_restarts=1,
        num_preemptions=3,
        num_regenerated=4,
        engine_idle_fraction=0.3,
        autopilot=AutopilotStep(speculates=True, is_probe=False, token_ms=0.7),
    )
    rewards = RewardResult(rewards=(0.0, 1.0, 1.0, 0.0), num_timeouts=1, num_crashes=2)
    scored = Scored(index=7, result=result, rewards=rewards)
    return Pending(scored=(scored,), under_way=(8, 11), published=((3, None), (4, 2)))


def test_everything_comes_back_to_the_last_bit_but_times_on_the_clock_of_another_process() -> None:
    (scored,) = pending().scored
    without_draft = replace(scored, result=replace(scored.result, acceptance=None, autopilot=None))
    for each in (pending(), Pending(), replace(pending(), scored=(without_draft,))):
        assert Pending.from_bytes(each.to_bytes()) == each
    later = replace(pending(), scored=(replace(scored, generated_s=5.0),))
    assert Pending.from_bytes(later.to_bytes()) == pending()


@pytest.mark.parametrize("length", [0, 10, -1, -200])
def test_what_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(CheckpointError, match="rollouts that wait for training must be as they were written"):
        Pending.from_bytes(pending().to_bytes()[:length])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda own: own["rewards"].update(num_crashes="many"),
            r"rewards\.num_crashes must be of type int, got 'many'",
        ),
        (lambda own: own["result"]["groups"][1].pop("rollouts"), r"groups\[1\]\.rollouts is required"),
    ],
)
def test_a_field_that_cannot_be_read_or_is_missing_is_named(damage: Callable[[Any], Any], message: str) -> None:
    values = json.loads(pending().to_bytes())
    damage(values["scored"][0])
    with pytest.raises(CheckpointError, match=message):
        Pending.from_bytes(json.dumps(values).encode())


def test_a_time_that_is_no_number_is_refused_when_it_is_written() -> None:
    (scored,) = pending().scored
    result = replace(scored.result, generation_s=float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        Pending(scored=(replace(scored, result=result),)).to_bytes()


def test_a_tally_counts_over_attempts_in_a_file_with_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "arm" / "submitted"
    first, second = Submitted(path), Submitted(path)
    assert first.read() == 0
    first.add(6)
    second.add(4)
    assert first.read() == 10
    assert [(each.name, each.read_text()) for each in path.parent.iterdir()] == [("submitted", "10")]
