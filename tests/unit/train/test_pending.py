"""Rollouts that wait for training come back to the last bit, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.protocol import GenerationResult
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.steps import AutopilotStep
from slipstream.rewards.reward import RewardResult
from slipstream.train.batch import Pending, Scored, Submitted
from slipstream.types import FinishReason, VersionSpan
from tests.unit.sampled import accepted
from tests.unit.train.world import PROMPTS, drawn

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
            lambda own: own["result"]["acceptance"].update(num_drafts="many"),
            r"acceptance\.num_drafts must be of type int",
        ),
        (lambda own: own["result"]["autopilot"].update(is_probe="many"), r"autopilot\.is_probe must be of type bool"),
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


def test_a_tally_keeps_the_largest_number_over_attempts_in_a_file_with_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "arm" / "submitted"
    first, second = Submitted(path), Submitted(path)
    assert first.read() == 0
    first.note(6)
    second.note(4)
    assert second.read() == 6
    second.note(8)
    assert first.read() == 8
    assert [(each.name, each.read_text()) for each in path.parent.iterdir()] == [("submitted", "8")]
