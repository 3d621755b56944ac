"""Projections of requests and draws by hand; the record of the stage, and what its figures draw."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.catalog import Precision
from slipstream.config import ConfigError
from slipstream.recipe import load_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.run import LayoutRecord
from slipstream.simulator.calibration import Draw, Ensemble
from slipstream.simulator.iteration import CostModel, Drafting
from slipstream.simulator.observed import calibrate_paper, paper_learner
from slipstream.simulator.projection import (
    PUBLISHED_MODEL,
    ProjectionRecord,
    ProjectionRequest,
    Scenario,
    assumed_layouts,
    project,
    project_ideal,
    project_request,
    project_speedup,
    run_setting,
)
from slipstream.simulator.rollout import slowest_engine
from slipstream.simulator.settings import IDEAL, load_setting
from slipstream.simulator.step_cost import Learner
from slipstream.stages.context import RunContext
from slipstream.stages.project_speedup import project_speedup as project_stage
from slipstream.stages.support import recipe_layout
from slipstream.statistics import Spread
from slipstream.types import StageTimes
from tests.unit.report.handmade import DEMO_TUNING, GOLDEN, demo_arms, demo_recipe


def asked(model: str, hardware: str) -> ProjectionRequest:
    return ProjectionRequest(model=model, hardware=hardware, num_gpus=64, k=3, acceptance_length=2.5)


@pytest.mark.parametrize(
    ("model", "hardware", "num_gpus"),
    [
        ("qwen3-235b-a22b", "h100", 8),  # 235 GB in FP8, and as much again: 470 GB over GPUs of 80
        ("qwen3-235b-a22b", "h200", 4),  # over GPUs of 141
        ("qwen3-235b-a22b", "gb200", 8),  # as the layout has it, though 4 would do
        ("qwen3-30b-a3b", "h100", 1),  # 30.5 GB in FP8
        ("qwen3-8b", "cpu-2core", 2),  # 16.4 GB in bfloat16 where the memory is 24
        ("qwen3-8b", "gb200", 2),  # as the layout has it
        ("qwen3-8b", "h100", 1),
    ],
)
def test_an_engine_gets_the_gpus_that_hold_the_model(model: str, hardware: str, num_gpus: int) -> None:
    assert asked(model, hardware).scenario().setting.gpus_per_engine == num_gpus


@pytest.mark.parametrize(("num_gpus", "fraction"), [(8, 0.75), (64, 0.1), (64, 0.999)])
def test_an_engine_or_a_split_that_has_too_few_gpus_is_refused(num_gpus: int, fraction: float) -> None:
    request = ProjectionRequest(
        model="qwen3-235b-a22b", num_gpus=num_gpus, k=3, acceptance_length=3.0, lag=1, generation_fraction=fraction
    )
    rule = rf"generation_fraction must leave, of {num_gpus} GPUs, an engine's 8 for generation and one for training"
    with pytest.raises(ConfigError, match=rule):
        request.scenario()
    assert replace(request, lag=0).scenario().generation_gpus == num_gpus  # both on all of them
    request = ProjectionRequest(model="qwen3-235b-a22b", num_gpus=4, k=3, acceptance_length=3.0)
    with pytest.raises(ConfigError, match=r"num_gpus must hold an engine of 8 GPUs, got 4"):
        request.scenario()


def test_what_a_request_leaves_out_is_the_layouts_and_the_papers_own_takes_gpus_and_lag() -> None:
    dense, sparse = asked("mimo-7b", "gb200").scenario(), asked("qwen3-30b-a3b", "gb200").scenario()
    assert (dense.setting.num_rollouts, dense.mean_tokens) == (2048, 5000)
    assert (sparse.setting.num_rollouts, sparse.mean_tokens) == (4096, 8000)
    assert (dense.lag, dense.generation_gpus, dense.training_gpus) == (0, 64, 64)  # colocated
    request = ProjectionRequest(model=PUBLISHED_MODEL, num_gpus=2048, k=5, acceptance_length=4.0, lag=2)
    found = request.scenario()
    assert found.setting == replace(load_setting("paper-235b"), num_gpus=2048)
    assert (found.setting.model, found.setting.num_gpus, found.lag) == ("qwen3-235b-a22b", 2048, 2)
    assert (found.k, found.acceptance_length, found.mean_tokens) == (5, 4.0, 8000)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_gpus", 0, "num_gpus must be >= 1, got 0"),
        ("gpus_per_engine", -1, "gpus_per_engine must be >= 0, got -1"),
        ("num_rollouts", -1, "num_rollouts must be >= 0, got -1"),
        ("mean_tokens", -1.0, "mean_tokens must be >= 0, got -1.0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(field: str, value: float, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        replace(asked("qwen3-8b", "gb200"), **{field: value})


def test_gpus_an_engine_and_the_mean_length_are_varied_up_and_down() -> None:
    scenario = ProjectionRequest(model=PUBLISHED_MODEL, num_gpus=512, k=3, acceptance_length=3.0).scenario()
    layouts = assumed_layouts(scenario)
    found = {(each.setting.gpus_per_engine, round(each.mean_tokens)) for each in layouts}
    assert found == {(g, m) for g in (4, 8, 16) for m in (5333, 8000, 12000)} - {(8, 8000)}
    assert all((each.k, each.acceptance_length, each.setting.num_gpus) == (3, 3.0, 512) for each in layouts)
    # Neither more GPUs an engine than there are, nor longer responses than are allowed.
    small = replace(scenario, setting=replace(scenario.setting, num_gpus=8), mean_tokens=30000.0)
    found = {(each.setting.gpus_per_engine, round(each.mean_tokens)) for each in assumed_layouts(small)}
    assert found == {(4, 20000), (4, 30000), (8, 20000)}


SCENARIO = Scenario(setting=load_setting("paper-8b"), mean_tokens=5000, k=3, acceptance_length=3.0)
STEP = StageTimes.in_sequence(data_s=1.0, prepare_s=2.0, generation_s=0.0, logprob_s=18.0, train_s=108.0)
LEARNER = Learner(measured=STEP, setting=SCENARIO.setting, mean_tokens=5000.0)
DRAW = Draw(parameters=IDEAL, autoregressive_error=1.0, speculative_error=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NotingEnsemble(Ensemble):
    """Gives one draw many times and notes what it was asked for."""

    draw: Draw
    asked: list[dict[str, Any]] = field(default_factory=list)

    def draws(self, *, k: int, batch: float, count: int, seed: int) -> tuple[Draw, ...]:
        self.asked.append({"k": k, "batch": batch, "count": count, "seed": seed})
        return (self.draw,) * count


def noting(draw: Draw) -> NotingEnsemble:
    return NotingEnsemble(members=calibrate_paper().members, draw=draw)


def seconds(scenario: Scenario, draw: Draw, k: int, length: float, drafting: Drafting = Drafting.EAGLE3) -> float:
    """Generation of the slowest engine, put together from the costs."""
    trace = slowest_engine(scenario.setting.lengths(scenario.mean_tokens), scenario.shape)
    model = CostModel(setting=scenario.setting, parameters=draw.parameters)
    return float(model.span_s(trace, k=k, tokens_per_iteration=length, drafting=drafting).sum())


def test_draws_are_asked_for_the_scenario_and_the_fullest_engine() -> None:
    seen = noting(DRAW)
    wider = replace(SCENARIO, setting=replace(SCENARIO.setting, gpus_per_engine=4))
    project(SCENARIO, seen, LEARNER, layouts=(wider,), num_draws=5, seed=7)
    assert seen.asked == [{"k": 3, "batch": 256.0, "count": 5, "seed": 7}]  # 2,048 rollouts over 8 engines


def test_a_request_names_the_proposer_of_its_speculative_arm_alone() -> None:
    request = replace(asked("qwen3-8b", "gb200"), drafting="dflash")
    scenario = replace(SCENARIO, drafting=request.scenario().drafting)
    draw = replace(DRAW, parameters=replace(IDEAL, draft_pass_s=1e-2))
    found = project(scenario, noting(draw), LEARNER, num_draws=1)
    trainer = LEARNER.stages(scenario.setting, num_gpus=32, mean_tokens=5000.0)
    base = trainer.with_generation(seconds(scenario, draw, 0, 1.0))
    assert found.autoregressive_step_s.median == pytest.approx(base.step_s)
    one_pass_s, three_passes_s = (seconds(scenario, draw, 3, 3.0, each) for each in (Drafting.DFLASH, Drafting.EAGLE3))
    assert found.speculative_step_s.median == pytest.approx(trainer.with_generation(one_pass_s).step_s)
    assert one_pass_s != three_passes_s


def test_a_synchronous_step_is_the_slowest_engine_and_the_learner() -> None:
    parameters = replace(IDEAL, host_s=1e-3, tile_factor=2.0)
    draw = Draw(parameters=parameters, autoregressive_error=2.0, speculative_error=0.5)
    scenario = replace(SCENARIO, k=7)
    found = project(scenario, noting(draw), LEARNER, num_draws=3)
    trainer = LEARNER.stages(scenario.setting, num_gpus=32, mean_tokens=5000.0)
    base_s, spec_s = 2.0 * seconds(scenario, draw, 0, 1.0), 0.5 * seconds(scenario, draw, 7, 3.0)
    base, spec = trainer.with_generation(base_s).step_s, trainer.with_generation(spec_s).step_s
    assert found.rollout_speedup.median == pytest.approx(base_s / spec_s)
    assert found.autoregressive_step_s.p10 == pytest.approx(base)
    assert found.speculative_step_s.p90 == pytest.approx(spec)
    assert found.step_speedup.median == pytest.approx(base / spec)


def test_a_packed_learner_sees_the_mean_response_of_the_scenario() -> None:
    packed = replace(SCENARIO, setting=replace(SCENARIO.setting, packed=True))
    for mean in (3800.0, 1800.0):
        scenario = replace(packed, mean_tokens=mean)
        trainer = LEARNER.stages(packed.setting, num_gpus=32, mean_tokens=mean)
        step_s = trainer.with_generation(seconds(scenario, DRAW, 0, 1.0)).step_s
        assert project_ideal(scenario, LEARNER).autoregressive_step_s.median == pytest.approx(step_s)


def test_draws_are_spread_over_the_layouts_and_the_same_for_the_same_seed() -> None:
    longer = replace(SCENARIO, mean_tokens=6000)
    found = project_ideal(SCENARIO, LEARNER, layouts=(longer,))
    alone = [project_ideal(each, LEARNER).speculative_step_s.median for each in (SCENARIO, longer)]
    assert found.speculative_step_s.median == pytest.approx(sum(alone) / 2)
    assert found.warnings == ("an ideal stack: no host, launch or draft overhead, all peaks reached",)
    one, same, other = (project(SCENARIO, calibrate_paper(), paper_learner(), seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one.step_speedup != other.step_speedup
    assert one.autoregressive_step_s.median > one.speculative_step_s.median


ASKED = ProjectionRequest(model="mimo-7b", hardware="h200", num_gpus=64, k=4, acceptance_length=3.0)


def test_the_workflow_projects_what_its_flat_inputs_say() -> None:
    from workflows.projection import projection

    lengths = {"num_speculative_tokens": 4, "mean_acceptance_length": 3.0, "mean_response_tokens": 1500.0}
    split = {"num_gpus": 64, "max_off_policy_steps": 2, "generation_fraction": 0.5}
    projected: Any = projection(model="mimo-7b", hardware="h200", **split, **lengths)
    asked = replace(ASKED, lag=2, generation_fraction=0.5, mean_tokens=1500.0)
    assert json.loads(Path(projected.projection).read_text()) == json.loads(json.dumps(asdict(project_request(asked))))
    interface = projection.python_interface  # pyright: ignore[reportFunctionMemberAccess]
    assert all(
        type(default) in (str, int, float, bool, type(None)) for default in interface.default_inputs_as_kwargs.values()
    )


PROJECTED = json.loads((GOLDEN / "projection_2026_11_22.json").read_text())


def assert_close(found: Any, expected: Any) -> None:
    """Equal but for the last digits of numbers, which differ between builds of numpy."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), [expected[key] for key in found]
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == (pytest.approx(expected, rel=1e-4, abs=1e-9) if isinstance(expected, float) else expected)


def test_the_stage_writes_a_record_that_reads_back(tmp_path: Path) -> None:
    for arm in demo_arms():
        write_record(arm, tmp_path / arm.arm.value / "arm.json")
    write_record(DEMO_TUNING, tmp_path / "tuning" / "tuning.json")
    context = RunContext(execution="demo", root=str(tmp_path))
    arms = [tmp_path / "autoregressive", tmp_path / "speculative"]
    directory = project_stage(context, demo_recipe(), tuning=tmp_path / "tuning", arms=arms)
    assert directory == context.directory("project_speedup")
    record = read_record(ProjectionRecord, directory / "projection.json")
    golden = PROJECTED["run"]
    assert_close(json.loads((directory / "projection.json").read_text()), golden)
    assert [point.k for point in record.from_run] == [1, 2, 3, 5, 7]
    assert record.run_check is not None and record.run_check.k == 5
    assert record.run_calibration is not None
    assert {variant.regime for variant in record.run_calibration.variants} == {"smooth", "tile"}


def test_a_request_gives_the_recorded_projection() -> None:
    large = {"model": "qwen3-235b-a22b", "hardware": "h100", "num_gpus": 2048}
    request = ProjectionRequest(**large, k=5, acceptance_length=3.5, lag=2)
    assert_close(json.loads(json.dumps(asdict(project_request(request)))), PROJECTED["request"])


def test_without_drafts_nothing_is_gained_and_what_a_request_names_is_not_assumed() -> None:
    found = project_request(replace(ASKED, k=0, acceptance_length=1.0, num_rollouts=32, mean_tokens=57.0))
    for point in (found.ideal, found.calibrated):
        assert point.step_speedup == point.rollout_speedup == Spread(median=1.0, p10=1.0, p90=1.0)
    names = {text.partition(":")[0] for text in found.assumptions}
    assert names == {"gpus_per_engine", "group_size", "prompt_tokens", "max_response_tokens", "length_log_sd"}
    assert len(project_request(ASKED).assumptions) == len(names) + 2


def test_a_run_on_a_cluster_is_calibrated_as_one_and_nothing_is_projected_on_unknown_hardware() -> None:
    layout = recipe_layout(load_recipe("qwen3_8b"))
    assert layout is not None
    assert (layout.model, layout.hardware, layout.num_gpus) == ("qwen3-8b", "gb200", 32)
    record = project_speedup(demo_arms(), DEMO_TUNING, layout=layout, execution="demo")
    assert record.run_calibration is not None
    assert {variant.regime for variant in record.run_calibration.variants} == {"captured", "smooth", "tile"}
    assert {point.hardware for point in record.from_run} == {"GB200"}
    record = project_speedup(demo_arms(), DEMO_TUNING, layout=None, execution="demo")
    assert (record.run_calibration, record.run_check, record.from_run) == (None, None, ())


def test_a_layout_overrides_what_it_knows_of_the_machine() -> None:
    machine: Any = {"model": "mimo-7b", "hardware": "h200", "precision": "float8", "learner_precision": "float32"}
    layout = LayoutRecord(**machine, num_gpus=12, gpus_per_engine=3, max_response_tokens=777)
    found, base = run_setting(layout), load_setting("paper-8b")
    assert (found.model, found.hardware, found.num_gpus, found.gpus_per_engine) == ("mimo-7b", "h200", 12, 3)
    assert (found.precision, found.learner_precision) == (Precision.FLOAT8, Precision.FLOAT32)
    assert found.max_response_tokens == 777
    assert (found.prompt_tokens, found.length_log_sd) == (base.prompt_tokens, base.length_log_sd)
