"""Rollouts that wait for training come back to the last bit, or not at all."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.engine.protocol import GenerationResult
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.steps import AutopilotStep
from slipstream.rewards.reward import RewardResult
from slipstream.train.pending import Pending, Scored, Submitted
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


def test_everything_comes_back_to_the_last_bit() -> None:
    assert Pending.from_bytes(pending().to_bytes()) == pending()
    assert Pending.from_bytes(Pending().to_bytes()) == Pending()


def test_rollouts_of_an_engine_without_a_draft_or_an_autopilot_come_back_too() -> None:
    (scored,) = pending().scored
    plain = replace(scored.result, acceptance=None, autopilot=None)
    waiting = Pending(scored=(replace(scored, result=plain),))
    assert Pending.from_bytes(waiting.to_bytes()) == waiting


@pytest.mark.parametrize("length", [0, 10, -1, -200])
def test_what_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(CheckpointError, match="rollouts that wait for training must be as they were written"):
        Pending.from_bytes(pending().to_bytes()[:length])


def changed(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """What `pending` is written as, after `change` of its text and its arrays."""
    with np.load(io.BytesIO(pending().to_bytes())) as archive:
        arrays: dict[str, Any] = dict(archive)
    text = json.loads(arrays["text"].tobytes())
    change(text, arrays)
    file = io.BytesIO()
    np.savez(file, **{**arrays, "text": np.frombuffer(json.dumps(text).encode(), dtype=np.uint8)})
    return file.getvalue()


@pytest.mark.parametrize("array", ["tokens_N", "logprobs_N"])
def test_an_archive_with_a_token_too_few_is_refused(array: str) -> None:
    whole = sum(len(each.token_ids) for group in pending().scored[0].result.groups for each in group.rollouts)

    def shorten(text: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays[array] = arrays[array][:-1]

    left = whole - 1 if array == "tokens_N" else whole
    with pytest.raises(CheckpointError) as caught:
        Pending.from_bytes(changed(shorten))
    assert str(caught.value) == (
        "rollouts that wait for training must be as they were written, got "
        f"ValueError('{left} tokens of at least {whole}')"
    )


@pytest.mark.parametrize(
    ("part", "field"), [("acceptance", "num_drafts"), ("autopilot", "is_probe"), ("rewards", "num_crashes")]
)
def test_a_field_that_cannot_be_read_is_named(part: str, field: str) -> None:
    def spoil(text: dict[str, Any], arrays: dict[str, Any]) -> None:
        text["scored"][0][part][field] = "many"

    with pytest.raises(CheckpointError, match=rf"{part}\.{field} must be of type \w+, got 'many'"):
        Pending.from_bytes(changed(spoil))


def test_a_group_without_its_rollouts_is_refused() -> None:
    def grow(text: dict[str, Any], arrays: dict[str, Any]) -> None:
        text["scored"][0]["groups"][1]["size"] += 1

    with pytest.raises(CheckpointError, match="2 rollouts of a group of 3"):
        Pending.from_bytes(changed(grow))


def test_an_archive_holds_no_code_and_none_is_run() -> None:
    def pickled(text: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays["tokens_N"] = np.asarray([object] * len(arrays["tokens_N"]), dtype=object)

    with pytest.raises(CheckpointError, match="allow_pickle"):
        Pending.from_bytes(changed(pickled))


def test_a_time_that_is_no_number_is_refused_when_it_is_written() -> None:
    (scored,) = pending().scored
    result = replace(scored.result, generation_s=float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        Pending(scored=(replace(scored, result=result),)).to_bytes()


def test_a_tally_makes_its_directory_and_leaves_nothing_beside_its_file(tmp_path: Path) -> None:
    tally = Submitted(tmp_path / "run" / "arm" / "submitted")
    tally.note(6)
    tally.note(7)
    assert [path.name for path in (tmp_path / "run" / "arm").iterdir()] == ["submitted"]
    assert (tmp_path / "run" / "arm" / "submitted").read_text() == "7"


def test_a_tally_keeps_the_largest_number_over_attempts(tmp_path: Path) -> None:
    first = Submitted(tmp_path / "submitted")
    assert first.read() == 0
    first.note(6)
    second = Submitted(tmp_path / "submitted")
    second.note(4)
    assert second.read() == 6
    second.note(8)
    assert first.read() == 8
