"""A recorded demo calibrates the CPU target and predicts the arm that it was not shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.projection import own_setting, project_run
from slipstream.records import AcceptanceStats, ArmRecord, StepRecord, SweepPoint, TuningRecord
from slipstream.sim.observed import calibrate_run
from slipstream.types import Arm, StageTimes

DEMO = json.loads((Path(__file__).with_name("golden") / "demo_2026_11_21.json").read_text())


def _step(index: int, values: dict[str, Any], acceptance: AcceptanceStats | None) -> StepRecord:
    generation_s = values["generation_s"]
    return StepRecord(
        step=index,
        times=StageTimes(
            data_s=0.002,
            prepare_s=0.1,
            generation_s=generation_s,
            logprob_s=0.38,
            train_s=1.19,
            step_s=generation_s + 1.672,
        ),
        reward_mean=0.0,
        num_rollouts=DEMO["num_rollouts"],
        num_response_tokens=values["num_response_tokens"],
        num_truncated=values["num_truncated"],
        num_reward_timeouts=0,
        num_zero_signal_groups=0,
        loss=0.0,
        grad_norm=0.0,
        kl=0.0,
        clip_fraction=0.0,
        mismatch_kl=0.0,
        mismatch_max=0.0,
        acceptance=acceptance,
        policy_version=index,
    )


def demo_arms(speculative_factor: float = 1.0) -> tuple[ArmRecord, ...]:
    """Both arms of the recorded demo; the speculative times can be changed."""
    k = DEMO["chosen_k"]
    base = tuple(_step(i, values, None) for i, values in enumerate(DEMO["autoregressive"]))
    spec = tuple(
        _step(i, {**values, "generation_s": speculative_factor * values["generation_s"]}, None)
        for i, values in enumerate(DEMO["speculative"])
    )
    return (
        ArmRecord(arm=Arm.AUTOREGRESSIVE, num_speculative_tokens=0, steps=base),
        ArmRecord(arm=Arm.SPECULATIVE, num_speculative_tokens=k, steps=spec),
    )


def demo_tuning() -> TuningRecord:
    points = tuple(
        SweepPoint(
            **point,
            num_repeats=3,
            speedup=point["autoregressive_s"] / point["generation_s"],
            rate_by_position=(),
        )
        for point in DEMO["points"]
    )
    return TuningRecord(chosen_k=DEMO["chosen_k"], reason="recorded", points=points, schedule=())


def test_the_speculative_arm_is_predicted_from_the_baseline_and_the_sweep() -> None:
    check = calibrate_run(demo_arms(), demo_tuning(), own_setting("rl_zero")).check
    assert check is not None
    assert check.k == 5
    assert abs(check.relative_error) <= 0.15
    assert check.band.p10 <= check.predicted_s <= check.band.p90


def test_the_prediction_does_not_see_the_arm_that_it_predicts() -> None:
    one, other = (
        calibrate_run(demo_arms(factor), demo_tuning(), own_setting("rl_zero")).check for factor in (1.0, 3.0)
    )
    assert one is not None and other is not None
    assert one.predicted_s == other.predicted_s
    assert other.measured_s == pytest.approx(3.0 * one.measured_s)


def test_responses_are_counted_in_the_run() -> None:
    found = calibrate_run(demo_arms(), demo_tuning(), own_setting("rl_zero"))
    steps = DEMO["autoregressive"][1:]
    assert found.setting.num_rollouts == 64
    assert found.mean_tokens == pytest.approx(sum(step["num_response_tokens"] for step in steps) / (64 * len(steps)))
    assert found.setting.length_log_sd != own_setting("rl_zero").length_log_sd  # from the truncated share


def test_every_k_of_the_sweep_is_projected_on_the_same_machine() -> None:
    found = calibrate_run(demo_arms(), demo_tuning(), own_setting("rl_zero"))
    points = project_run(found, [1, 5])
    assert [point.k for point in points] == [1, 5]
    assert all(1.0 < point.rollout_speedup.median < point.k + 1 for point in points)
    assert all(point.step_speedup.median < point.rollout_speedup.median for point in points)


def test_a_run_without_a_baseline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run.arms must hold the autoregressive arm, got \['speculative'\]"):
        calibrate_run(demo_arms()[1:], demo_tuning(), own_setting("rl_zero"))


def test_a_run_without_speculation_has_nothing_to_check() -> None:
    assert calibrate_run(demo_arms()[:1], demo_tuning(), own_setting("rl_zero")).check is None
