"""What the figures draw is what the projections say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.simulator.cost.rollout import slowest_engine
from slipstream.simulator.fit.ensemble import Ensemble
from slipstream.simulator.fit.paper import calibrate_paper, paper_learner
from slipstream.simulator.project.figures import projected_figures, running_batches
from slipstream.simulator.project.projection import project, speedup_map
from slipstream.simulator.project.scenarios import published_scenario

SCENARIO = published_scenario(k=3, acceptance_length=3.0)


@pytest.fixture
def ensemble() -> Ensemble:
    return calibrate_paper()


def test_figures_draw_the_scenario_that_they_name(ensemble: Ensemble) -> None:
    learner = paper_learner()
    running = running_batches(SCENARIO.setting, ensemble, mean_tokens=8000.0, acceptance_lengths={3: 2.5})
    drawn = projected_figures(SCENARIO, ensemble, learner, running=running)
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
    base, drafted = running_batches(setting, ensemble, mean_tokens=6000.0, acceptance_lengths={3: 2.5})
    trace = slowest_engine(setting.lengths(6000.0), setting.shape())
    assert (base.label, drafted.label) == ("autoregressive", "k = 3, acceptance length 2.50")
    assert base.batch == drafted.batch == tuple(trace.batch_S.tolist())
    model = ensemble.best.model(setting)
    assert list(base.span_s) == model.span_s(trace, k=0, tokens_per_iteration=1.0).tolist()
    assert list(drafted.span_s) == model.span_s(trace, k=3, tokens_per_iteration=2.5).tolist()
