"""A step under its MLflow names and in words: every number has another value, so that none can stand for another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.config import LossConfig, RecomputeLogprobs
from slipstream.grpo.update import Trained
from slipstream.records.steps import (
    AutopilotStep,
    DraftUpdate,
    DynamicSampling,
    EvaluationRecord,
    LagStats,
    MachineUse,
    Mismatch,
    Overlap,
    StepRecord,
)
from slipstream.rewards.reward import RewardResult
from slipstream.tracking.config import check_metrics
from slipstream.train.loop import Learned, Trainer
from slipstream.train.machine_use import Counters
from slipstream.train.metrics import StageClock, metrics_of, step_line
from slipstream.types import Prompt, Rollout, RolloutGroup, StageTimes, TrainBatch
from tests.unit.sampled import DECISION, accepted, rollout
from tests.unit.train.world import CONFIG, STEP, BareLearner

ACCEPTANCE = accepted(10, 8, 4)
SAMPLED = DynamicSampling(
    num_batches=3, num_groups=19, num_with_signal=5, num_filled=4, num_surplus=2, extra_generation_s=1.5
)
UPDATE = DraftUpdate(loss=1.25, num_updates=2, elapsed_s=0.5)
METRICS = {
    "time/data_s": 1.0,
    "time/prepare_s": 2.0,
    "time/generation_s": 4.0,
    "time/logprob_s": 8.0,
    "time/train_s": 16.0,
    "time/step_s": 32.0,
    "rollout/response_tokens": 100,
    "rollout/tokens_per_s": 25.0,  # 100 tokens in 4 s
    "rollout/longest_response_tokens": 7,
    "rollout/truncated": 3,
    "rollout/engine_restarts": 12,
    "rollout/preemptions": 14,
    "rollout/engine_idle_fraction": 0.25,
    "train/reward": 0.125,
    "train/reward_timeouts": 5,
    "train/reward_crashes": 6,
    "train/reward_failures": 8,
    "reward/length": 2.5,
    "train/zero_signal_groups": 7,
    "train/filtered_rollouts": 15,
    "train/loss": 0.1,
    "train/grad_norm": 0.2,
    "train/kl": 0.3,
    "train/clip_fraction": 0.4,
    "train/learning_rate": 0.5,
    "train/mismatch_kl": 0.6,
    "train/mismatch_k3": 0.7,
    "train/mismatch_mean": 0.8,
    "train/mismatch_max": 0.9,
    "train/mismatch_outside_fraction": 0.95,
    "refit/num_checked_tensors": 11,
    "refit/check_s": 0.15,
    "train/policy_version": 10,
}


EVALUATION = EvaluationRecord(
    policy="speculative",
    num_problems=2,
    k=4,
    avg_at_k=0.25,
    maj_at_k=0.5,
    ci95=(0.1, 0.4),
    truncated_fraction=0.125,
    num_timeouts=1,
    prompt_hash="abc",
    correct_by_problem=(0, 2),
)


def test_a_step_shows_the_state_of_its_machine_as_far_as_it_could_be_read() -> None:
    use = MachineUse(
        load=1.5, other_cpu_fraction=0.34, steal_fraction=None, memory_pressure_fraction=0.02, cpu_mhz=2600.0
    )
    read = {
        "machine/load": 1.5,
        "machine/other_cpu_fraction": 0.34,
        "machine/memory_pressure_fraction": 0.02,
        "machine/cpu_mhz": 2600.0,
    }
    assert metrics_of(replace(STEP, machine=use)) == METRICS | read
    gpus = {"machine/sm_clock_mhz": 1500.0, "machine/throttled": 0.0}
    assert metrics_of(replace(STEP, machine=replace(use, sm_clock_mhz=1500.0))) == METRICS | read | gpus
    slowed = replace(use, sm_clock_mhz=1500.0, throttle_reasons=("power cap",))
    assert metrics_of(replace(STEP, machine=slowed))["machine/throttled"] == 1.0


def test_a_clock_reads_the_machine_before_and_after_its_step_and_outside_its_time() -> None:
    """Each reading takes 5 s and counts another 30 of 100 ticks as busy with other work."""
    now, readings = [0.0], [0]

    def read() -> Counters:
        now[0] += 5.0
        readings[0] += 1
        busy = 30 * readings[0]
        cores = (busy, 0, 0, 100 * readings[0] - busy, 0, 0, 0, 0)
        return Counters(at_s=now[0], cores=cores, own_ticks={}, pressure_us=None, load=None, cpu_mhz=None)

    clock = StageClock(now_s=lambda: now[0], read_counters=read)
    now[0] += 2.0
    assert clock.times().step_s == 2.0
    assert clock.machine_use().other_cpu_fraction == 0.3


def test_a_step_of_an_asynchronous_loop_shows_what_overlapped_and_the_engines_own_rate() -> None:
    overlap = Overlap(
        generation_s=5.0,
        hidden_s=3.0,
        engine_idle_fraction=0.1,
        learner_idle_fraction=0.2,
        score_s=0.3,
        exposed_score_s=0.05,
        publish_s=0.4,
        exposed_publish_s=0.06,
        num_awaited=8,
        num_restarted=9,
        num_regenerated=10,
    )
    assert metrics_of(replace(STEP, overlap=overlap)) == METRICS | {
        "rollout/tokens_per_s": 20.0,  # 100 tokens in 5 s, not in the 4 s that training waited
        "overlap/generation_s": 5.0,
        "overlap/hidden_generation_s": 3.0,
        "overlap/engine_idle_fraction": 0.1,
        "overlap/learner_idle_fraction": 0.2,
        "overlap/score_s": 0.3,
        "overlap/exposed_score_s": 0.05,
        "overlap/publish_s": 0.4,
        "overlap/exposed_publish_s": 0.06,
        "overlap/awaited_rollouts": 8,
        "overlap/restarted_rollouts": 9,
        "overlap/regenerated_rollouts": 10,
    }


def test_ratios_are_shown_of_each_lag_and_over_all_tokens() -> None:
    young = LagStats(
        lag=0, num_tokens=30, ratio_mean=1.0, ratio_max=1.5, clipped_fraction=0.1, effective_sample_size=0.9
    )
    old = LagStats(
        lag=2, num_tokens=10, ratio_mean=1.2, ratio_max=1.25, clipped_fraction=0.5, effective_sample_size=0.5
    )
    found = metrics_of(replace(STEP, lags=(young, old)))
    assert found == METRICS | {
        "offpolicy/lag_mean": 0.5,
        "offpolicy/lag_max": 2,
        "offpolicy/ratio_mean": pytest.approx(1.05),
        "offpolicy/ratio_max": 1.5,
        "offpolicy/clipped_fraction": pytest.approx(0.2),
        "offpolicy/effective_sample_size": pytest.approx(0.8),
        "offpolicy/tokens_fraction_lag_0": 0.75,
        "offpolicy/ratio_mean_lag_0": 1.0,
        "offpolicy/ratio_max_lag_0": 1.5,
        "offpolicy/clipped_fraction_lag_0": 0.1,
        "offpolicy/effective_sample_size_lag_0": 0.9,
        "offpolicy/tokens_fraction_lag_2": 0.25,
        "offpolicy/ratio_mean_lag_2": 1.2,
        "offpolicy/ratio_max_lag_2": 1.25,
        "offpolicy/clipped_fraction_lag_2": 0.5,
        "offpolicy/effective_sample_size_lag_2": 0.5,
    }
    check_metrics(found, 0)


def test_a_draft_and_a_probe_add_theirs() -> None:
    step = replace(STEP, acceptance=ACCEPTANCE, refit=replace(STEP.refit, probe_difference=0.05))
    assert metrics_of(step) == METRICS | {
        "refit/probe_difference": 0.05,
        "spec/mean_acceptance_length": 2.2,
        "spec/acceptance_rate": 0.6,
        "spec/acceptance_rate_pos_1": 0.8,
        "spec/acceptance_rate_pos_2": 0.4,
    }
    check_metrics(metrics_of(step), step=0)


def test_a_draft_that_may_be_trained_adds_the_decision_and_what_the_step_did() -> None:
    step = replace(STEP, draft_version=3, draft_decision=DECISION)
    decided = {
        "draft/trained": 1.0,
        "draft/length": 2.5,
        "draft/reference_length": 3.5,
        "draft/expected_saved_s": 6.0,
        "draft/lost_s": 1.25,
        "draft/train_s": 0.0,
        "draft/version": 3,
    }
    assert metrics_of(step) == METRICS | decided
    step = replace(step, draft_decision=replace(DECISION, cost_s=0.75), draft_update=UPDATE)
    trained = {"draft/train_s": 0.5, "draft/expected_cost_s": 0.75, "draft/loss": 1.25}
    assert metrics_of(step) == METRICS | decided | trained


PROBE = AutopilotStep(speculates=False, is_probe=True, token_ms=0.5)


def test_a_step_under_the_autopilot_says_whether_it_drafted_and_whether_that_was_a_probe() -> None:
    assert metrics_of(replace(STEP, autopilot=PROBE)) == METRICS | {
        "spec/autopilot_speculates": 0.0,
        "spec/autopilot_probes": 1.0,
    }
    found = metrics_of(replace(STEP, autopilot=replace(PROBE, speculates=True, is_probe=False)))
    assert found == METRICS | {"spec/autopilot_speculates": 1.0, "spec/autopilot_probes": 0.0}


def test_engines_that_generated_nothing_have_no_rate() -> None:
    step = replace(STEP, times=replace(STEP.times, generation_s=0.0))
    assert metrics_of(step)["rollout/tokens_per_s"] == 0.0
    short = replace(STEP, times=replace(STEP.times, generation_s=0.5))
    assert metrics_of(short)["rollout/tokens_per_s"] == 200.0


def test_a_draft_that_is_left_alone_says_so() -> None:
    left_alone = replace(STEP, draft_decision=replace(DECISION, trains=False))
    assert metrics_of(left_alone)["draft/trained"] == 0.0


def test_a_learner_that_knows_its_entropy_adds_it() -> None:
    assert metrics_of(replace(STEP, train=replace(STEP.train, entropy=0.75))) == METRICS | {"train/entropy": 0.75}


def test_a_step_in_words() -> None:
    line = "step 7/24, reward 0.125, 32.00 s (generation 4.00 s, 25 tokens/s)"
    assert step_line(STEP, 24) == line
    assert step_line(replace(STEP, acceptance=ACCEPTANCE), 24) == f"{line}, AL 2.20"
    assert step_line(replace(STEP, evaluation=EVALUATION), 24) == f"{line}; after step {STEP.step} avg@4 was 0.250"
    assert step_line(replace(STEP, draft_update=UPDATE), 24) == f"{line}, draft trained in 0.50 s"
    few, filled = replace(SAMPLED, num_filled=0), f"{line}; 5 of 19 groups in 3 batches had signal"
    assert step_line(replace(STEP, dynamic_sampling=few), 24) == filled
    assert step_line(replace(STEP, dynamic_sampling=SAMPLED), 24) == f"{filled}, 4 without it filled the step"
    assert step_line(replace(STEP, dynamic_sampling=replace(few, num_batches=1)), 24) == line
    assert step_line(replace(STEP, acceptance=ACCEPTANCE, autopilot=PROBE), 24) == f"{line}, not drafted"
    drafted = replace(PROBE, speculates=True)
    assert step_line(replace(STEP, acceptance=ACCEPTANCE, autopilot=drafted), 24) == f"{line}, AL 2.20"


def test_a_stage_that_is_entered_twice_adds_up_and_one_that_fails_counts() -> None:
    now = [0.0]
    clock = StageClock(now_s=lambda: now[0])
    for seconds in (1.0, 2.0):
        with clock.stage("data"):
            now[0] += seconds
    with pytest.raises(RuntimeError, match="out of memory"), clock.stage("train"):
        now[0] += 4.0
        raise RuntimeError("out of memory")
    now[0] += 8.0
    assert clock.times() == StageTimes(
        data_s=3.0, prepare_s=0.0, generation_s=0.0, logprob_s=0.0, train_s=4.0, step_s=15.0
    )


def test_time_that_was_measured_elsewhere_is_added_to_a_stage() -> None:
    clock = StageClock(now_s=lambda: 0.0)
    clock.add("logprob", 2.0)
    clock.add("logprob", 3.0)
    assert (clock.times().logprob_s, clock.times().step_s) == (5.0, 0.0)


def recorded(
    result: GenerationResult,
    rewards: RewardResult,
    draft: DraftUpdate | None = None,
    recompute: RecomputeLogprobs = RecomputeLogprobs.AUTO,
) -> StepRecord:
    """The record of step 6, in which engine and learner agree on every logprob."""
    rows = [rollout.rollout_logprobs for group in result.groups for rollout in group.rollouts]
    batch = TrainBatch(
        token_ids=[], prompt_lengths=[], rollout_logprobs=rows, advantages=[], policy_version=STEP.policy_version
    )
    learned = Learned(
        result=result,
        rewards=rewards,
        groups=result.groups,
        batch=batch,
        trained=Trained(stats=STEP.train, own_logprobs=None, draft=draft),
        before=[np.asarray(row, dtype=np.float32) for row in rows],
        decision=None,
    )
    config = replace(CONFIG, loss=LossConfig(), recompute_logprobs=recompute)
    trainer = Trainer(learner=BareLearner(), config=config, temperature=1.0, max_response_tokens=4)
    return trainer.record(6, STEP.times, STEP.refit, learned)


def test_a_record_counts_over_all_groups_and_shows_what_the_autopilot_did() -> None:
    """Two groups of two rollouts of 1 to 4 tokens; the second group has one reward alone, so no signal."""

    def of(prompt_id: str, num: int) -> Rollout:
        return rollout((7,) * num, prompt_id=prompt_id, is_cut=num == 4, policy_version=10)

    groups = tuple(
        RolloutGroup(prompt=Prompt(id=name, text="", token_ids=(1,), answer="7"), rollouts=(of(name, a), of(name, b)))
        for name, (a, b) in {"0": (3, 4), "1": (2, 1)}.items()
    )
    record = recorded(
        GenerationResult(groups=groups, acceptance=None, generation_s=4.0, autopilot=PROBE),
        RewardResult(rewards=(1.0, 0.5, 0.25, 0.25), num_timeouts=0, num_crashes=0),
        recompute=RecomputeLogprobs.ALWAYS,
    )
    assert (record.num_rollouts, record.num_response_tokens, record.longest_response_tokens) == (4, 10, 4)
    assert (record.num_truncated, record.num_zero_signal_groups, record.reward_mean) == (1, 1, 0.5)
    assert (record.autopilot, record.has_logprob_pass) == (PROBE, True)
    assert record.rewards_by_prompt == (0.75, 0.25)


def test_a_step_shows_what_it_sampled_in_place_of_groups_without_signal() -> None:
    assert metrics_of(replace(STEP, dynamic_sampling=SAMPLED)) == METRICS | {
        "sampling/batches": 3,
        "sampling/groups": 19,
        "sampling/groups_with_signal": 5,
        "sampling/groups_filled": 4,
        "sampling/groups_surplus": 2,
        "sampling/extra_generation_s": 1.5,
    }


def test_one_rollout_is_enough_for_a_record() -> None:
    prompt = Prompt(id="0", text="0", token_ids=(1,), answer="7")
    one = rollout((7, 2, 2), is_cut=True, policy_version=10, draft_version=4)
    group = RolloutGroup(prompt=prompt, rollouts=(one,))
    record = recorded(
        GenerationResult(
            groups=(group,),
            acceptance=ACCEPTANCE,
            generation_s=4.0,
            num_engine_restarts=12,
            engine_idle_fraction=0.25,
            num_preemptions=14,
        ),
        RewardResult(rewards=(0.5,), num_timeouts=5, num_crashes=6, num_failures=8, metrics={"length": 2.5}),
        draft=UPDATE,
    )
    assert record == replace(
        STEP,
        mismatch=Mismatch(k1=0.0, k3=0.0, mean=0.0, largest=0.0, outside_fraction=0.0),
        reward_mean=0.5,
        rewards_by_prompt=(0.5,),
        num_rollouts=1,
        num_response_tokens=3,
        num_truncated=1,
        num_zero_signal_groups=1,
        longest_response_tokens=3,
        acceptance=ACCEPTANCE,
        draft_version=4,
        has_logprob_pass=False,
        draft_update=UPDATE,
        num_filtered=0,
    )


def test_the_accuracy_of_the_policy_that_sampled_a_step_is_a_metric_of_it() -> None:
    found = metrics_of(replace(STEP, evaluation=EVALUATION))
    assert found.items() - metrics_of(STEP).items() == {
        ("validation/avg_at_4", 0.25),
        ("validation/avg_at_4_low", 0.1),
        ("validation/avg_at_4_high", 0.4),
        ("validation/maj_at_4", 0.5),
        ("validation/truncated_fraction", 0.125),
        ("validation/num_timeouts", 1),
    }
