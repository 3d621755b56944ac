"""A step of training from scored rollouts on, between a learner and a draft that note what they are handed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.config import GrpoConfig, OptimizerConfig
from slipstream.grpo.update import Trained, Update
from slipstream.records.steps import AcceptanceStats, DraftDecision, RefitCheck, StepRecord, TrainStats
from slipstream.rewards.reward import RewardResult
from slipstream.train.acceptance_guard import AcceptanceCollapse, AcceptanceGuard
from slipstream.train.loop import Draft, Trainer, recent
from slipstream.train.metrics import StageClock, Stopwatch
from slipstream.types import Prompt, RolloutGroup
from tests.unit.sampled import DECISION, accepted, rollout
from tests.unit.train.world import BareLearner

PROMPT = Prompt(id="0", text="0", token_ids=(1,), answer="7")
CONFIG = GrpoConfig(num_steps=9, prompts_per_step=1, group_size=2, optimizer=OptimizerConfig(learning_rate=1e-4))
REWARDS = RewardResult(rewards=(1.0, 0.0), num_timeouts=0, num_crashes=0)
REFIT = RefitCheck(num_tensors=1, elapsed_s=0.0)
OVERLAP = Stopwatch(num_regenerated=4).overlap()


class NotingLearner(BareLearner):
    """Its training pass gives each token the logprob -1."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def train_step(self, update: Update) -> Trained:
        self.updates.append(update)
        stats = TrainStats(loss=0.1, grad_norm=1.0, kl=0.2, clip_fraction=0.3, num_tokens=2, learning_rate=1e-4)
        own = [np.full(len(row), -1.0, dtype=np.float32) for row in update.batch.rollout_logprobs]
        return Trained(stats=stats, own_logprobs=own)


class NotingDraft(Draft):
    """Version 6; asked, it answers what it was made with."""

    def __init__(self, decision: DraftDecision | None = None) -> None:
        super().__init__(version=6)
        self.asked: list[tuple[GenerationResult, int]] = []
        self.noted: list[StepRecord] = []
        self._decision = decision

    def decide(self, result: GenerationResult, *, num_steps_left: int) -> DraftDecision | None:
        self.asked.append((result, num_steps_left))
        return self._decision

    def note(self, record: StepRecord) -> None:
        self.noted.append(record)


def generated(
    *, policy_version: int, draft_version: int | None = 6, acceptance: AcceptanceStats | None = None
) -> GenerationResult:
    one = rollout((7,), -0.5, policy_version=policy_version, draft_version=draft_version)
    group = RolloutGroup(prompt=PROMPT, rollouts=(one, one))
    return GenerationResult(groups=(group,), acceptance=acceptance, generation_s=1.0)


def trainer(
    draft: NotingDraft | None = None, *, max_lag: int = 0, guard: AcceptanceGuard | None = None
) -> tuple[Trainer, NotingLearner]:
    learner = NotingLearner()
    made = Trainer(
        learner=learner,
        config=CONFIG,
        temperature=0.5,
        max_response_tokens=8,
        draft=draft or NotingDraft(),
        guard=guard or AcceptanceGuard(),
        max_lag=max_lag,
    )
    return made, learner


def stepped(made: Trainer, step: int, result: GenerationResult, **more: Any) -> StepRecord:
    clock = StageClock()
    learned = made.learn(step, result, REWARDS, clock=clock, **more)
    return made.record(step, clock.times(), REFIT, learned, overlap=OVERLAP)


@pytest.mark.parametrize("answer", [None, replace(DECISION, trains=False), DECISION])
def test_the_draft_is_asked_before_the_update_and_trained_in_it_where_it_says_so(answer: DraftDecision | None) -> None:
    draft, result = NotingDraft(answer), generated(policy_version=3)
    made, learner = trainer(draft)
    record = stepped(made, 3, result)
    assert draft.asked == [(result, 5)]  # of nine steps, 4 to 8 come after this one
    assert [update.trains_draft for update in learner.updates] == [answer is not None and answer.trains]
    assert record.draft_decision == answer
    assert draft.noted == [record]


def test_a_record_shows_what_went_on_beside_its_step() -> None:
    made, _ = trainer()
    assert stepped(made, 3, generated(policy_version=3)).overlap == OVERLAP


def test_a_loop_that_may_lag_shows_ratios_although_nothing_is_corrected() -> None:
    """The engine's -0.5 beside the training pass's -1: ratios of exp(-0.5), one version behind."""
    made, _ = trainer(max_lag=1)
    (lag,) = stepped(made, 3, generated(policy_version=2)).lags
    assert (lag.lag, lag.num_tokens, lag.clipped_fraction) == (1, 2, 0.0)
    assert lag.ratio_mean == pytest.approx(np.exp(-0.5))
    made, _ = trainer()
    assert stepped(made, 3, generated(policy_version=3)).lags == ()


def test_rollouts_may_come_from_any_pair_of_versions_that_was_published() -> None:
    made, learner = trainer(max_lag=1)
    stepped(made, 3, generated(policy_version=2, draft_version=5), published=[(2, 5), (3, 6)])
    assert learner.updates[0].batch.policy_version == 3
    with pytest.raises(RuntimeError, match=r"must come from draft version 6, got \{5\}"):
        stepped(made, 3, generated(policy_version=2, draft_version=5))


def test_acceptance_that_collapses_is_told_of_the_version_that_was_drawn_from() -> None:
    made, learner = trainer(max_lag=1, guard=AcceptanceGuard([accepted(10**6, 900_000)] * 8))
    with pytest.raises(AcceptanceCollapse, match="at policy version 2"):
        stepped(made, 3, replace(generated(policy_version=2), acceptance=accepted(10**6, 100_000)))
    assert learner.updates == []


def test_versions_are_kept_as_long_as_rollouts_of_later_steps_may_come_from_them() -> None:
    """After step 5, with a lag of 2, step 6 takes what version 4 gave, and nothing older."""
    published = ((2, 0), (3, 0), (4, 1), (5, 1))
    assert recent(published, 5, 2) == ((4, 1), (5, 1))
    assert recent(published, 5, 0) == ()
