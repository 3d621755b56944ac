"""The GRPO loop, its step and its draft, between engines, a gate and a learner that note what they are handed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.data.prompts import PromptStream
from slipstream.drafts.config import DraftOnline
from slipstream.engine.acceptance import combine
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.config import DynamicSamplingConfig, GrpoConfig, LossConfig, RecomputeLogprobs
from slipstream.grpo.update import Trained, Update
from slipstream.records.steps import (
    AcceptanceStats,
    AutopilotStep,
    DraftDecision,
    DraftUpdate,
    Mismatch,
    RefitCheck,
    StepRecord,
    TrainStats,
)
from slipstream.rewards.reward import RewardResult
from slipstream.train.acceptance_guard import AcceptanceCollapse, AcceptanceGuard
from slipstream.train.loop import Draft, SyncLoop, TrainedDraft, Trainer, recent
from slipstream.train.metrics import StageClock, Stopwatch
from slipstream.types import Arm, Prompt, RolloutGroup, TrainBatch
from tests.small import draft_with
from tests.unit.sampled import DECISION, accepted, rollout
from tests.unit.train import world
from tests.unit.train.world import NO_TIMES, STEP, BareLearner

PROMPTS = tuple(Prompt(id=str(i), text=str(i), token_ids=(1, i), answer="7") for i in range(4))
STREAM = PromptStream(prompts=PROMPTS, batch_size=2, seed=0)
SAMPLING = SamplingConfig(temperature=0.5, max_response_tokens=4)
LOSS = LossConfig(clip_low=0.1, clip_high=0.3)
CONFIG = replace(world.CONFIG, num_steps=3, prompts_per_step=2, loss=LOSS, recompute_logprobs=RecomputeLogprobs.ALWAYS)
ACCEPTANCE = accepted(10, 8, 4, 0)
STATS = TrainStats(loss=0.1, grad_norm=1.0, kl=0.2, clip_fraction=0.3, num_tokens=8, learning_rate=1e-4)
PROBE = AutopilotStep(speculates=False, is_probe=True, token_ms=0.5)
UPDATE = DraftUpdate(loss=1.25, num_updates=2, elapsed_s=0.5)
AUTO = replace(CONFIG, recompute_logprobs=RecomputeLogprobs.AUTO)
# numpy's own: of the recipe's seed 5, the arm (0: autoregressive, 1: speculative) and the step.
SEEDS = [[int(np.random.SeedSequence([5, arm, step]).generate_state(1)[0]) for step in range(3)] for arm in (0, 1)]


class Ends(BareLearner):
    """Engines, their gate and a learner that note their calls in one list.

    A rollout is `7, 2` with the version of the last refit, or with version 0 of `stuck` engines. The learner's logprobs
    are -0.5 a token, those of a training pass -0.75.
    """

    def __init__(self, *, draft_version: int | None = None, stuck: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.updates: list[Update] = []
        self.version, self.draft_version, self.stuck = 0, draft_version, stuck

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        self.calls.append(("refit", (version, draft_version)))
        self.version = 0 if self.stuck else version
        return RefitCheck(num_tensors=9, elapsed_s=0.0)

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
        self.calls.append(("generate", {"prompts": tuple(prompts), **how}))
        versions = {"policy_version": self.version, "draft_version": self.draft_version}
        groups = tuple(group(prompt, how["group_size"], **versions) for prompt in prompts)
        acceptance = None if self.draft_version is None else accepted(10, 24, 0, 0)
        return GenerationResult(groups=groups, acceptance=acceptance, generation_s=0.0)

    def logprobs(self, batch: TrainBatch, temperature: float) -> list[Any]:
        self.calls.append(("logprobs", (batch, temperature)))
        return [np.array([-0.5, -0.5], dtype=np.float32) for _ in batch.token_ids]

    def ref_logprobs(self, batch: TrainBatch, temperature: float) -> list[Any]:
        self.calls.append(("ref_logprobs", (batch, temperature)))
        return [np.array([-1.0, -2.0], dtype=np.float32) for _ in batch.token_ids]

    def train_step(self, update: Update) -> Trained:
        self.calls.append(("train_step", update))
        self.updates.append(update)
        number = len(self.updates)
        stats = replace(STATS, loss=0.1 * number, grad_norm=1.0 * number)
        lengths = [len(logprobs) for logprobs in update.batch.rollout_logprobs]
        own = [np.full(length, -0.75, dtype=np.float32) for length in lengths]
        return Trained(stats=stats, own_logprobs=own if update.trainer_logprobs is None else None)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @property
    def generated(self) -> list[Any]:
        return [how for name, how in self.calls if name == "generate"]


def group(prompt: Prompt, size: int, **versions: Any) -> RolloutGroup:
    one = rollout((7, 2), (-0.5, -0.25), prompt_id=prompt.id, is_cut=prompt.id == "3", **versions)
    return RolloutGroup(prompt=prompt, rollouts=(one,) * size)


def run(
    ends: Ends,
    *,
    config: GrpoConfig = CONFIG,
    rewards: Iterable[Sequence[float]] = itertools.repeat((1.0, 0.0, 1.0, 1.0)),
    on_score: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    **how: Any,
) -> list[StepRecord]:
    records: list[StepRecord] = []
    each_batch = iter(rewards)

    def score(groups: Sequence[RolloutGroup]) -> RewardResult:
        on_score(groups)
        return RewardResult(
            rewards=tuple(next(each_batch)), num_timeouts=2, num_crashes=1, num_failures=3, metrics={"length": 2.5}
        )

    fakes: dict[str, Any] = {"engine": ends, "gate": ends, "score": score, "on_step": records.append}
    how = {"arm": Arm.AUTOREGRESSIVE, "prompts": STREAM, **how}
    draft = Draft(version=ends.draft_version)
    SyncLoop(trainer=trainer(ends, config, draft=draft), **fakes, **how).run(start_step=0)
    return records


def trainer(learner: Ends, config: GrpoConfig, **others: Any) -> Trainer:
    return Trainer(learner=learner, config=config, sampling=SAMPLING, **others)


def test_every_call_of_a_step_gets_what_it_must() -> None:
    """The golden step: order and every argument, between engine and learner."""
    ends, scored = Ends(draft_version=4), []
    run(ends, config=replace(CONFIG, num_steps=2), on_score=scored.append)
    assert ends.names == ["refit", "generate", "logprobs", "ref_logprobs", "train_step"] * 2
    for step in (0, 1):
        prompts = STREAM.batch(step)
        refit, generate, logprobs, ref_logprobs, _ = (how for _, how in ends.calls[5 * step : 5 * step + 5])
        batch = TrainBatch(
            token_ids=tuple((*prompt.token_ids, 7, 2) for prompt in prompts for _ in range(2)),
            prompt_lengths=(2, 2, 2, 2),
            rollout_logprobs=((-0.5, -0.25),) * 4,
            advantages=(0.5, -0.5, 0.0, 0.0),
            policy_version=step,
        )
        assert refit == (step, 4)
        assert generate == {"prompts": prompts, "sampling": SAMPLING, "group_size": 2, "seed": SEEDS[0][step]}
        assert logprobs == ref_logprobs == (batch, 0.5)
        update = ends.updates[step]
        assert (update.batch, update.loss, update.temperature, update.max_response_tokens) == (batch, LOSS, 0.5, 4)
        assert np.array(update.trainer_logprobs).tolist() == [[-0.5, -0.5]] * 4
        assert np.array(update.ref_logprobs).tolist() == [[-1.0, -2.0]] * 4
        assert [group.prompt for group in scored[step]] == list(prompts)


def test_a_steps_record_says_what_happened_in_it() -> None:
    class Telling(Ends):
        def generate(self, *args: Any, **how: Any) -> GenerationResult:
            more: dict[str, Any] = {"num_engine_restarts": 5, "num_preemptions": 7, "engine_idle_fraction": 0.25}
            return replace(super().generate(*args, **how), autopilot=PROBE, **more)

        def train_step(self, update: Update) -> Trained:
            return replace(super().train_step(update), draft=UPDATE)

    records = run(Telling(draft_version=4))
    first, gap = records[0], records[0].mismatch
    assert [(record.step, record.policy_version) for record in records] == [(0, 0), (1, 1), (2, 2)]
    assert (first.reward_mean, first.rewards_by_prompt, first.num_zero_signal_groups) == (0.75, (0.5, 1.0), 1)
    assert (first.num_rollouts, first.num_response_tokens, first.longest_response_tokens) == (4, 8, 2)
    assert (first.num_reward_timeouts, first.num_reward_crashes, first.num_reward_failures) == (2, 1, 3)
    assert (first.num_engine_restarts, first.num_preemptions, first.engine_idle_fraction) == (5, 7, 0.25)
    assert sum(record.num_truncated for record in records[:2]) == 2  # prompt 3, once an epoch, both its rollouts
    assert (first.train, first.reward_metrics, first.autopilot) == (STATS, {"length": 2.5}, PROBE)
    assert (first.acceptance, first.draft_version) == (accepted(10, 24, 0, 0), 4)
    assert (first.draft_update, first.num_filtered) == (UPDATE, 0)
    assert first.refit == RefitCheck(num_tensors=9, elapsed_s=0.0)
    # Rollout minus trainer logprob is 0 and 0.25, their ratio 1 and exp(-0.25) = 0.78, which is under the band's 0.9.
    assert isinstance(gap, Mismatch)
    assert (gap.k1, gap.mean, gap.largest, gap.outside_fraction) == (0.125, 0.125, 0.25, 0.0)
    assert gap.k3 == pytest.approx((np.exp(-0.25) - 1 + 0.25) / 2)


def test_the_arms_get_the_same_prompts_and_seeds_of_their_own() -> None:
    calls = []
    for each in Arm:
        ends = Ends()
        run(ends, arm=each)
        calls.append(ends.generated)
    assert [[call["seed"] for call in arm] for arm in calls] == SEEDS
    assert len({*SEEDS[0], *SEEDS[1]}) == 6
    assert [call["prompts"] for call in calls[0]] == [call["prompts"] for call in calls[1]]


def test_one_update_a_step_needs_no_pass_for_logprobs_and_takes_the_mismatch_from_its_own() -> None:
    ends = Ends()
    (record,) = run(ends, config=replace(AUTO, num_steps=1))
    assert ends.names == ["refit", "generate", "train_step"]
    assert (ends.updates[0].trainer_logprobs, ends.updates[0].ref_logprobs) == (None, None)
    assert (record.has_logprob_pass, record.times.logprob_s) == (False, 0.0)
    # Rollout minus the training pass's own -0.75 is 0.25 and 0.5.
    assert (record.mismatch.k1, record.mismatch.largest) == (0.375, 0.5)


@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(AUTO, updates_per_step=2), replace(AUTO, loss=replace(LOSS, kl_coefficient=0.1))],
    ids=["always", "two updates", "a reference"],
)
def test_the_pass_for_logprobs_stays_where_the_recipe_or_the_gradient_asks_for_it(config: GrpoConfig) -> None:
    ends = Ends()
    (record,) = run(ends, config=replace(config, num_steps=1))
    assert ends.names.count("logprobs") == 1
    assert all(update.trainer_logprobs is not None for update in ends.updates)
    assert record.has_logprob_pass


def test_a_corrected_step_records_its_ratios_and_an_uncorrected_one_nothing() -> None:
    """The training pass's own -0.75 less the engine's -0.5 and -0.25: ratios exp(-0.25) and exp(-0.5).

    Its weights are of the policy before the update, which one update asks itself: a pass for them would give -0.5.
    """
    corrected = replace(AUTO, num_steps=1, loss=replace(LOSS, truncated_importance_sampling=0.7))
    (record,) = run(Ends(), config=corrected)
    (lag,) = record.lags
    assert (lag.lag, lag.num_tokens, lag.clipped_fraction) == (0, 8, 0.5)
    assert lag.ratio_mean == pytest.approx((np.exp(-0.25) + np.exp(-0.5)) / 2)
    assert lag.ratio_max == pytest.approx(np.exp(-0.25))
    assert all(not record.lags for record in run(Ends(), config=AUTO))


def test_a_step_of_two_updates_learns_from_each_rollout_once_against_the_policy_before_the_first() -> None:
    ends = Ends()
    (record,) = run(ends, config=replace(CONFIG, num_steps=1, updates_per_step=2))
    first, second = ends.updates
    assert ends.names.count("logprobs") == 1
    assert (*first.batch.advantages, *second.batch.advantages) == (0.5, -0.5, 0.0, 0.0)
    assert np.array(second.trainer_logprobs).tolist() == [[-0.5, -0.5]] * 2
    stats = record.train
    assert (stats.loss, stats.kl, stats.clip_fraction) == pytest.approx((0.15, 0.2, 0.3))  # means over the tokens
    assert (stats.grad_norm, stats.num_tokens, stats.learning_rate) == (1.5, 16, 1e-4)


def test_the_five_stages_are_timed_apart_and_add_up_to_the_step() -> None:
    """On a clock that only the calls below move, each by the seconds beside it."""
    now = [100.0]

    def takes(seconds: float, call: Callable[..., Any]) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return call(*args, **kwargs)

        return timed

    ends = Ends()
    for name, seconds in {"refit": 3, "generate": 4, "logprobs": 8, "ref_logprobs": 16, "train_step": 32}.items():
        setattr(ends, name, takes(seconds, getattr(ends, name)))
    (record,) = run(
        ends,
        config=replace(CONFIG, num_steps=1),
        on_score=takes(64.0, lambda groups: None),
        start_clock=lambda: StageClock(now_s=lambda: now[0]),
    )
    expected = {"data_s": 64.0, "prepare_s": 3.0, "generation_s": 4.0, "logprob_s": 24.0, "train_s": 32.0}
    assert record.times == replace(NO_TIMES, **expected, step_s=127.0)
    assert record.machine is not None


@pytest.mark.parametrize(
    ("rewards", "max_extra_batches", "trained", "sampling"),
    [
        ([(1, 0, 1, 1), (0, 0, 1, 1), (0, 1, 1, 0)], 2, [0, 4], (3, 6, 3, 0, 1, 0.5)),  # one of two, none, then two
        ([(1, 0, 1, 1), (1, 1, 0, 1), (1, 0, 1, 0)], 2, [0, 3], (2, 4, 2, 0, 0, 0.25)),  # the second batch suffices
        ([(1, 0, 0, 1), (1, 0, 0, 1)], 2, [0, 1], (1, 2, 2, 0, 0, 0.0)),  # the step's own prompts do
        ([(1, 1, 0, 0), (1, 1, 0, 1), (0, 1, 0, 1)], 1, [0, 3], (2, 4, 1, 1, 0, 0.25)),  # no further batch may follow
    ],
)
def test_a_step_samples_further_prompts_until_it_has_enough_groups_with_signal(
    rewards: list[tuple[float, ...]], max_extra_batches: int, trained: list[int], sampling: tuple[float, ...]
) -> None:
    """Two groups of two rollouts a batch; what was left out and what filled the step stands in its record."""

    class Timed(Ends):
        def generate(self, *args: Any, **how: Any) -> GenerationResult:
            found = super().generate(*args, **how)
            return replace(found, acceptance=ACCEPTANCE, generation_s=0.25, num_preemptions=1)

    ends = Timed(draft_version=4)
    prompts = tuple(Prompt(id=str(i), text=str(i), token_ids=(1, i), answer="7") for i in range(6))
    stream = PromptStream(prompts=prompts, batch_size=2, seed=0)
    more = DynamicSamplingConfig(max_extra_batches=max_extra_batches)
    config = replace(CONFIG, num_steps=1, dynamic_sampling=more)
    (record,) = run(ends, config=config, rewards=rewards, prompts=stream)
    num_batches = int(sampling[0])
    batches = [stream.batch(0), *(stream.further(0, number) for number in range(1, num_batches))]
    assert [call["prompts"] for call in ends.generated] == batches
    assert {call["seed"] for call in ends.generated} == {SEEDS[0][0]}
    assert ends.names.count("refit") == 1
    sampled = [prompt for batch in batches for prompt in batch]
    (update,) = ends.updates
    assert [ids[:2] for ids in update.batch.token_ids[::2]] == [sampled[index].token_ids for index in trained]
    all_rewards = [reward for batch in rewards[:num_batches] for reward in batch]
    assert update.batch.advantages == tuple(
        all_rewards[i] - (all_rewards[2 * index] + all_rewards[2 * index + 1]) / 2
        for index in trained
        for i in (2 * index, 2 * index + 1)
    )
    found = record.dynamic_sampling
    assert found is not None
    assert (
        *(found.num_batches, found.num_groups, found.num_with_signal, found.num_filled, found.num_surplus),
        found.extra_generation_s,
    ) == sampling
    assert found.num_trained == 2
    assert record.reward_mean == pytest.approx(np.mean(all_rewards))
    assert (record.num_rollouts, record.num_response_tokens) == (len(all_rewards), 2 * len(all_rewards))
    assert record.num_zero_signal_groups == found.num_groups - found.num_with_signal
    assert (record.num_preemptions, record.num_reward_timeouts) == (num_batches, 2 * num_batches)
    assert record.acceptance == combine([ACCEPTANCE] * num_batches)


def test_rollouts_of_a_policy_that_was_not_refitted_stop_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"must come from policy version 1, got \[0\]"):
        run(Ends(stuck=True))


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


REWARDS = RewardResult(rewards=(1.0, 0.0), num_timeouts=0, num_crashes=0)
OVERLAP = Stopwatch(num_regenerated=4).overlap()


def generated(policy_version: int) -> GenerationResult:
    own = group(PROMPTS[0], 2, policy_version=policy_version, draft_version=6)
    return GenerationResult(groups=(own,), acceptance=None, generation_s=1.0)


def stepped(learner: Ends, result: GenerationResult, *, draft: NotingDraft | None = None, **how: Any) -> StepRecord:
    """Step 3 of nine."""
    config = replace(AUTO, num_steps=9, prompts_per_step=1)
    made, clock = trainer(learner, config, draft=draft or NotingDraft(), **how), StageClock()
    learned = made.learn(3, result, REWARDS, clock=clock)
    return made.record(3, clock.times(), RefitCheck(num_tensors=1, elapsed_s=0.0), learned, overlap=OVERLAP)


@pytest.mark.parametrize("answer", [None, replace(DECISION, trains=False), DECISION])
def test_the_draft_is_asked_before_the_update_and_trained_in_it_where_it_says_so(answer: DraftDecision | None) -> None:
    draft, result, learner = NotingDraft(answer), generated(3), Ends()
    record = stepped(learner, result, draft=draft)
    assert draft.asked == [(result, 5)]  # of nine steps, 4 to 8 come after this one
    assert [update.trains_draft for update in learner.updates] == [answer is not None and answer.trains]
    assert (record.draft_decision, record.overlap) == (answer, OVERLAP)
    assert draft.noted == [record]


def test_the_longest_response_of_a_step_is_recorded() -> None:
    own = {"prompt_id": PROMPTS[0].id, "policy_version": 3, "draft_version": 6}
    rollouts = rollout((7,), (-0.5,), **own), rollout((7, 8, 2), (-0.5, -0.5, -0.5), **own)
    groups = (RolloutGroup(prompt=PROMPTS[0], rollouts=rollouts),)
    result = GenerationResult(groups=groups, acceptance=None, generation_s=1.0)
    assert stepped(Ends(), result).longest_response_tokens == 3


def test_a_loop_that_may_lag_shows_ratios_although_nothing_is_corrected() -> None:
    """The engine's -0.5 and -0.25 beside the training pass's own -0.75, one version behind."""
    (lag,) = stepped(Ends(), generated(2), max_lag=1).lags
    assert (lag.lag, lag.num_tokens, lag.clipped_fraction) == (1, 4, 0.0)
    assert lag.ratio_mean == pytest.approx((np.exp(-0.25) + np.exp(-0.5)) / 2)
    assert stepped(Ends(), generated(3)).lags == ()


def test_acceptance_that_collapses_is_told_of_the_version_that_was_drawn_from() -> None:
    learner, guard = Ends(), AcceptanceGuard([accepted(10**6, 900_000)] * 8)
    with pytest.raises(AcceptanceCollapse, match="at policy version 2"):
        stepped(learner, replace(generated(2), acceptance=accepted(10**6, 100_000)), max_lag=1, guard=guard)
    assert learner.updates == []
    # What is looked up is accepted less where an engine lost its memory: a resumed run of `suffix`, a replaced engine.
    draft, own = NotingDraft(), group(PROMPTS[0], 2, policy_version=3)
    draft.version = None
    looked_up = GenerationResult(groups=(own,), acceptance=accepted(10**6, 100_000), generation_s=1.0)
    assert stepped(learner, looked_up, draft=draft, guard=guard).acceptance == looked_up.acceptance


def test_versions_are_kept_as_long_as_rollouts_of_later_steps_may_come_from_them() -> None:
    """After step 5, with a lag of 2, step 6 takes what version 4 gave, and nothing older."""
    published = ((2, 0), (3, 0), (4, 1), (5, 1))
    assert recent(published, 5, 2) == ((4, 1), (5, 1))
    assert recent(published, 5, 0) == ()


STALE = draft_with(
    eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)}, online={"when": DraftOnline.WHEN_STALE, "horizon_steps": 8}
)
ALWAYS = draft_with(STALE, online={"when": DraftOnline.ALWAYS})


def drafted(length: float) -> AcceptanceStats:
    """So many drafts of one token that chance moves nothing."""
    return accepted(10**12, round((length - 1) * 10**12))


def observed(length: float, *, elapsed_s: float | None = None) -> StepRecord:
    """A step of rollouts of that length, which took 3 s; with `elapsed_s` it trained the draft."""
    update = None if elapsed_s is None else DraftUpdate(loss=1.0, num_updates=1, elapsed_s=elapsed_s)
    return replace(STEP, acceptance=drafted(length), draft_update=update)


def decided(draft: TrainedDraft, length: float, *, num_steps_left: int = 9, generation_s: float = 3.0) -> DraftDecision:
    """After rollouts of that length."""
    result = GenerationResult(groups=(), acceptance=drafted(length), generation_s=generation_s)
    decision = draft.decide(result, num_steps_left=num_steps_left)
    assert decision is not None
    return decision


def test_a_fixed_draft_is_never_trained() -> None:
    draft = Draft(version=3)
    draft.note(observed(1.5, elapsed_s=1.0))
    assert (draft.decide(generated(3), num_steps_left=9), draft.version) == (None, 3)


@pytest.mark.parametrize(("num_steps_left", "saved_s"), [(9, 6.0), (8, 6.0), (5, 3.75), (0, 0.0)])
def test_a_training_pays_for_the_horizon_or_for_the_steps_that_are_left(num_steps_left: int, saved_s: float) -> None:
    """A length of 1.5 where 2.0 is known to be reached loses a quarter of each step's 3 s."""
    decision = decided(TrainedDraft(STALE, reference=2.0), 1.5, num_steps_left=num_steps_left)
    assert decision.saved_s == pytest.approx(saved_s, rel=1e-4)
    assert (decision.length, decision.reference_length) == (1.5, 2.0)
    assert decision.trains == (saved_s > 0)


def test_a_draft_that_is_always_trained_shows_what_it_would_have_saved() -> None:
    decision = decided(TrainedDraft(ALWAYS, reference=2.0), 2.0)
    assert (decision.trains, decision.reason) == (True, "always")
    assert decision.saved_s == pytest.approx(0.0, abs=1e-3)
    assert not decided(TrainedDraft(STALE, reference=2.0), 2.0).trains


def test_each_training_makes_the_next_version_and_its_time_is_what_the_next_one_costs() -> None:
    draft = TrainedDraft(STALE, reference=2.0)
    draft.note(observed(1.5))
    assert draft.version == 0
    draft.note(observed(1.5, elapsed_s=9.0))  # the first pays for cold caches
    draft.note(observed(1.5, elapsed_s=7.0))
    assert draft.version == 2
    decision = decided(draft, 1.5)
    assert (decision.trains, decision.cost_s, decision.reason) == (False, 7.0, "it costs more than it saves")


def test_a_resumed_draft_knows_what_the_steps_before_it_showed() -> None:
    """Lengths of 2.0 and 1.5 before, and 1.6 now: 2.0 is reachable, and the last three have 1.7."""
    draft = TrainedDraft(STALE, reference=None, history=[observed(2.0), observed(1.5, elapsed_s=9.0)])
    decision = decided(draft, 1.6)
    assert draft.version == 1
    assert (decision.reference_length, decision.length) == (2.0, pytest.approx(1.7))


def test_a_resumed_draft_decides_as_one_that_was_not_interrupted() -> None:
    """Each step loses a quarter of the seconds that its rollouts took, whatever its record says of other times."""
    whole, records = TrainedDraft(STALE, reference=2.0), []
    for generation_s in (1.0, 3.0, 2.0, 5.0, 0.5):
        decision = decided(whole, 1.5, generation_s=generation_s)
        record = replace(observed(1.5, elapsed_s=1.5 if decision.trains else None), draft_decision=decision)
        records.append(record)
        whole.note(record)
    resumed = TrainedDraft(STALE, reference=2.0, history=records)
    assert decided(resumed, 1.5) == decided(whole, 1.5)
    trains = [record.draft_decision is not None and record.draft_decision.trains for record in records]
    assert trains == [True, True, False, True, False]


def test_a_step_that_decided_nothing_about_its_draft_lost_no_time_that_counts() -> None:
    """Of the rollouts before, which say nothing of their seconds, none; of these a quarter of 3 s."""
    draft = TrainedDraft(STALE, reference=2.0, history=[observed(1.5)])
    assert decided(draft, 1.5).lost_s == pytest.approx(0.75, rel=1e-5)
