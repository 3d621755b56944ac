"""A run of our own as cells of a calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.recipe import load_recipe
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator.observed import RunCalibration, calibrate_run, run_setting
from slipstream.simulator.projection import project_run
from slipstream.stages.support import recipe_layout

DemoArms = Callable[[float], tuple[ArmRecord, ...]]
LAYOUT = recipe_layout(
    load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
)
assert LAYOUT is not None
SETTING = run_setting(LAYOUT)


@pytest.fixture(scope="module")
def recorded(demo_arms: DemoArms, demo_tuning: TuningRecord) -> RunCalibration:
    """Fitted to the recorded demo as it is."""
    return calibrate_run(demo_arms(1.0), demo_tuning, SETTING)


def test_the_speculative_arm_is_predicted_from_the_baseline_and_the_sweep(recorded: RunCalibration) -> None:
    check = recorded.check
    assert check is not None
    assert check.k == 5
    assert check.predicted_s == pytest.approx(check.measured_s, rel=0.15)
    assert check.predicted_p10_s < check.predicted_s < check.predicted_p90_s


def test_the_prediction_does_not_see_the_arm_that_it_predicts(
    recorded: RunCalibration, demo_arms: DemoArms, demo_tuning: TuningRecord
) -> None:
    one, other = recorded.check, calibrate_run(demo_arms(3.0), demo_tuning, SETTING).check
    assert one is not None and other is not None
    assert one.predicted_s == other.predicted_s
    assert other.measured_s == pytest.approx(3.0 * one.measured_s)


def test_responses_are_counted_in_the_run(demo: dict[str, Any], recorded: RunCalibration) -> None:
    steps = demo["autoregressive"][1:]  # the first one warms up
    assert recorded.setting.num_rollouts == 64
    assert recorded.mean_tokens == pytest.approx(sum(step["num_response_tokens"] for step in steps) / (64 * len(steps)))
    assert recorded.setting.length_log_sd != SETTING.length_log_sd  # from the truncated share


def test_the_longest_response_says_how_widely_they_are_spread(demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    """A step lasts as long as its longest response, of which the mean says nothing."""

    def spread(longest: int) -> float:
        arm = demo_arms(1.0)[0]
        steps = tuple(replace(step, num_truncated=0, longest_response_tokens=longest) for step in arm.steps)
        return calibrate_run([replace(arm, steps=steps)], demo_tuning, SETTING).setting.length_log_sd

    assert spread(0) == SETTING.length_log_sd  # not recorded
    assert 0.05 <= spread(90) < spread(120) < spread(150)


def test_a_point_of_the_sweep_is_put_on_equal_responses_by_its_longest(
    demo_arms: DemoArms, demo_tuning: TuningRecord
) -> None:
    base, point = (next(p for p in demo_tuning.points if p.k == k and p.batch == 64) for k in (0, 5))
    tuning = replace(
        demo_tuning,
        points=(
            replace(base, autoregressive_s=1.0),
            replace(
                point,
                autoregressive_s=1.0,
                speedup=2.0,
                longest_response_tokens=60.0,
                autoregressive_longest_tokens=80.0,
            ),
        ),
    )
    arm, baseline, cell = calibrate_run(demo_arms(1.0)[:1], tuning, SETTING).ensemble.best.cells
    assert (baseline.generation_s, cell.generation_s) == (1.0, pytest.approx(1.0 / (2.0 * 60.0 / 80.0)))
    assert (arm.clock, baseline.clock, cell.clock) == ("", "", baseline.label)


def test_a_baseline_whose_rounds_differ_counts_for_less(demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    """Three rounds from 1 to 2 s: ln 2 / 2.563 x 1.2533 / sqrt(3) = 0.196."""
    points = tuple(
        replace(point, generation_p10_s=1.0, generation_p90_s=2.0 if point.k == 0 else 4.0)
        for point in demo_tuning.points
    )
    found = calibrate_run(demo_arms(1.0)[:1], replace(demo_tuning, points=points), SETTING)
    noise = {cell.label: cell.log_sd for cell in found.ensemble.best.cells}
    assert noise["sweep, batch 64, k = 0"] == pytest.approx(0.1957, abs=1e-4)
    assert noise["sweep, batch 64, k = 5"] == noise["autoregressive arm"] == 0.05


def test_a_slow_hour_of_the_sweep_moves_a_prediction_by_less_the_noisier_its_baselines_were(
    demo_arms: DemoArms, demo_tuning: TuningRecord
) -> None:
    """Each point is on the clock of its baseline: it says how fast a k is beside k = 0, and shares its noise."""

    def predicted_s(slower: float, p90_s: float) -> float:
        points = tuple(
            replace(
                point, autoregressive_s=slower * point.autoregressive_s, generation_p10_s=1.0, generation_p90_s=p90_s
            )
            for point in demo_tuning.points
        )
        check = calibrate_run(demo_arms(1.0), replace(demo_tuning, points=points), SETTING).check
        assert check is not None
        return check.predicted_s

    quiet, noisy = (predicted_s(2.0, p90_s) / predicted_s(1.0, p90_s) for p90_s in (1.0, 100.0))
    assert quiet > 1.1
    assert noisy == pytest.approx(1.0, abs=0.05)


def test_every_k_of_the_sweep_is_projected_on_the_same_machine(recorded: RunCalibration) -> None:
    points = project_run(recorded, [1, 5])
    assert [point.k for point in points] == [1, 5]
    assert all(1.0 < point.rollout_speedup.median < point.k + 1 for point in points)
    assert all(point.step_speedup.median < point.rollout_speedup.median for point in points)


def test_a_run_without_a_baseline_is_refused(demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    with pytest.raises(ConfigError, match=r"run.arms must hold the autoregressive arm, got \['speculative'\]"):
        calibrate_run(demo_arms(1.0)[1:], demo_tuning, SETTING)


def test_a_run_without_speculation_has_nothing_to_check(demo_arms: DemoArms, demo_tuning: TuningRecord) -> None:
    assert calibrate_run(demo_arms(1.0)[:1], demo_tuning, SETTING).check is None
