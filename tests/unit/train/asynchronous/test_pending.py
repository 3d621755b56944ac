"""Rollouts that wait for training come back to the last bit, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.policy.errors import CheckpointError
from slipstream.records.steps import AcceptanceStats, AutopilotStep
from slipstream.rewards.verifier import RewardResult
from slipstream.rollout.engine import GenerationResult
from slipstream.train.asynchronous.buffer import Generated, Scored
from slipstream.train.asynchronous.pending import Pending, Tally
from slipstream.types import FinishReason, VersionSpan
from tests.unit.train.asynchronous.world import PROMPTS, drawn

ACCEPTED = AcceptanceStats(
    num_drafts=3,
    num_draft_tokens=6,
    num_accepted_tokens=2,
    accepted_by_position=(2, 0),
    mean_acceptance_length=1 + 2 / 3,
    acceptance_rate=1 / 3,
    rate_by_position=(2 / 3, 0.0),
)
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
        num_regenerated=4,
        engine_idle_fraction=0.3,
        autopilot=AutopilotStep(speculates=True, is_probe=False, token_ms=0.7),
    )
    rewards = RewardResult(rewards=(0.0, 1.0, 1.0, 0.0), num_timeouts=1, num_crashes=2)
    scored = Scored(generated=Generated(index=7, result=result, ended_s=0.0), rewards=rewards)
    return Pending(scored=(scored,), under_way=(8, 11), published=((3, None), (4, 2)))


def test_everything_comes_back_to_the_last_bit() -> None:
    assert Pending.from_bytes(pending().to_bytes()) == pending()
    assert Pending.from_bytes(Pending().to_bytes()) == Pending()


@pytest.mark.parametrize("length", [0, 10, -1, -200])
def test_what_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(CheckpointError, match="rollouts that wait for training must be as they were written"):
        Pending.from_bytes(pending().to_bytes()[:length])


def test_a_tally_keeps_the_largest_number_over_attempts(tmp_path: Path) -> None:
    first = Tally(tmp_path / "submitted")
    assert first.read() == 0
    first.note(6)
    second = Tally(tmp_path / "submitted")
    second.note(4)
    assert second.read() == 6
    second.note(8)
    assert first.read() == 8
