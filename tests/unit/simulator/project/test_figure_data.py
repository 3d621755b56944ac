"""What the figures draw is what the projections say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.simulator.cost.rollout import slowest_engine
from slipstream.simulator.fit.acceptance_by_position import AcceptanceProfile
from slipstream.simulator.fit.ensemble import Ensemble
from slipstream.simulator.fit.observed import CheckRecord, RunCalibration
from slipstream.simulator.fit.paper import calibrate_paper, paper_learner
from slipstream.simulator.project.figure_data import projected_figures, running_batches
from slipstream.simulator.project.projection import project, speedup_map
from slipstream.simulator.project.scenarios import PUBLISHED_MODEL, ProjectionRequest
from slipstream.types import StageTimes

SCENARIO = ProjectionRequest(model=PUBLISHED_MODEL, num_gpus=512, k=3, acceptance_length=3.0).scenario()


@pytest.fixture
def ensemble() -> Ensemble:
    return calibrate_paper()


def run(ensemble: Ensemble) -> RunCalibration:
    """On the layout of the scenario, with a speculative arm of k = 3."""
    times = StageTimes.in_sequence(data_s=0.0, prepare_s=0.0, generation_s=1.0, logprob_s=0.0, train_s=1.0)
    check = CheckRecord(
        k=3, acceptance_length=2.5, measured_s=1.0, predicted_s=1.0, predicted_p10_s=1.0, predicted_p90_s=1.0
    )
    profile = AcceptanceProfile(level=0.0, fall=0.0)
    return RunCalibration(
        setting=SCENARIO.setting, mean_tokens=6000.0, ensemble=ensemble, profile=profile, step=times, check=check
    )


def test_figures_draw_the_scenario_that_they_name(ensemble: Ensemble) -> None:
    learner = paper_learner()
    running = running_batches(run(ensemble))
    drawn = projected_figures(running=running)
    assert (drawn.setting, drawn.k, drawn.acceptance_length) == ("Qwen3-235B-A22B, 512 GB200", 3, 3.0)
    middle = project(SCENARIO, ensemble, learner)
    assert (drawn.autoregressive, drawn.speculative) == (middle.autoregressive, middle.speculative)
    assert [line.lag for line in drawn.lag_lines] == [0, 1, 2, 4]
    for line in drawn.lag_lines:
        for gpus, speedup in zip(line.num_gpus, line.step_speedups, strict=True):
            at = replace(SCENARIO, setting=replace(SCENARIO.setting, num_gpus=gpus), lag=line.lag)
            assert speedup == project(at, ensemble, learner, num_draws=24).point.step_speedup.median
    row = drawn.speedup_map.rollout_speedups[2]  # k = 3
    expected = speedup_map(SCENARIO, ensemble.best, ks=(3,), acceptance_lengths=(1.0, 4.0))[0]
    assert (row[0], row[12], row[13]) == (expected[0], expected[1], None)  # 1, 4 and 4.25 tokens
    assert drawn.running == running


def test_the_running_batch_is_the_slowest_engines(ensemble: Ensemble) -> None:
    setting = SCENARIO.setting
    base, drafted = running_batches(run(ensemble))
    assert running_batches(replace(run(ensemble), check=None)) == (base,)
    trace = slowest_engine(setting.lengths(6000.0), setting.shape())
    assert (base.label, drafted.label) == ("autoregressive", "k = 3, acceptance length 2.50")
    assert base.batch == drafted.batch == tuple(trace.batch_S.tolist())
    model = ensemble.best.model(setting)
    assert list(base.span_s) == model.span_s(trace, k=0, tokens_per_iteration=1.0).tolist()
    assert list(drafted.span_s) == model.span_s(trace, k=3, tokens_per_iteration=2.5).tolist()
