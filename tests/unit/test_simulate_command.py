"""The simulate commands: what they print, which runs they read and what they refuse."""

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream import simulate_command
from slipstream.records.files import write_record
from slipstream.records.run import RunRecord
from slipstream.types import LoopMode
from tests.unit.conftest import Command
from tests.unit.report.handmade import demo_run

ASKED = ["--model", "qwen3-235b-a22b", "--gpus", "2048", "--lag", "2", "--k", "5", "--acceptance-length", "4"]


def test_project_prints_our_bands_beside_the_papers_of_the_same_proposer(command: Command) -> None:
    lines = command("simulate", "project", *ASKED).splitlines()
    heading = next(line for line in lines if "ideal stack" in line)
    assert heading.split("  ")[0] == "projected, p10 / median / p90"
    assert "paper, projected" in heading
    rollout = next(line for line in lines if line.startswith("rollout speedup"))
    assert rollout.endswith("3.50")
    assert next(line for line in lines if line.startswith("step speedup")).endswith("2.50")
    assert any(line.startswith("of the layout: max_response_tokens: assumed") for line in lines)
    assert "paper, projected" not in command("simulate", "project", *ASKED, "--drafting", "dflash")


def test_every_option_reaches_the_projection(command: Command) -> None:
    layout = ["--model", "mimo-7b", "--hardware", "h200", "--gpus", "40", "--gpus-per-engine", "4"]
    rollouts = ["--rollouts", "96", "--mean-tokens", "1234", "--lag", "3", "--generation-fraction", "0.6"]
    drafts = ["--k", "4", "--acceptance-length", "2.25", "--drafting", "dflash"]
    assert command("simulate", "project", *layout, *rollouts, *drafts).splitlines()[:4] == [
        "MiMo-7B, 40 x H200 SXM, bfloat16",
        "96 rollouts of 1234 tokens on average, 4 GPUs an engine",
        "dflash, k = 4, acceptance length 2.25, lag 3, 24 GPUs generate",
        "the learner pads each response to 8192 tokens",
    ]


def test_calibrate_paper_prints_variants_and_their_free_parameters(command: Command) -> None:
    out = command("simulate", "calibrate", "--paper").splitlines()
    assert [line.split()[0] for line in out[3:6]] == ["captured", "tile", "smooth"]
    assert [line.split()[2] for line in out[3:6]] == ["11", "11", "10"]
    assert sum("rl_think" in line for line in out) == 8


def test_a_run_is_read_from_its_own_directory_its_reports_or_the_file(command: Command, tmp_path: Path) -> None:
    written = write_record(demo_run(), tmp_path / "report_speedup" / "run.json")
    places = (tmp_path, written.parent, written)
    printed = [command("simulate", "calibrate", "--run", place) for place in places]
    assert printed[0] == printed[1] == printed[2]
    assert printed[0].startswith("calibrated on: recorded")
    assert "speculative arm, k = 5" in printed[0]
    assert "projected on this machine" in printed[0]


def test_a_run_is_fetched_from_the_given_server(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(execution: str, uri: str) -> RunRecord:
        asked.append((execution, uri))
        return replace(demo_run(), layout=None)

    monkeypatch.setattr(simulate_command, "_fetched_run", fetch)
    said = command("simulate", "calibrate", "--mlflow-run", "demo-1", "--uri", "sqlite:///x.db", status=2)
    assert "must be of a recipe that names its simulator.model" in said
    assert asked == [("demo-1", "sqlite:///x.db")]


@pytest.mark.parametrize("name", ["", "absent"])
def test_a_directory_without_a_report_is_refused_in_one_line(name: str, command: Command, tmp_path: Path) -> None:
    error = command("simulate", "calibrate", "--run", tmp_path / name, status=2)
    assert "--run must be a run's directory, its report's, or the report's run.json, got " in error
    assert error.endswith("; give one whose report is written\n")
    assert error.count("\n") == 1


def test_balance_marks_the_best_split_and_says_what_binds_it(command: Command, tmp_path: Path) -> None:
    written = write_record(demo_run(), tmp_path / "run.json")
    asked = ("--run", written, "--mode", "one_step_off", "--lag", "2")
    lines = command("simulate", "balance", *asked).splitlines()
    assert lines[0].startswith("synchronous step, measured: autoregressive ")
    assert lines[1] == "asynchronous step, measured: none"
    assert lines[2] == "projected, one_step_off, lag 2"
    assert lines[4].startswith("cores that generate + train  autoregressive, projected: step s  exposed s  bound by")
    assert lines[6].startswith("1 + 1  ")
    assert lines[6].count(", fastest") == 2


def test_balance_takes_mode_and_lag_of_the_runs_own_loop(command: Command, tmp_path: Path) -> None:
    own = replace(demo_run().arms[0], loop=LoopMode.ONE_STEP_OFF.value, max_off_policy_steps=3)
    for asynchronous, loop in (((own,), "one_step_off, lag 3"), ((), "in_flight, lag 1")):
        written = write_record(replace(demo_run(), asynchronous=asynchronous), tmp_path / "run.json")
        lines = command("simulate", "balance", "--run", written).splitlines()
        assert lines[1].startswith(f"asynchronous step, measured: {'autoregressive ' if asynchronous else 'none'}")
        assert lines[2] == f"projected, {loop}"


def test_figures_that_cannot_be_are_refused(command: Command, tmp_path: Path) -> None:
    written = write_record(demo_run(), tmp_path / "run.json")
    said = command("simulate", "balance", "--run", written, "--lag", "0", status=2)
    assert "--lag must be >= 1, got 0" in said
    said = command("simulate", "project", *ASKED[:-1], "7", status=2)
    assert "acceptance_length must lie in [1, k + 1 = 6], got 7.0" in said
