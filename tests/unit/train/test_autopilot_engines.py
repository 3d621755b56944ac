"""The engines are told how to draft before each generation, and what a step did travels in its result."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.drafts.config import AutopilotConfig
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import AcceptanceStats, AutopilotStep, RefitCheck, ScheduleEntry
from slipstream.refit.gate import Export
from slipstream.train.autopilot_engines import PilotedEngines
from slipstream.train.recovery import LastingEngines
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup
from slipstream.workers.calls import LostWorkerError, Worker

CONFIG = AutopilotConfig(enabled=True, patience_steps=2, probe_every_steps=4)
SAMPLING = SamplingConfig(max_response_tokens=8)
PROMPT = Prompt(id="0", text="", token_ids=(1,), answer="")
TABLE = (
    ScheduleEntry(batch_from=1, batch_to=4, num_speculative_tokens=5),
    ScheduleEntry(batch_from=5, batch_to=8, num_speculative_tokens=2),
)
NO_DRAFTS = (ScheduleEntry(batch_from=1, batch_to=1, num_speculative_tokens=0),)
ACCEPTANCE = AcceptanceStats(
    num_drafts=2,
    num_draft_tokens=4,
    num_accepted_tokens=2,
    accepted_by_position=(2, 0),
    mean_acceptance_length=2.0,
    acceptance_rate=0.5,
    rate_by_position=(1.0, 0.0),
)
ENGINES = (Worker(None, "engine 0", "10.77.0.11"), Worker(None, "engine 1", "10.77.0.12"))


class Switchable:
    """Engines whose generation of two rollouts of 5 tokens takes `drafting_s`, or a second without drafts."""

    def __init__(self, drafting_s: float, *, lost_at: int | None = None) -> None:
        self.engines = ENGINES
        self.drafting_s = drafting_s
        self.tables: list[Sequence[ScheduleEntry]] = []
        self.calls: list[str] = []
        self._lost_at = lost_at

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        self.calls.append("draft_by")
        self.tables.append(tuple(schedule))

    def replace(self, lost: Sequence[Worker]) -> None:
        self.calls.append("replace")
        self.replaced = [engine.name for engine in lost]

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
        self.calls.append("generate")
        self.asked = (prompts, how)
        if self.calls.count("generate") == self._lost_at:
            raise LostWorkerError("engine died", [ENGINES[0]])
        rollout = Rollout(
            prompt_id="0",
            token_ids=(7,) * 5,
            rollout_logprobs=(-1.0,) * 5,
            finish_reason=FinishReason.STOP,
            policy_version=0,
            draft_version=0,
        )
        drafts = self.tables[-1] != NO_DRAFTS
        groups = (RolloutGroup(prompt=PROMPT, rollouts=(rollout, rollout)),)
        seconds = self.drafting_s if drafts else 1.0
        return GenerationResult(groups=groups, acceptance=ACCEPTANCE, generation_s=seconds)


class NoGate:
    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        return RefitCheck(num_tensors=0, elapsed_s=0.0)

    def export(self, version: int, *, draft_version: int | None) -> Export:
        raise AssertionError("learner and engines take turns here")

    def deliver(self, export: Export) -> RefitCheck:
        raise AssertionError("learner and engines take turns here")

    def deliver_again(self, version: int) -> bool:
        raise AssertionError("the learner is at rest while these engines generate")

    def engines_changed(self) -> None:
        pass


def generated(piloted: PilotedEngines, num: int) -> list[GenerationResult]:
    return [piloted.generate([PROMPT], sampling=SAMPLING, group_size=2, seed=step) for step in range(num)]


def test_a_step_says_whether_it_drafted_and_what_a_token_took() -> None:
    engines = Switchable(0.5)
    results = generated(PilotedEngines(engines, config=CONFIG, schedule=TABLE), 4)

    assert engines.tables == [TABLE, TABLE, TABLE, NO_DRAFTS]
    assert [result.autopilot for result in results] == [
        *[AutopilotStep(speculates=True, is_probe=False, token_ms=50.0)] * 3,
        AutopilotStep(speculates=False, is_probe=True, token_ms=100.0),
    ]
    assert [result.acceptance for result in results] == [ACCEPTANCE] * 3 + [None]
    assert engines.asked == ([PROMPT], {"sampling": SAMPLING, "group_size": 2, "seed": 3})


def test_speculation_that_loses_is_switched_off_and_the_log_warns(caplog: pytest.LogCaptureFixture) -> None:
    engines = Switchable(2.0)
    results = generated(PilotedEngines(engines, config=CONFIG, schedule=TABLE), 6)

    assert [table == NO_DRAFTS for table in engines.tables] == [False, False, False, True, True, True]
    last = results[-1].autopilot
    assert last is not None and last.has_switched and not last.is_probe
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == (
        "speculation is off: for 2 steps it lost, 200.000 ms a token with it and 100.000 ms a token without; it is "
        "probed from time to time"
    )


def test_speculation_that_pays_again_is_switched_on_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engines = Switchable(2.0)
    piloted = PilotedEngines(engines, config=CONFIG, schedule=TABLE)
    generated(piloted, 6)
    engines.drafting_s = 0.25
    results = generated(piloted, 8)

    assert engines.tables[-1] == TABLE
    assert [result.acceptance is None for result in results] == [table == NO_DRAFTS for table in engines.tables[6:]]
    assert caplog.messages[1:] == [
        "speculation is on again: probes of it took 25.000 ms a token, generation without it 100.000 ms a token"
    ]


def test_a_resumed_run_takes_up_the_thread_of_the_records() -> None:
    whole = Switchable(2.0)
    results = generated(PilotedEngines(whole, config=CONFIG, schedule=TABLE), 16)
    steps = [result.autopilot for result in results]

    for stop in range(16):
        resumed = Switchable(2.0)
        generated(PilotedEngines(resumed, config=CONFIG, schedule=TABLE, steps=steps[:stop]), 16 - stop)
        assert resumed.tables == whole.tables[stop:]


def test_an_engine_in_the_place_of_a_lost_one_is_told_how_to_draft_and_the_lost_call_counts_for_nothing() -> None:
    engines = Switchable(2.0, lost_at=7)  # when speculation is off
    piloted = PilotedEngines(engines, config=CONFIG, schedule=TABLE)
    lasting = LastingEngines(piloted, NoGate(), max_restarts=1)
    results = [lasting.generate([PROMPT], sampling=SAMPLING, group_size=2, seed=step) for step in range(7)]

    assert engines.calls[-5:] == ["draft_by", "generate", "replace", "draft_by", "generate"]
    assert engines.replaced == ["engine 0"]
    assert engines.tables[-2:] == [NO_DRAFTS, NO_DRAFTS]
    assert [result.num_engine_restarts for result in results] == [0] * 6 + [1]
    assert results[-1].autopilot == AutopilotStep(speculates=False, is_probe=False, token_ms=100.0)
