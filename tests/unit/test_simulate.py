"""The simulate commands, the records of the projection stage, its workflow and its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from slipstream.projection import ProjectionRecord, ProjectionRequest, project_request, recipe_layout, write_projection
from slipstream.sim.ensemble import Ensemble
from slipstream.sim.paper import calibrate_paper
from slipstream.sim.projection import Scenario, project, speedup_map
from slipstream.sim.settings import load_setting
from slipstream.sim.step import Step

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.recipe import load_recipe
from slipstream.records import ArmRecord, TuningRecord, read_record, write_record

DEMO_LAYOUT = recipe_layout(load_recipe("tiny"))
ASKED = ["--model", "qwen3-235b-a22b", "--gpus", "2048", "--lag", "2", "--k", "5", "--acceptance-length", "4"]


@pytest.fixture(scope="module")
def ensemble() -> Ensemble:
    return calibrate_paper()


def test_project_prints_our_bands_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "project", *ASKED]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if "ideal stack" in line)
    assert heading.split("  ")[0] == "projected, p10 / median / p90"
    assert "paper, projected" in heading
    rollout = next(line for line in lines if line.startswith("rollout speedup"))
    assert rollout.endswith("3.50")
    assert next(line for line in lines if line.startswith("step speedup")).endswith("2.50")
    assert any(line.startswith("of the layout: max_response_tokens: assumed") for line in lines)


def test_an_acceptance_length_above_k_plus_1_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "project", *ASKED[:-1], "7"]) == 2
    assert "acceptance_length must lie in [1, k + 1 = 6], got 7.0" in capsys.readouterr().err


def test_more_engines_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"setting.num_gpus must be >= gpus_per_engine 8, got 4"):
        ProjectionRequest(model="qwen3-235b-a22b", num_gpus=4, k=3, acceptance_length=3.0).scenario()


def test_a_larger_model_gets_the_gpus_that_hold_it() -> None:
    h100 = ProjectionRequest(model="qwen3-30b-a3b", hardware="h100", num_gpus=64, k=3, acceptance_length=2.5)
    assert h100.scenario().setting.gpus_per_engine == 1  # 30.5 GB of FP8 weights, and as much again, in 80 GB
    dense = ProjectionRequest(model="mimo-7b", hardware="h100", num_gpus=64, k=3, acceptance_length=2.5)
    assert dense.scenario().setting.gpus_per_engine == 1


def test_calibrate_paper_prints_variants_and_their_free_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "calibrate", "--paper"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[2:5]] == ["captured", "tile", "smooth"]
    assert [line.split()[2] for line in out[2:5]] == ["11", "11", "10"]
    assert sum("rl_think" in line for line in out) == 8


def test_a_missing_run_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "calibrate", "--run", str(tmp_path)]) == 2
    assert "--run must be a report's directory or its run.json" in capsys.readouterr().err


def test_the_stage_writes_a_record_that_reads_back(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord, tmp_path: Path
) -> None:
    for arm in demo_arms(1.0):
        write_record(arm, tmp_path / arm.arm.value / "arm.json")
    write_record(demo_tuning, tmp_path / "tuning" / "tuning.json")
    path = write_projection(
        tmp_path,
        arms=[tmp_path / "autoregressive", tmp_path / "speculative"],
        tuning=tmp_path / "tuning",
        layout=DEMO_LAYOUT,
        execution="demo",
    )
    record = read_record(ProjectionRecord, path)
    assert [point.k for point in record.from_run] == [1, 2, 3, 5, 7]
    assert record.run_check is not None and record.run_check.k == 5
    assert record.run_calibration is not None
    assert {variant.regime for variant in record.run_calibration.variants} == {"smooth", "tile"}
    assert len(record.paper_calibration.cells) == 16
    assert len(record.from_paper) == 3


def test_the_workflow_projects_what_its_flat_inputs_say() -> None:
    from workflows.projection import projection

    path = projection(num_gpus=512, max_off_policy_steps=0, num_speculative_tokens=3, mean_acceptance_length=3.0)
    found = json.loads(Path(str(path)).read_text())
    asked = ProjectionRequest(model="qwen3-235b-a22b", num_gpus=512, k=3, acceptance_length=3.0)
    assert found["calibrated"]["step_speedup"]["median"] == project_request(asked).calibrated.step_speedup.median
    interface = projection.python_interface  # pyright: ignore[reportFunctionMemberAccess]
    assert all(type(default) in (str, int, float) for default in interface.default_inputs_as_kwargs.values())


def test_the_map_is_blank_where_no_draft_could_be_that_good(ensemble: Ensemble) -> None:
    scenario = Scenario(setting=load_setting("paper-8b"), mean_tokens=5000, k=3, acceptance_length=3.0)
    found = speedup_map(scenario, ensemble.best, ks=(1, 3), acceptance_lengths=(1.0, 2.0, 3.0, 4.0))
    assert np.isnan(found).tolist() == [[False, False, True, True], [False, False, False, False]]
    assert np.all(found[:, 0] <= 1.0)
    assert found[1, 3] == pytest.approx(4 * found[1, 0])


def test_draws_are_the_same_for_the_same_seed(ensemble: Ensemble) -> None:
    from slipstream.projection import paper_learner

    scenario = Scenario(setting=load_setting("paper-8b"), mean_tokens=5000, k=3, acceptance_length=3.0)
    one, same, other = (project(scenario, ensemble, paper_learner(), seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one.step_speedup != other.step_speedup
    assert one.autoregressive.step_s > one.speculative.step_s


def test_every_figure_is_an_svg_that_says_what_is_projected(ensemble: Ensemble) -> None:
    from slipstream.projected_figures import LagLine, SpeedupMap, running_batches
    from slipstream.projection import calibration_record

    from slipstream.report import simulator_figures as figures

    running = running_batches(load_setting("paper-8b"), ensemble, mean_tokens=5000.0, acceptance_lengths={3: 2.77})
    assert sum(running[1].span_s) < sum(running[0].span_s)
    base = Step(data_s=0.2, prepare_s=2.0, generation_s=100.0, logprob_s=18.0, train_s=31.0)
    surface = SpeedupMap(ks=(1, 3), acceptance_lengths=(1.0, 3.0), rollout_speedups=((0.9, None), (0.8, 1.6)))
    lines = [
        LagLine(lag=lag, num_gpus=(512, 1024), step_speedups=speedups)
        for lag, speedups in ((0, (1.7, 1.6)), (2, (1.4, 1.2)))
    ]
    drawn = {
        "Projected rollout speedup": figures.speedup_map(surface),
        "Projected step speedup": figures.speedup_over_gpus(lines),
        "Projected step, seconds": figures.stage_waterfall(base, base.with_generation(56.0)),
        "measured, s": figures.measured_against_simulated([calibration_record("paper", ensemble)]),
        "projected seconds": figures.running_batch(running),
    }
    for text, svg in drawn.items():
        assert svg.startswith("<svg")
        assert text in svg


def test_the_page_keeps_measured_and_projected_apart(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord
) -> None:
    from slipstream.projection import project_speedup

    from slipstream.report.projection_tables import check_table, own_table, published_table

    record = project_speedup(demo_arms(1.0), demo_tuning, layout=DEMO_LAYOUT, execution="demo")
    check = check_table(record)

    assert check is not None
    assert [group.heading for group in check.groups] == ["measured", "projected"]
    assert len(own_table(record).rows) == len(record.from_run)
    assert published_table(record).quoted == (False,) * 4 + (True,) * 2


def test_a_run_on_unknown_hardware_is_projected_from_the_published_figures_alone(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord
) -> None:
    from slipstream.projection import project_speedup

    record = project_speedup(demo_arms(1.0), demo_tuning, layout=None, execution="demo")
    assert (record.run_calibration, record.run_check, record.from_run) == (None, None, ())
    assert len(record.from_paper) == 3


def test_a_run_on_a_cluster_is_calibrated_as_one(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord
) -> None:
    from slipstream.projection import project_speedup

    layout = recipe_layout(load_recipe("qwen3_8b"))
    assert layout is not None
    assert (layout.model, layout.hardware, layout.num_gpus) == ("qwen3-8b", "gb200", 4)
    record = project_speedup(demo_arms(1.0), demo_tuning, layout=layout, execution="demo")
    assert record.run_calibration is not None
    assert {variant.regime for variant in record.run_calibration.variants} == {"captured", "smooth", "tile"}
    assert {point.hardware for point in record.from_run} == {"GB200"}


def test_an_unknown_simulator_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"simulator.model must be known, got 'gpt-9'.*known: qwen3-8b"):
        load_recipe("tiny", overrides={"simulator": {"model": "gpt-9"}})
