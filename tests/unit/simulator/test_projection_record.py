"""The record of the stage, and what its figures draw."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.catalog import Precision
from slipstream.recipe import load_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.run import LayoutRecord
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator.calibration import AcceptanceProfile, Ensemble
from slipstream.simulator.observed import CheckRecord, RunCalibration, calibrate_paper, calibrate_run, paper_learner
from slipstream.simulator.projection import (
    PUBLISHED_MODEL,
    ProjectionRecord,
    ProjectionRequest,
    project,
    project_request,
    project_run,
    project_speedup,
    projected_figures,
    run_setting,
    running_batches,
    speedup_map,
)
from slipstream.simulator.rollout import slowest_engine
from slipstream.simulator.settings import load_setting
from slipstream.stages.context import RunContext
from slipstream.stages.project_speedup import project_speedup as project_stage
from slipstream.stages.support import recipe_layout
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


# As the recorded demo computed: what `auto` stands for differs between machines.
DEMO = load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
DEMO_LAYOUT = recipe_layout(DEMO)
GOLDEN = Path(__file__).parents[1] / "golden" / "projection_2026_11_22.json"


def assert_close(found: Any, expected: Any) -> None:
    """Equal but for the last digits of numbers, which differ between builds of numpy."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-9)
    else:
        assert found == expected


def test_the_stage_writes_a_record_that_reads_back(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord, tmp_path: Path
) -> None:
    for arm in demo_arms(1.0):
        write_record(arm, tmp_path / arm.arm.value / "arm.json")
    write_record(demo_tuning, tmp_path / "tuning" / "tuning.json")
    context = RunContext(execution="demo", root=str(tmp_path), experiment="tiny", workload="rl_zero")
    directory = project_stage(
        context,
        DEMO,
        tuning=tmp_path / "tuning",
        arms=[tmp_path / "autoregressive", tmp_path / "speculative"],
    )
    assert directory == context.directory("project_speedup")
    record = read_record(ProjectionRecord, directory / "projection.json")
    golden = json.loads(GOLDEN.read_text())["run"]
    assert_close(json.loads((directory / "projection.json").read_text()), golden)
    assert [point.k for point in record.from_run] == [1, 2, 3, 5, 7]
    assert record.run_check is not None and record.run_check.k == 5
    assert record.run_calibration is not None
    assert {variant.regime for variant in record.run_calibration.variants} == {"smooth", "tile"}
    assert len(record.paper_calibration.cells) == 16
    assert len(record.from_paper) == 3


def test_a_request_gives_the_recorded_projection() -> None:
    request = ProjectionRequest(
        model="qwen3-235b-a22b", hardware="h100", num_gpus=2048, k=5, acceptance_length=3.5, lag=2
    )
    assert_close(json.loads(json.dumps(asdict(project_request(request)))), json.loads(GOLDEN.read_text())["request"])


def test_a_run_on_unknown_hardware_is_projected_from_the_published_figures_alone(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord
) -> None:
    record = project_speedup(demo_arms(1.0), demo_tuning, layout=None, execution="demo")
    assert (record.run_calibration, record.run_check, record.from_run) == (None, None, ())
    assert len(record.from_paper) == 3


def test_a_run_on_a_cluster_is_calibrated_as_one(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord
) -> None:
    layout = recipe_layout(load_recipe("qwen3_8b"))
    assert layout is not None
    assert (layout.model, layout.hardware, layout.num_gpus) == ("qwen3-8b", "gb200", 32)
    record = project_speedup(demo_arms(1.0), demo_tuning, layout=layout, execution="demo")
    assert record.run_calibration is not None
    assert {variant.regime for variant in record.run_calibration.variants} == {"captured", "smooth", "tile"}
    assert {point.hardware for point in record.from_run} == {"GB200"}


def test_a_layout_overrides_what_it_knows_of_the_machine() -> None:
    layout = LayoutRecord(
        model="mimo-7b",
        hardware="h200",
        precision="float8",
        learner_precision="float32",
        num_gpus=12,
        gpus_per_engine=3,
        max_response_tokens=777,
    )
    found, base = run_setting(layout), load_setting("paper-8b")
    assert (found.model, found.hardware, found.num_gpus, found.gpus_per_engine) == ("mimo-7b", "h200", 12, 3)
    assert (found.precision, found.learner_precision) == (Precision.FLOAT8, Precision.FLOAT32)
    assert found.max_response_tokens == 777
    assert (found.prompt_tokens, found.length_log_sd) == (base.prompt_tokens, base.length_log_sd)


def test_each_k_of_a_run_is_projected_at_its_profiles_length(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord
) -> None:
    assert DEMO_LAYOUT is not None
    run = calibrate_run(demo_arms(1.0), demo_tuning, run_setting(DEMO_LAYOUT))
    points = project_run(run, [2, 7])
    assert [(point.k, point.acceptance_length) for point in points] == [(k, run.profile.length(k)) for k in (2, 7)]
    assert all((point.num_gpus, point.lag, point.hardware) == (1, 0, "two x86-64 cores") for point in points)
    # The learner is as fast as it was measured, and only generation differs: 1.672 s of other stages.
    assert points[0].autoregressive_step_s.median > 1.672
    assert points[0].step_speedup.median < points[0].rollout_speedup.median
