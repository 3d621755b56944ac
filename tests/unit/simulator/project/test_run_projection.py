"""What is projected from a run, and the record that the stage writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slipstream.recipe import load_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.run import LayoutRecord
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator.cost.hardware import Precision
from slipstream.simulator.cost.settings import load_setting
from slipstream.simulator.fit.observed import calibrate_run
from slipstream.simulator.project.published import project_request
from slipstream.simulator.project.run_projection import ProjectionRecord, project_run, project_speedup, run_setting
from slipstream.simulator.project.scenarios import ProjectionRequest
from slipstream.stages.context import RunContext
from slipstream.stages.project_speedup import project_speedup as project_stage
from slipstream.stages.support import recipe_layout

# As the recorded demo computed: what `auto` stands for differs between machines.
DEMO = load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
DEMO_LAYOUT = recipe_layout(DEMO)
GOLDEN = Path(__file__).parents[2] / "golden" / "projection_2026_11_22.json"


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
