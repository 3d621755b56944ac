"""Projections: what each argument does to the arms, and the map of draft lengths."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from slipstream.simulator.cost.iteration import CostModel
from slipstream.simulator.cost.learner_step import Learner
from slipstream.simulator.cost.parameters import IDEAL
from slipstream.simulator.cost.rollout import slowest_engine
from slipstream.simulator.cost.settings import load_setting
from slipstream.simulator.fit.ensemble import Draw, Ensemble
from slipstream.simulator.fit.paper import calibrate_paper, paper_learner
from slipstream.simulator.project.projection import best_of_map, project, project_ideal, speedup_map
from slipstream.simulator.project.scenarios import Scenario
from slipstream.types import StageTimes

SCENARIO = Scenario(setting=load_setting("paper-8b"), mean_tokens=5000, k=3, acceptance_length=3.0)
STEP = StageTimes.in_sequence(data_s=1.0, prepare_s=2.0, generation_s=0.0, logprob_s=18.0, train_s=108.0)
LEARNER = Learner(measured=STEP, setting=SCENARIO.setting, mean_tokens=5000.0)
DRAW = Draw(parameters=IDEAL, autoregressive_error=1.0, speculative_error=1.0)


@pytest.fixture
def ensemble() -> Ensemble:
    return calibrate_paper()


@dataclass(frozen=True, kw_only=True, slots=True)
class NotingEnsemble(Ensemble):
    """Gives one draw many times and notes what it was asked for."""

    draw: Draw
    asked: list[dict[str, Any]] = field(default_factory=list)

    def draws(self, *, k: int, batch: float, count: int, seed: int) -> tuple[Draw, ...]:
        self.asked.append({"k": k, "batch": batch, "count": count, "seed": seed})
        return (self.draw,) * count


def seconds(scenario: Scenario, draw: Draw, k: int, length: float) -> float:
    """Generation of the slowest engine, put together from the costs."""
    trace = slowest_engine(scenario.setting.lengths(scenario.mean_tokens), scenario.shape)
    model = CostModel(setting=scenario.setting, parameters=draw.parameters)
    return float(model.span_s(trace, k=k, tokens_per_iteration=length).sum())


def test_draws_are_asked_for_the_scenario_and_the_fullest_engine(ensemble: Ensemble) -> None:
    noting = NotingEnsemble(members=ensemble.members, draw=DRAW)
    wider = replace(SCENARIO, setting=replace(SCENARIO.setting, gpus_per_engine=4))
    project(SCENARIO, noting, LEARNER, layouts=(wider,), num_draws=5, seed=7)
    assert noting.asked == [{"k": 3, "batch": 256.0, "count": 5, "seed": 7}]  # 2,048 rollouts over 8 engines


def test_a_synchronous_step_is_the_slowest_engine_and_the_learner(ensemble: Ensemble) -> None:
    parameters = replace(IDEAL, host_s=1e-3, tile_factor=2.0)
    draw = Draw(parameters=parameters, autoregressive_error=2.0, speculative_error=0.5)
    scenario = replace(SCENARIO, k=7)
    found = project(scenario, NotingEnsemble(members=ensemble.members, draw=draw), LEARNER, num_draws=3)
    trainer = LEARNER.stages(scenario.setting, num_gpus=32, mean_tokens=5000.0)
    base_s, spec_s = 2.0 * seconds(scenario, draw, 0, 1.0), 0.5 * seconds(scenario, draw, 7, 3.0)
    assert found.autoregressive == trainer.with_generation(base_s)
    assert found.speculative == trainer.with_generation(spec_s)
    assert found.point.rollout_speedup.median == pytest.approx(base_s / spec_s)
    assert found.point.autoregressive_step_s.p10 == pytest.approx(found.autoregressive.step_s)
    assert found.point.speculative_step_s.p90 == pytest.approx(found.speculative.step_s)
    assert found.point.step_speedup.median == pytest.approx(found.autoregressive.step_s / found.speculative.step_s)


def test_with_a_lag_the_gpus_are_split(ensemble: Ensemble) -> None:
    split = replace(SCENARIO, lag=1, generation_fraction=0.5)
    found = project_ideal(split, LEARNER)
    trainer = LEARNER.stages(split.setting, num_gpus=16, mean_tokens=5000.0)
    assert found.autoregressive.train_s == trainer.train_s
    assert found.autoregressive.step_s >= trainer.other_s
    # A longer lag lets the engines sustain more; it changes nothing of the trainer.
    longer = project_ideal(replace(split, lag=4), LEARNER)
    assert longer.speculative.train_s == trainer.train_s
    assert longer.point.autoregressive_step_s.median <= found.point.autoregressive_step_s.median


def test_a_packed_learner_sees_the_mean_response_of_the_scenario(ensemble: Ensemble) -> None:
    packed = replace(SCENARIO, setting=replace(SCENARIO.setting, packed=True))
    trainers = [project_ideal(replace(packed, mean_tokens=mean), LEARNER).autoregressive for mean in (3800.0, 1800.0)]
    assert trainers[0].train_s == pytest.approx(2.0 * trainers[1].train_s)  # 4,000 and 2,000 with the prompt


def test_draws_are_spread_over_the_layouts() -> None:
    longer = replace(SCENARIO, mean_tokens=6000)
    found = project_ideal(SCENARIO, LEARNER, layouts=(longer,))
    alone = [project_ideal(each, LEARNER).point.speculative_step_s.median for each in (SCENARIO, longer)]
    assert found.point.speculative_step_s.median == pytest.approx(sum(alone) / 2)
    assert found.point.warnings == ("an ideal stack: no host, launch or draft overhead, all peaks reached",)


def test_a_point_says_what_was_asked(ensemble: Ensemble) -> None:
    scenario = replace(SCENARIO, k=9, acceptance_length=4.5, lag=2)
    point = project(scenario, ensemble, LEARNER, num_draws=2).point
    assert (point.model, point.hardware, point.num_gpus) == ("Qwen3-8B", "GB200", 32)
    assert (point.lag, point.k, point.acceptance_length) == (2, 9, 4.5)
    assert point.warnings[0] == "k = 9 was not measured (k = 3 to 7): the band is wider"


def test_the_map_is_of_the_scenarios_own_layout(ensemble: Ensemble) -> None:
    model = ensemble.best.model(SCENARIO.setting)
    draw = replace(DRAW, parameters=model.parameters)
    for scenario in (SCENARIO, replace(SCENARIO, lag=1, generation_fraction=0.25, mean_tokens=2000)):
        found = speedup_map(scenario, ensemble.best, ks=(3,), acceptance_lengths=(2.5,))
        assert found[0, 0] == pytest.approx(seconds(scenario, draw, 0, 1.0) / seconds(scenario, draw, 3, 2.5))


def test_the_best_of_the_map_is_the_largest_entry(ensemble: Ensemble) -> None:
    best = best_of_map(SCENARIO, ensemble.best)
    found = speedup_map(SCENARIO, ensemble.best, ks=range(1, 8), acceptance_lengths=range(1, 9))
    assert found[best.k - 1, int(best.acceptance_length) - 1] == np.nanmax(found)


def test_the_map_is_blank_where_no_draft_could_be_that_good(ensemble: Ensemble) -> None:
    found = speedup_map(SCENARIO, ensemble.best, ks=(1, 3), acceptance_lengths=(1.0, 2.0, 3.0, 4.0))
    assert np.isnan(found).tolist() == [[False, False, True, True], [False, False, False, False]]
    assert np.all(found[:, 0] <= 1.0)
    assert found[1, 3] == pytest.approx(4 * found[1, 0])


def test_draws_are_the_same_for_the_same_seed(ensemble: Ensemble) -> None:
    one, same, other = (project(SCENARIO, ensemble, paper_learner(), seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one.point.step_speedup != other.point.step_speedup
    assert one.autoregressive.step_s > one.speculative.step_s
