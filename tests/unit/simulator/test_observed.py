"""A run as cells of a calibration; the paper's measurements, fitted and left out in turn."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from slipstream.config import ConfigError
from slipstream.simulator import Array, observed
from slipstream.simulator.calibration import Cell, Ensemble, calibrate
from slipstream.simulator.observed import (
    RunCalibration,
    calibrate_paper,
    calibrate_run,
    paper_cells,
    paper_learner,
    run_setting,
)
from slipstream.simulator.projection import PUBLISHED_MODEL, ProjectionRequest, project_request
from slipstream.simulator.reference import read_reference, read_simulator_reference
from slipstream.simulator.rollout import Lengths, Trace
from slipstream.simulator.settings import Regime, Setting, load_setting
from slipstream.simulator.step_cost import overlap
from slipstream.types import Arm, StageTimes, Workload
from tests.unit.report.handmade import DEMO_TUNING, demo_arms, demo_run

LAYOUT = demo_run().layout
assert LAYOUT is not None
SETTING = run_setting(LAYOUT)


@pytest.fixture(scope="module")
def recorded() -> RunCalibration:
    """Fitted to the recorded demo as it is."""
    return calibrate_run(demo_arms(), DEMO_TUNING, SETTING)


def test_the_speculative_arm_is_predicted_without_being_seen(recorded: RunCalibration, cells: list[Cell]) -> None:
    one, other = recorded.check, calibrate_run(demo_arms(3.0), DEMO_TUNING, SETTING).check
    assert one is not None and other is not None
    assert one.k == 5
    assert one.predicted_s == pytest.approx(one.measured_s, rel=0.15)
    assert one.predicted_p10_s < one.predicted_s < one.predicted_p90_s
    assert cells == list(recorded.ensemble.best.cells)
    assert one.predicted_s == other.predicted_s
    assert other.measured_s == pytest.approx(3.0 * one.measured_s)


@pytest.fixture
def cells(recorded: RunCalibration, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """What the latest calibration would have been fitted to; it has the recorded one's fit."""
    seen: list[Cell] = []

    def note(setting: Setting, cells: Sequence[Cell]) -> Ensemble:
        seen[:] = cells
        return recorded.ensemble

    monkeypatch.setattr(observed, "calibrate", note)
    return seen


@pytest.mark.usefixtures("cells")
def test_the_longest_response_says_how_widely_they_are_spread() -> None:
    """A step lasts as long as its longest response, of which the mean says nothing."""

    def spread(longest: int) -> float:
        arm = demo_arms()[0]
        steps = tuple(replace(step, num_truncated=0, longest_response_tokens=longest) for step in arm.steps)
        return calibrate_run([replace(arm, steps=steps)], DEMO_TUNING, SETTING).setting.length_log_sd

    assert spread(0) == SETTING.length_log_sd  # not recorded
    assert 0.05 <= spread(90) < spread(120) < spread(150)


def test_a_point_of_the_sweep_is_put_on_equal_responses_by_its_longest(cells: list[Cell]) -> None:
    base, point = (next(p for p in DEMO_TUNING.points if p.k == k and p.batch == 64) for k in (0, 5))
    longest = {"longest_response_tokens": 60.0, "autoregressive_longest_tokens": 80.0}
    points = (replace(base, autoregressive_s=1.0), replace(point, autoregressive_s=1.0, speedup=2.0, **longest))
    calibrate_run(demo_arms()[:1], replace(DEMO_TUNING, points=points), SETTING)
    arm, baseline, cell = cells
    assert (baseline.generation_s, cell.generation_s) == (1.0, pytest.approx(1.0 / (2.0 * 60.0 / 80.0)))
    assert (arm.clock, baseline.clock, cell.clock) == ("", "", baseline.label)


def test_the_sweep_runs_the_engines_of_the_arm_and_a_group_stays_on_one(cells: list[Cell]) -> None:
    """Eight engines that generate and eight prompts a step of eight rollouts each; a sweep of 16 has two groups."""
    assert LAYOUT is not None
    base = demo_arms()[0]
    arm = replace(base, steps=tuple(replace(step, rewards_by_prompt=(0.0,) * 8) for step in base.steps))
    calibrate_run([arm], DEMO_TUNING, run_setting(replace(LAYOUT, num_gpus=12, generation_gpus=8)))
    shapes = [cell.group.shape for cell in cells]
    assert {(each.num_rollouts, each.num_engines, each.per_engine) for each in shapes} == {(16, 2, 8), (64, 8, 8)}


def test_a_baseline_whose_rounds_differ_counts_for_less(cells: list[Cell]) -> None:
    """Three rounds from 1 to 2 s: ln 2 / 2.563 x 1.2533 / sqrt(3) = 0.196."""
    points = tuple(
        replace(point, generation_p10_s=1.0, generation_p90_s=2.0 if point.k == 0 else 4.0)
        for point in DEMO_TUNING.points
    )
    calibrate_run(demo_arms()[:1], replace(DEMO_TUNING, points=points), SETTING)
    noise = {cell.label: cell.log_sd for cell in cells}
    assert noise["sweep, batch 64, k = 0"] == pytest.approx(0.1957, abs=1e-4)
    assert noise["sweep, batch 64, k = 5"] == noise["autoregressive arm"] == 0.05


def test_a_slow_hour_of_the_sweep_moves_a_prediction_by_less_the_noisier_its_baselines_were() -> None:
    """Each point is on the clock of its baseline: it says how fast a k is beside k = 0, and shares its noise."""

    def predicted_s(slower: float, p90_s: float) -> float:
        noise = {"generation_p10_s": 1.0, "generation_p90_s": p90_s}
        points = tuple(
            replace(each, autoregressive_s=slower * each.autoregressive_s, **noise) for each in DEMO_TUNING.points
        )
        check = calibrate_run(demo_arms(), replace(DEMO_TUNING, points=points), SETTING).check
        assert check is not None
        return check.predicted_s

    quiet, noisy = (predicted_s(2.0, p90_s) / predicted_s(1.0, p90_s) for p90_s in (1.0, 100.0))
    assert quiet > 1.1
    assert noisy == pytest.approx(1.0, abs=0.05)


@pytest.mark.usefixtures("cells")
def test_a_run_without_a_baseline_is_refused_and_one_without_speculation_has_nothing_to_check() -> None:
    assert calibrate_run(demo_arms()[:1], DEMO_TUNING, SETTING).check is None
    with pytest.raises(ConfigError, match=r"run.arms must hold the autoregressive arm, got \['speculative'\]"):
        calibrate_run(demo_arms()[1:], DEMO_TUNING, SETTING)


PUBLISHED = load_setting("paper-8b")
WORK = 0.65  # of the synchronous batch's: what the trainer of the asynchronous run was busy with


SEVEN = "k = 7"


@cache
def without(held_out: str) -> tuple[Ensemble, list[Cell]]:
    """A fit without the speculative cells of a workload, or without those of k = 7; and the cells left out."""
    cells = paper_cells()
    left_out = [c for c in cells if (c.k == 7 if held_out == SEVEN else c.group.name == held_out and c.k > 0)]
    return calibrate(PUBLISHED, [cell for cell in cells if cell not in left_out]), left_out


def errors(cells: Sequence[Cell], predicted_s: np.ndarray) -> np.ndarray:
    return np.abs(predicted_s / np.array([cell.generation_s for cell in cells]) - 1.0)


def test_the_data_choose_a_variant_that_fits_all_sixteen_cells_with_fewer_parameters_and_no_smooth_cost_fits() -> None:
    by_regime = {member.variant.regime: member for member in calibrate_paper().members}
    assert calibrate_paper().best is by_regime[Regime.CAPTURED]
    for regime in (Regime.CAPTURED, Regime.TILE):
        assert by_regime[regime].rms_error <= 0.05
        assert by_regime[regime].max_error <= 0.08
    assert by_regime[Regime.SMOOTH].rms_error > 0.10
    assert calibrate_paper().weights[calibrate_paper().members.index(by_regime[Regime.SMOOTH])] < 1e-6
    for member in calibrate_paper().members:
        assert len(member.variant.free) == (10 if member.variant.regime is Regime.SMOOTH else 11)
        assert 0 < member.posterior.effective_parameters < len(member.variant.free) < len(member.cells)
    variant, at = calibrate_paper().best.variant, calibrate_paper().best.posterior.mode
    cells = paper_cells()[::-3]
    alone = [variant.predict_s([cell], at)[0] for cell in cells]
    assert variant.predict_s(cells, at) == pytest.approx(alone)


def test_the_four_step_totals_are_met() -> None:
    cells = calibrate_paper().best.cells
    seconds = dict(zip([cell.label for cell in cells], calibrate_paper().predict_s(cells).tolist(), strict=True))
    for workload, published in read_reference().workloads.items():
        for name, measured in (("autoregressive", published.autoregressive), ("k = 3", published.speculative)):
            step = paper_learner().measured.with_generation(seconds[f"{workload}, {name}"])
            assert step.step_s == pytest.approx(measured.step_s, rel=0.05)


@pytest.mark.parametrize(("held_out", "number", "error"), [*((name, 7, 0.13) for name in Workload), (SEVEN, 2, 0.1)])
def test_cells_that_are_left_out_are_predicted(held_out: str, number: int, error: float) -> None:
    ensemble, cells = without(held_out)
    assert len(cells) == number
    assert errors(cells, ensemble.predict_s(cells)).max() <= error


def test_what_was_not_measured_warns_and_widens() -> None:
    only_three = calibrate(PUBLISHED, [cell for cell in paper_cells() if cell.k in (0, 3)])
    assert only_three.best.validity.warnings(k=5, batch=64) == (
        "k = 5 was not measured (only k = 3): the band is wider",
    )
    assert calibrate_paper().best.validity.warnings(k=5, batch=64) == ()
    seven = [cell for cell in paper_cells() if cell.k == 7]
    narrow, wide = calibrate_paper().bands_s(seven), only_three.bands_s(seven)
    assert all(w.p90 / w.p10 > 1.2 * n.p90 / n.p10 for n, w in zip(narrow, wide, strict=True))
    validity = calibrate_paper().best.validity
    assert "a running batch of 512 was not measured" in validity.warnings(k=3, batch=512)[0]
    assert validity.extra_log_sd(k=3, batch=512) > validity.extra_log_sd(k=3, batch=128)


def test_bands_cover_most_held_out_cells() -> None:
    inside = []
    for ensemble, held_out in map(without, (*Workload, SEVEN)):
        bands = ensemble.bands_s(held_out)
        inside += [band.p10 <= cell.generation_s <= band.p90 for band, cell in zip(bands, held_out, strict=True)]
        assert all(band.p90 < 2 * band.p10 for band in bands)  # a band that says nothing would cover everything
    assert len(inside) == 16
    assert np.mean(inside) >= 0.8


REFERENCE = read_simulator_reference().asynchronous
TRAINER_S = {arm: REFERENCE[f"{arm.value}_step_s"] - REFERENCE[f"{arm.value}_exposed_s"] for arm in Arm}
PREPARE_S = paper_learner().measured.prepare_s  # a refit hides nothing


def asynchronous_step(arm: Arm, setting: Setting, lengths: Lengths, seconds: Callable[[Trace], Array]) -> StageTimes:
    """What the measured time of an arm's trainer and `seconds` of generation on the paper's 48 GPUs give together."""
    busy_s = TRAINER_S[arm] - PREPARE_S
    trainer = StageTimes.in_sequence(data_s=0.0, prepare_s=PREPARE_S, generation_s=0.0, logprob_s=0.0, train_s=busy_s)
    shape = setting.shape(int(REFERENCE["generation_gpus"]))
    return overlap(trainer, lengths=lengths, shape=shape, lag=int(REFERENCE["lag"]), seconds=seconds).step


def fitted_asynchronous_steps(*, rollouts: float = 1.0, tokens: float = 1.0) -> dict[Arm, StageTimes]:
    """Both arms by the fitted cost, with a share of the synchronous step's rollouts, or of each one's tokens."""
    best = calibrate_paper().best
    mean, model = best.variant.values(best.posterior.mode)["rl_think"], best.model(PUBLISHED)
    setting = replace(
        PUBLISHED,
        num_rollouts=round(rollouts * PUBLISHED.num_rollouts),
        max_response_tokens=round(tokens * PUBLISHED.max_response_tokens),
    )
    return {
        arm: asynchronous_step(
            arm, setting, setting.lengths(tokens * mean), partial(model.span_s, k=k, tokens_per_iteration=length)
        )
        for arm, k, length in ((Arm.AUTOREGRESSIVE, 0, 1.0), (Arm.SPECULATIVE, 3, 2.77))
    }


def test_with_the_work_that_the_trainer_had_the_measured_steps_lie_between_fewer_and_shorter_responses() -> None:
    """Nothing of generation is fitted: the work is the trainer's, and the paper does not say how it became less."""
    fewer, shorter = fitted_asynchronous_steps(rollouts=WORK), fitted_asynchronous_steps(tokens=WORK)
    slow, fast = fewer[Arm.AUTOREGRESSIVE].step_s, shorter[Arm.AUTOREGRESSIVE].step_s
    assert fast < REFERENCE["autoregressive_step_s"] < slow
    assert slow == pytest.approx(90.5, abs=1.0)
    assert fast == pytest.approx(64.6, abs=1.0)
    for reading in (fewer, shorter):
        assert reading[Arm.SPECULATIVE].step_s == pytest.approx(REFERENCE["speculative_step_s"], rel=0.02)


def test_projections_stand_beside_the_papers_and_are_not_fitted_to_them() -> None:
    published = read_simulator_reference().projected
    best = {"k": 7, "acceptance_length": 8.0}  # of the paper's map, for a point without k
    drafts = [best if p.k is None else {"k": p.k, "acceptance_length": p.acceptance_length} for p in published]
    points = [
        project_request(ProjectionRequest(model=PUBLISHED_MODEL, num_gpus=each.num_gpus, lag=each.lag, **drafted))
        for each, drafted in zip(published, drafts, strict=True)
    ]
    for point, paper in zip(points, published, strict=True):
        for projected in (point.ideal, point.calibrated):
            assert projected.rollout_speedup.p10 <= projected.rollout_speedup.median <= projected.rollout_speedup.p90
            assert projected.rollout_speedup.median <= projected.acceptance_length  # a draft cannot do better
        assert point.ideal.rollout_speedup.median > point.calibrated.rollout_speedup.median
        assert point.calibrated.rollout_speedup.p90 < paper.rollout_speedup  # slower than the paper's
    steps = [point.calibrated.step_speedup for point in points]
    for step, paper in zip(steps[:2], published, strict=False):
        assert step.p10 < paper.step_speedup < step.p90
    assert steps[0].median == pytest.approx(published[0].step_speedup, rel=0.05)
    assert steps[2].p90 == pytest.approx(published[2].step_speedup, rel=0.05)
    # The cells are of the 8B: none is a projected point.
    assert {cell.group.name for cell in calibrate_paper().best.cells} == set(Workload)
