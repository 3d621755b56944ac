"""The command line refuses bad input in one line before anything starts."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slipstream import cli, run_command
from slipstream.cli import main
from slipstream.recipe import CONFIGS, load_recipe, write_recipe
from slipstream.types import Workload
from slipstream.workers.placement.memory import memory_text

PROJECT = ["simulate", "project", "--model", "qwen3-8b", "--gpus", "32", "--k", "3", "--acceptance-length", "2"]


def test_check_accepts_the_shipped_recipe_and_says_that_without_gpus_there_is_no_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "tiny", "--cluster", "1x8"]) == 0
    *lines, empty, plan = capsys.readouterr().out.splitlines()
    kept = [f"tiny, {workload}: fine; prompts kept" for workload in ("rl_zero", "rl_think")]
    assert [line.partition(": train ")[0] for line in lines] == kept
    assert all(line.endswith("validation 30") for line in lines)
    assert (empty, plan) == ("", "no GPUs: every process runs on one host (placement.gpus_per_node 0)")


def test_fields_can_be_set_for_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tiny", "--set", "name=mine", "--set", "data.num_validation_problems=30"]) == 0
    assert capsys.readouterr().out.startswith("mine, rl_zero: fine; prompts kept: ")
    assert main(["check", "tiny", "--set", "grpo.group_siz=4"]) == 2
    assert capsys.readouterr().err == "error: unknown key 'grpo.group_siz'; did you mean 'grpo.group_size'?\n"
    assert main(["check", "tiny", "--set", "grpo.group_size=1"]) == 2
    assert capsys.readouterr().err.startswith("error: grpo.group_size must be >= 2, got 1; ")


def test_check_reads_no_hub_and_estimates_the_memory_of_a_gpu_once_for_both_workloads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "qwen3_8b"]) == 0
    printed, _, memory = capsys.readouterr().out.partition("\n\n")
    rest = "fine; the sizes of its prompt sets are checked when the data are read"
    assert printed.splitlines() == [f"qwen3_8b, {workload}: {rest}" for workload in ("rl_zero", "rl_think")]
    recipe = load_recipe("qwen3_8b")
    estimate = recipe.memory()
    assert estimate is not None
    assert memory == f"{memory_text(estimate, recipe.refit_channel)}\n"


def test_check_prints_one_plan_for_workloads_that_share_it_and_else_one_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = []
    for recipe in ("qwen3_8b", "dapo_8b"):
        assert main(["check", recipe, "--cluster", "8x4"]) == 0
        plans.append(capsys.readouterr().out.replace(recipe, ""))
    assert plans[0].count("8 x 4 GPUs, colocated\n") == 1
    assert plans[1] == plans[0]  # what DAPO adds takes no memory
    assert main(["check", "qwen3_8b_h200", "--cluster", "1x8"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("1 x 8 GPUs, colocated\n") == 2
    assert printed.count("generating, GB") == 1  # long responses need the cache that memory in turn gives
    assert "\nnode0  -              L0 E0  L1 E1  L2 E2  L3 E3  L4 E4  L5 E5  L6 E6  L7 E7\n" in printed
    assert "\nH200 SXM has        141.0\n" in printed
    assert "warning" not in printed


def test_the_recipe_of_one_gpu_fits_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tiny_gpu", "--cluster", "1x1"]) == 0
    printed = capsys.readouterr().out
    assert "warning" not in printed
    assert "\nnode0  -              L0 E0\n" in printed
    memory = load_recipe("tiny_gpu").memory()
    assert memory is not None
    assert 0.09e9 < memory.refit_bytes / 2 < 0.11e9  # parameters in bfloat16


def test_the_documents_show_what_check_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "qwen3_8b", "--cluster", "8x4"]) == 0
    _, _, plan = capsys.readouterr().out.partition("\n\n")
    page = (CONFIGS.parent / "docs" / "cluster.md").read_text()
    assert textwrap.indent(plan, "    ") in page


def test_check_says_where_memory_is_unknown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_recipe(load_recipe("qwen3_8b", overrides={"simulator": None}), tmp_path / "mine.yaml")
    assert main(["check", str(path), "--cluster", "8x4"]) == 0
    assert capsys.readouterr().out.endswith("memory: unknown; name simulator.model and simulator.hardware\n")


@pytest.mark.parametrize(
    ("flag", "value", "shown"),
    [
        ("--arms", "both", "'both'"),
        ("--seed", "0", "0"),
        ("--num-steps", "3", "3"),
        ("--recipe", "tiny", "'tiny'"),
        ("--workload", "rl_zero", "<Workload.RL_ZERO: 'rl_zero'>"),
        ("--set", "grpo.seed=3", "['grpo.seed=3']"),
    ],
)
def test_flags_that_a_resume_would_drop_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, value: str, shown: str
) -> None:
    command = "run" if flag == "--arms" else "demo"
    assert main([command, "--resume", "--run-root", str(tmp_path), flag, value]) == 2
    fix = "; an execution resumes with its recorded recipe and arms"
    assert capsys.readouterr().err == f"error: {flag} must be left out with --resume, got {shown}{fix}\n"


def test_check_takes_a_recipe_that_names_its_workload_at_its_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_recipe(load_recipe("qwen3_8b", workload=Workload.RL_THINK), tmp_path / "mine.yaml")
    assert main(["check", str(path)]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()] == [
        "qwen3_8b, rl_think"
    ]


@pytest.mark.parametrize("kind", ["directory", "pipe"])
@pytest.mark.parametrize("command", [["check"], ["preflight", "--cluster"]])
def test_what_is_no_file_is_no_recipe_and_no_profile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, command: list[str]
) -> None:
    path = tmp_path / "mine.yaml"
    if kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert main([*command, str(path)]) == 2
    assert f"must name a {'recipe file' if len(command) == 1 else 'cluster profile'}, got " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "study", "ablation", "bakeoff"])
@pytest.mark.parametrize("root", ["file", "file/below", "/proc/none/below"])
def test_a_run_root_that_cannot_be_written_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, root: str
) -> None:
    (tmp_path / "file").touch()
    assert main([command, "--run-root", str(tmp_path / root)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --run-root must be a directory that can be written, got ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["check", "tiny", "--domain-nodes", "2"],
            "--domain-nodes must be left out without --cluster, got 2; as in 8x4",
        ),
        (
            ["check", "qwen3_8b", "--cluster", "9999999x4"],
            "--cluster must read NODESxGPUS, got '9999999x4'; as in 8x4: 8 nodes of 4 GPUs",
        ),
        (["preflight", "--cluster", "gb200", "--timeout-s", "nan"], "--timeout-s must lie in (0, 2147483647], got nan"),
        (
            [*PROJECT, "--rollouts", "1000001"],
            "num_rollouts must be <= 1000000, got 1000001; each of them is simulated",
        ),
        ([*PROJECT, "--lag", str(2**31)], "lag must be <= 2147483647, got 2147483648"),
        (["run", "tiny", "--arms", "all"], "--arms must be one of speculative, autoregressive, both, got 'all'"),
        (["bakeoff", "--seed", "-1"], "seeds must be >= 0, got (-1,)"),
        (["ablation", "--seeds", "-1"], "seeds must be >= 0, got (-1,)"),
    ],
)
def test_numbers_that_no_command_can_use_end_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["check", "qwen3_8b"], ["--help"]])
def test_a_reader_that_leaves_early_ends_a_command_without_a_word(unbuffered: str, arguments: list[str]) -> None:
    """141 is what a shell says of a command whose reader has left; with `--help` argparse hides it where it can."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "slipstream.cli", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) in [(141, ""), *([(0, "")] if arguments == ["--help"] else [])]


def test_an_output_that_is_full_is_an_error() -> None:
    command = [sys.executable, "-m", "slipstream.cli", "check", "qwen3_8b"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_an_interrupt_ends_a_command_in_one_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_recipe", interrupted)
    assert main(["check", "tiny"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_error_of_a_command_that_can_print_is_not_taken_for_one_of_its_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "a socket's")

    monkeypatch.setattr(run_command, "resumed", broken)
    with pytest.raises(BrokenPipeError, match="a socket's"):
        main(["demo", "--resume"])
