"""The simulator against the published measurements: fits, held-out predictions, and what is never fitted.

Measured on 2026-11-21, and no test here may be loosened without saying so in docs/simulator.md: of the structural
variants `captured` and `tile` fit every cell within 8 %, and `smooth` misses both limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from slipstream.simulator.cost.asynchronous import Overlap, overlap
from slipstream.simulator.cost.iteration import Drafting
from slipstream.simulator.cost.parameters import Regime
from slipstream.simulator.cost.settings import load_setting
from slipstream.simulator.cost.step import learner_stages
from slipstream.simulator.fit.cells import Cell
from slipstream.simulator.fit.ensemble import Ensemble
from slipstream.simulator.fit.paper import (
    WORKLOADS,
    calibrate_paper,
    mean_paper_step,
    paper_cells,
    paper_learner,
    paper_steps,
    read_simulator_reference,
)
from slipstream.simulator.project.published import project_published
from slipstream.types import Arm, StageTimes

SETTING = load_setting("paper-8b")


@cache
def fitted() -> Ensemble:
    return calibrate_paper()


def from_one_workload(workload: str) -> tuple[list[Cell], list[Cell]]:
    """All of one workload and the other's baseline; the other's speculative cells."""
    cells = paper_cells()
    known = [cell for cell in cells if cell.group == workload or cell.k == 0]
    return known, [cell for cell in cells if cell not in known]


def errors(cells: Sequence[Cell], predicted_s: np.ndarray) -> np.ndarray:
    return np.abs(predicted_s / np.array([cell.generation_s for cell in cells]) - 1.0)


def test_the_cells_are_the_papers() -> None:
    cells = paper_cells()
    assert len(cells) == 16
    assert {cell.group for cell in cells} == set(WORKLOADS)
    seconds = {cell.label: cell.generation_s for cell in cells}
    assert seconds["rl_zero, autoregressive"] == 100.0
    assert seconds["rl_think, k = 3"] == 87.0  # published in seconds
    assert seconds["rl_think, k = 5"] == pytest.approx(133.6 / 0.84)  # from the published speedup
    assert seconds["rl_think, n-gram"] == 262.9
    assert sum(cell.drafting is Drafting.NGRAM for cell in cells) == 2


def test_the_data_choose_a_variant_that_fits_all_sixteen_cells() -> None:
    best = fitted().best
    assert best.variant.regime is Regime.CAPTURED
    assert best.rms_error <= 0.05
    assert best.max_error <= 0.08


def test_so_does_the_weighed_ensemble() -> None:
    found = errors(fitted().best.cells, fitted().predict_s(fitted().best.cells))
    assert np.sqrt(np.mean(found**2)) <= 0.05
    assert found.max() <= 0.08


def test_the_tile_variant_fits_too() -> None:
    tile = next(member for member in fitted().members if member.variant.regime is Regime.TILE)
    assert tile.rms_error <= 0.05
    assert tile.max_error <= 0.08


def test_no_smooth_cost_fits() -> None:
    smooth = next(member for member in fitted().members if member.variant.regime is Regime.SMOOTH)
    assert smooth.rms_error > 0.10
    assert fitted().weights[fitted().members.index(smooth)] < 1e-6


def test_free_parameters_are_fewer_than_cells() -> None:
    for member in fitted().members:
        assert len(member.variant.free) == (10 if member.variant.regime is Regime.SMOOTH else 11)
        assert 0 < member.effective_parameters < len(member.variant.free) < len(member.cells)


def test_the_four_step_totals_are_met() -> None:
    cells = fitted().best.cells
    seconds = dict(zip([cell.label for cell in cells], fitted().predict_s(cells).tolist(), strict=True))
    for (workload, arm), measured in paper_steps().items():
        generation_s = seconds[f"{workload}, {'k = 3' if arm is Arm.SPECULATIVE else 'autoregressive'}"]
        assert mean_paper_step().with_generation(generation_s).step_s == pytest.approx(measured.step_s, rel=0.05)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_other_workload_is_predicted_from_its_baseline(workload: str) -> None:
    known, held_out = from_one_workload(workload)
    assert len(held_out) == 7
    assert errors(held_out, calibrate_paper(known).predict_s(held_out)).max() <= 0.13


def test_seven_draft_tokens_are_predicted_from_three_and_five() -> None:
    known = [cell for cell in paper_cells() if cell.k < 7]
    held_out = [cell for cell in paper_cells() if cell.k == 7]
    assert errors(held_out, calibrate_paper(known).predict_s(held_out)).max() <= 0.10


def test_a_fit_on_three_draft_tokens_alone_warns_and_widens() -> None:
    only_three = calibrate_paper([cell for cell in paper_cells() if cell.k in (0, 3)])
    assert only_three.best.validity.warnings(k=5, batch=64) == (
        "k = 5 was not measured (only k = 3): the band is wider",
    )
    assert fitted().best.validity.warnings(k=5, batch=64) == ()
    seven = [cell for cell in paper_cells() if cell.k == 7]
    narrow, wide = fitted().bands_s(seven), only_three.bands_s(seven)
    assert all(w.p90 / w.p10 > 1.2 * n.p90 / n.p10 for n, w in zip(narrow, wide, strict=True))


def test_a_batch_beyond_the_measured_ones_warns_and_widens() -> None:
    assert "a running batch of 512 was not measured" in fitted().best.validity.warnings(k=3, batch=512)[0]
    assert fitted().best.validity.extra_log_sd(k=3, batch=512) > fitted().best.validity.extra_log_sd(k=3, batch=128)


def test_bands_cover_most_held_out_cells() -> None:
    inside = []
    splits = [from_one_workload(workload) for workload in WORKLOADS]
    splits.append(([c for c in paper_cells() if c.k < 7], [c for c in paper_cells() if c.k == 7]))
    for known, held_out in splits:
        bands = calibrate_paper(known).bands_s(held_out)
        inside += [band.p10 <= cell.generation_s <= band.p90 for band, cell in zip(bands, held_out, strict=True)]
        assert all(band.p90 < 2 * band.p10 for band in bands)  # a band that says nothing would cover everything
    assert len(inside) == 16
    assert np.mean(inside) >= 0.8


def test_asynchronous_steps_are_predicted_from_the_trainers_side() -> None:
    """The trainer's time on 16 GPUs is an input (75.0 - 10.4 s measured); generation is predicted on 48.

    A limit: both come out too slow. All measured cells run 128 responses an engine, which does not tell an iteration's
    fixed cost from what each response adds, and 48 GPUs run 85.
    """
    reference = read_simulator_reference().asynchronous
    trainer_s = reference["autoregressive_step_s"] - reference["autoregressive_exposed_s"]
    trainer = StageTimes.in_sequence(data_s=0.0, prepare_s=0.0, generation_s=0.0, logprob_s=0.0, train_s=trainer_s)
    best = fitted().best
    lengths = SETTING.lengths(best.variant.means(best.log_values)["rl_think"])

    def arm(k: int, length: float) -> Overlap:
        return overlap(
            trainer,
            lengths=lengths,
            shape=SETTING.shape(int(reference["generation_gpus"])),
            lag=int(reference["lag"]),
            seconds=lambda trace: best.model(SETTING).span_s(trace, k=k, tokens_per_iteration=length),
        )

    base, spec = arm(0, 1.0), arm(3, 2.77)
    assert 1.0 < base.step.step_s / reference["autoregressive_step_s"] < 1.26
    assert 1.0 < spec.step.step_s / reference["speculative_step_s"] < 1.15
    assert base.step.generation_s > 5 * spec.step.generation_s > 0


def test_the_trainers_side_does_not_follow_from_the_colocated_run() -> None:
    """A limit: flops over GPUs give 100 s on 16 GPUs, the paper measured 60 to 65. Nothing was bent to meet it."""
    scaled = learner_stages(paper_learner(), SETTING, num_gpus=16)
    assert scaled.other_s == pytest.approx(99.9, abs=0.5)


def test_projections_stand_beside_the_papers_and_are_not_fitted_to_them() -> None:
    points = project_published(fitted())
    published = [(point.published_rollout_speedup, point.published_step_speedup) for point in points]
    assert published == [(2.72, 1.70), (6.49, 2.22), (3.5, 2.5)]
    for point in points:
        for projected in (point.ideal, point.calibrated):
            assert projected.rollout_speedup.p10 <= projected.rollout_speedup.median <= projected.rollout_speedup.p90
            assert projected.rollout_speedup.median <= projected.acceptance_length  # a draft cannot do better
        assert point.ideal.rollout_speedup.median > point.calibrated.rollout_speedup.median
    assert points[1].calibrated.k == points[1].ideal.k == 7  # the best point of the map is its corner
    assert {cell.group for cell in fitted().best.cells} == set(WORKLOADS)  # of the 8B: none is a projected point
