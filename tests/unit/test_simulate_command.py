"""The simulate commands: what they print, which runs they read and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream import simulate_command
from slipstream.cli import main
from slipstream.records.files import write_record
from slipstream.records.run import RunRecord
from slipstream.types import LoopMode

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


def test_another_proposer_is_not_shown_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "project", *ASKED, "--drafting", "dflash"]) == 0
    assert "paper, projected" not in capsys.readouterr().out


def test_every_option_reaches_the_projection(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--model", "mimo-7b", "--hardware", "h200", "--gpus", "40", "--gpus-per-engine", "4"]
    rollouts = ["--rollouts", "96", "--mean-tokens", "1234", "--lag", "3", "--generation-fraction", "0.6"]
    drafts = ["--k", "4", "--acceptance-length", "2.25", "--drafting", "dflash"]
    assert main(["simulate", "project", *layout, *rollouts, *drafts]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "MiMo-7B, 40 x H200 SXM, bfloat16",
        "96 rollouts of 1234 tokens on average, 4 GPUs an engine",
        "dflash, k = 4, acceptance length 2.25, lag 3, 24 GPUs generate",
        "the learner pads each response to 8192 tokens",
    ]


def test_calibrate_paper_prints_variants_and_their_free_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "calibrate", "--paper"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[3:6]] == ["captured", "tile", "smooth"]
    assert [line.split()[2] for line in out[3:6]] == ["11", "11", "10"]
    assert sum("rl_think" in line for line in out) == 8


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


def test_a_run_is_fetched_by_its_name_from_the_server_that_is_given(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def fetch(execution: str, uri: str) -> RunRecord:
        asked.append((execution, uri))
        return replace(run, layout=None)

    monkeypatch.setattr(simulate_command, "_fetched_run", fetch)
    assert main(["simulate", "calibrate", "--mlflow-run", "demo-1", "--uri", "sqlite:///x.db"]) == 2
    assert "must be of a recipe that names its simulator.model" in capsys.readouterr().err
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


def test_balance_marks_the_best_split_and_says_what_binds_it(
    run: RunRecord, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = write_record(run, tmp_path / "run.json")
    assert main(["simulate", "balance", "--run", str(written), "--mode", "one_step_off", "--lag", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("synchronous step, measured: autoregressive ")
    assert lines[1] == "asynchronous step, measured: none"
    assert lines[2] == "projected, one_step_off, lag 2"
    assert lines[4].startswith("cores that generate + train  autoregressive, projected: step s  exposed s  bound by")
    assert lines[6].startswith("1 + 1  ")
    assert lines[6].count(", fastest") == 2


def test_balance_takes_mode_and_lag_of_the_runs_own_loop(
    run: RunRecord, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = replace(run.arms[0], loop=LoopMode.ONE_STEP_OFF.value, max_off_policy_steps=3)
    for asynchronous, loop in (((own,), "one_step_off, lag 3"), ((), "in_flight, lag 1")):
        written = write_record(replace(run, asynchronous=asynchronous), tmp_path / "run.json")
        assert main(["simulate", "balance", "--run", str(written)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].startswith(f"asynchronous step, measured: {'autoregressive ' if asynchronous else 'none'}")
        assert lines[2] == f"projected, {loop}"


def test_figures_that_cannot_be_are_refused(run: RunRecord, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = write_record(run, tmp_path / "run.json")
    for arguments, message in (
        (["balance", "--run", str(written), "--lag", "0"], "--lag must be >= 1, got 0"),
        (["project", *ASKED[:-1], "7"], "acceptance_length must lie in [1, k + 1 = 6], got 7.0"),
    ):
        assert main(["simulate", *arguments]) == 2
        assert message in capsys.readouterr().err
