"""A recorded demo calibrates the CPU target and predicts the arm that it was not shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.recipe import load_recipe
from slipstream.records import ArmRecord, TuningRecord
from slipstream.simulator.fit.observed import calibrate_run
from slipstream.simulator.project.runs import project_run, run_setting
from slipstream.stages.support import recipe_layout

DemoArms = Callable[[float], tuple[ArmRecord, ...]]
LAYOUT = recipe_layout(
    load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
)
assert LAYOUT is not None
SETTING = run_setting(LAYOUT)


def test_the_speculative_arm_is_predicted_from_the_baseline_and_the_sweep(
    demo_arms: DemoArms, demo_tuning: TuningRecord
) -> None:
    check = calibrate_run(demo_arms(1.0), demo_tuning, SETTING, target="cpu").check
    assert check is not None
    assert check.k == 5
    assert check.predicted_s == pytest.approx(check.measured_s, rel=0.15)
    assert check.predicted_p10_s < check.predicted_s < check.predicted_p90_s


def test_the_prediction_does_not_see_the_arm_that_it_predicts(demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    one, other = (calibrate_run(demo_arms(factor), demo_tuning, SETTING, target="cpu").check for factor in (1.0, 3.0))
    assert one is not None and other is not None
    assert one.predicted_s == other.predicted_s
    assert other.measured_s == pytest.approx(3.0 * one.measured_s)


def test_responses_are_counted_in_the_run(demo: dict[str, Any], demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    found = calibrate_run(demo_arms(1.0), demo_tuning, SETTING, target="cpu")
    steps = demo["autoregressive"][1:]  # the first one warms up
    assert found.setting.num_rollouts == 64
    assert found.mean_tokens == pytest.approx(sum(step["num_response_tokens"] for step in steps) / (64 * len(steps)))
    assert found.setting.length_log_sd != SETTING.length_log_sd  # from the truncated share


def test_every_k_of_the_sweep_is_projected_on_the_same_machine(demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    points = project_run(calibrate_run(demo_arms(1.0), demo_tuning, SETTING, target="cpu"), [1, 5])
    assert [point.k for point in points] == [1, 5]
    assert all(1.0 < point.rollout_speedup.median < point.k + 1 for point in points)
    assert all(point.step_speedup.median < point.rollout_speedup.median for point in points)


def test_a_run_without_a_baseline_is_refused(demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    with pytest.raises(ConfigError, match=r"run.arms must hold the autoregressive arm, got \['speculative'\]"):
        calibrate_run(demo_arms(1.0)[1:], demo_tuning, SETTING, target="cpu")


def test_a_run_without_speculation_has_nothing_to_check(demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    assert calibrate_run(demo_arms(1.0)[:1], demo_tuning, SETTING, target="cpu").check is None
