"""The simulate commands: what they print, which runs they read and what they refuse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.recipe import load_recipe
from slipstream.records import (
    ArmRecord,
    CertificateRecord,
    DraftRecord,
    GreedyRecord,
    PolicyRecord,
    RunRecord,
    TuningRecord,
    write_record,
)
from slipstream.simulator.cli import add_parser
from slipstream.stages.support import recipe_layout

ASKED = ["--model", "qwen3-235b-a22b", "--gpus", "2048", "--lag", "2", "--k", "5", "--acceptance-length", "4"]


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


def test_every_option_reaches_the_projection(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--model", "mimo-7b", "--hardware", "h200", "--gpus", "40", "--gpus-per-engine", "4"]
    rollouts = ["--rollouts", "96", "--mean-tokens", "1234", "--lag", "3", "--generation-fraction", "0.6"]
    assert main(["simulate", "project", *layout, *rollouts, "--k", "4", "--acceptance-length", "2.25"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "MiMo-7B, 40 x H200 SXM, bfloat16",
        "96 rollouts of 1234 tokens on average, 4 GPUs an engine",
        "k = 4, acceptance length 2.25, lag 3, 24 GPUs generate",
    ]


def test_an_acceptance_length_above_k_plus_1_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "project", *ASKED[:-1], "7"]) == 2
    assert "acceptance_length must lie in [1, k + 1 = 6], got 7.0" in capsys.readouterr().err


def test_calibrate_paper_prints_variants_and_their_free_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "calibrate", "--paper"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[2:5]] == ["captured", "tile", "smooth"]
    assert [line.split()[2] for line in out[2:5]] == ["11", "11", "10"]
    assert sum("rl_think" in line for line in out) == 8


@pytest.fixture
def run(demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord) -> RunRecord:
    return RunRecord(
        recipe="tiny",
        workload="rl_zero",
        execution="recorded",
        tracking_uri="sqlite:///none.db",
        versions={},
        machine="two cores",
        policy=PolicyRecord(
            model="tiny",
            architecture="Qwen3",
            num_parameters=1,
            vocab_size=1,
            max_position_embeddings=1,
            eos_token_id=0,
            pretrain_steps=0,
            pretrain_loss=0.0,
            pretrain_losses=(),
            elapsed_s=0.0,
        ),
        data=(),
        draft=DraftRecord(
            method="eagle3",
            init="in_domain",
            num_parameters=1,
            num_training_tokens=1,
            num_steps=1,
            losses=(),
            heldout_rate_by_position=(),
            heldout_mean_acceptance_length=1.0,
            elapsed_s=0.0,
        ),
        tuning=demo_tuning,
        arms=demo_arms(1.0),
        evaluations=(),
        certificate=CertificateRecord(
            verdict="lossless",
            reason="",
            claim="",
            family_level=0.01,
            power=0.9,
            max_detectable_bias=0.1,
            num_speculative_tokens=5,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=0,
            num_tokens=1,
            num_baseline_tokens=1,
            findings=(),
            control=(),
            detectable=(),
            greedy=GreedyRecord(num_responses=0, num_equal=0, num_near_ties=0, largest_gap_nats=0.0, near_tie_nats=0.0),
            pit_histograms={},
            policy_fingerprint="",
            draft_fingerprint="",
            versions={},
            elapsed_s=0.0,
        ),
        layout=recipe_layout(
            load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
        ),
    )


def test_a_run_is_read_from_its_own_directory_its_reports_or_the_file(
    run: RunRecord, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = write_record(run, tmp_path / "report_speedup" / "run.json")
    printed = []
    for place in (tmp_path, written.parent, written):
        assert main(["simulate", "calibrate", "--run", str(place)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert printed[0].startswith("calibrated on: recorded")
    assert "speculative arm, k = 5" in printed[0]
    assert "projected on this machine" in printed[0]


def test_a_run_is_fetched_by_its_name_from_the_server_that_is_given(run: RunRecord) -> None:
    asked = []

    def fetch(execution: str, uri: str) -> RunRecord:
        asked.append((execution, uri))
        return replace(run, layout=None)

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(), fetch_run=fetch)
    options = parser.parse_args(["simulate", "calibrate", "--mlflow-run", "demo-1", "--uri", "sqlite:///x.db"])
    with pytest.raises(ConfigError, match=r"must be of a recipe that names its simulator\.model"):
        options.run(options)
    assert asked == [("demo-1", "sqlite:///x.db")]


@pytest.mark.parametrize("name", ["", "absent"])
def test_a_directory_without_a_report_is_refused_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["simulate", "calibrate", "--run", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert "--run must be a run's directory, its report's, or the report's run.json, got " in error
    assert error.endswith("; give one whose report is written\n")
    assert error.count("\n") == 1


def test_an_unknown_simulator_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"simulator.model must be known, got 'gpt-9'.*known: qwen3-8b"):
        load_recipe("tiny", overrides={"simulator": {"model": "gpt-9"}})
