"""Scored groups on their way to training."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slipstream.engine.protocol import GenerationResult
from slipstream.rewards.verifier import RewardResult
from slipstream.train.asynchronous.activity import Activity
from slipstream.train.asynchronous.buffer import Buffer, Generated, Scored, score_all
from slipstream.train.asynchronous.meeting import Handover, Meeting, Over
from slipstream.types import RolloutGroup
from tests.unit.train.asynchronous.world import PROMPTS, drawn

REWARDS = RewardResult(rewards=(1.0,), num_timeouts=0, num_crashes=0)


def generated(index: int, *, num_groups: int = 1) -> Generated:
    groups = tuple(drawn(PROMPTS[index], "w", "1", (0, None), 1) for _ in range(num_groups))
    return Generated(
        index=index, result=GenerationResult(groups=groups, acceptance=None, generation_s=0.0), ended_s=0.0
    )


def scored(index: int, *, num_groups: int = 1) -> Scored:
    return Scored(generated=generated(index, num_groups=num_groups), rewards=REWARDS)


def test_what_is_picked_is_taken_out_and_the_others_stay_in_their_order() -> None:
    buffer = Buffer(Meeting(), max_groups=4, waiting=[scored(5)])
    for index in (3, 9, 1):
        buffer.put(scored(index))

    taken = buffer.take(lambda waiting: [waiting[2], waiting[0]])

    assert [each.index for each in taken] == [9, 5]
    assert [each.index for each in buffer.waiting] == [3, 1]


def test_what_waits_is_shown_once_it_is_enough_and_stays() -> None:
    buffer = Buffer(Meeting(), max_groups=2)
    assert buffer.wait_for(0) == ()
    buffer.put(scored(2))
    assert [each.index for each in buffer.wait_for(1)] == [2]
    assert [each.index for each in buffer.waiting] == [2]


def test_more_groups_than_can_be_under_way_are_a_mistake() -> None:
    buffer = Buffer(Meeting(), max_groups=3)
    buffer.put(scored(0, num_groups=2))
    buffer.put(scored(1))
    with pytest.raises(AssertionError, match="4 groups in a buffer of 3"):
        buffer.put(scored(2))


def test_everything_that_is_generated_gets_the_rewards_of_its_groups() -> None:
    meeting, asked = Meeting(), []
    handed: Handover[Generated] = Handover(meeting)
    buffer = Buffer(meeting, max_groups=2)
    now = [0.0]
    activity = Activity(lambda: now[0])

    def score(groups: Sequence[RolloutGroup]) -> RewardResult:
        asked.append([group.prompt.id for group in groups])
        now[0] += 2.0
        return RewardResult(rewards=(float(len(asked)),), num_timeouts=0, num_crashes=0)

    def train() -> None:
        for index in (4, 7):
            handed.put(generated(index))
        buffer.wait_for(2)

    meeting.run({"score": lambda: score_all(handed, buffer, score, activity), "train": train}, finite="train")

    assert asked == [["4"], ["7"]]
    assert [(each.index, each.rewards.rewards) for each in buffer.waiting] == [(4, (1.0,)), (7, (2.0,))]
    assert activity.between(0.0, 9.0) == [(0.0, 2.0), (2.0, 4.0)]
    with pytest.raises(Over):
        buffer.put(scored(1))
