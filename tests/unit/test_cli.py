"""The command line refuses bad input in one line before anything starts."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import cli, run_command
from slipstream.recipe import CONFIGS, load_recipe, write_recipe
from slipstream.types import Workload
from slipstream.workers.placement.memory import memory_text
from tests.unit.conftest import Command
from tests.unit.refusals import rows


def test_check_accepts_the_shipped_recipe_and_says_that_without_gpus_there_is_no_plan(command: Command) -> None:
    *lines, empty, plan = command("check", "tiny", "--cluster", "1x8").splitlines()
    kept = [f"tiny, {workload}: fine; prompts kept" for workload in ("rl_zero", "rl_think")]
    assert [line.partition(": train ")[0] for line in lines] == kept
    assert all(line.endswith("validation 30") for line in lines)
    assert (empty, plan) == ("", "no GPUs: every process runs on one host (placement.gpus_per_node 0)")


def test_fields_can_be_set_for_a_check(command: Command) -> None:
    given = ("--set", "name=mine", "--set", "data.num_validation_problems=30")
    assert command("check", "tiny", *given).startswith("mine, rl_zero: fine; prompts kept: ")
    unknown = command("check", "tiny", "--set", "grpo.group_siz=4", status=2)
    assert unknown == "error: unknown key 'grpo.group_siz'; did you mean 'grpo.group_size'?\n"
    lonely = command("check", "tiny", "--set", "grpo.group_size=1", status=2)
    assert lonely.startswith("error: grpo.group_size must be >= 2, got 1; ")


def test_check_reads_no_hub_and_estimates_the_memory_of_a_gpu_once_for_both_workloads(command: Command) -> None:
    printed, _, memory = command("check", "qwen3_8b").partition("\n\n")
    rest = "fine; the sizes of its prompt sets are checked when the data are read"
    assert printed.splitlines() == [f"qwen3_8b, {workload}: {rest}" for workload in ("rl_zero", "rl_think")]
    recipe = load_recipe("qwen3_8b")
    estimate = recipe.memory()
    assert estimate is not None
    assert memory == f"{memory_text(estimate, recipe.refit_channel)}\n"


def test_check_prints_one_plan_for_workloads_that_share_it_and_else_one_for_each(command: Command) -> None:
    plans = [command("check", name, "--cluster", "8x4").replace(name, "") for name in ("qwen3_8b", "dapo_8b")]
    assert plans[0].count("8 x 4 GPUs, colocated\n") == 1
    assert plans[1] == plans[0]  # what DAPO adds takes no memory
    _, _, plan = plans[0].partition("\n\n")
    assert textwrap.indent(plan, "    ") in (CONFIGS.parent / "docs" / "cluster.md").read_text()
    printed = command("check", "qwen3_8b_h200", "--cluster", "1x8")
    assert printed.count("1 x 8 GPUs, colocated\n") == 2
    assert printed.count("generating, GB") == 1  # long responses need the cache that memory in turn gives
    assert "\nnode0  -              L0 E0  L1 E1  L2 E2  L3 E3  L4 E4  L5 E5  L6 E6  L7 E7\n" in printed
    assert "\nH200 SXM has        141.0\n" in printed
    assert "warning" not in printed


def test_the_recipe_of_one_gpu_fits_it(command: Command) -> None:
    printed = command("check", "tiny_gpu", "--cluster", "1x1")
    assert "warning" not in printed
    assert "\nnode0  -              L0 E0\n" in printed
    memory = load_recipe("tiny_gpu").memory()
    assert memory is not None
    assert 0.09e9 < memory.refit_bytes / 2 < 0.11e9  # parameters in bfloat16


def test_a_file_is_checked_for_the_workload_that_it_names_where_memory_is_unknown_too(
    command: Command, tmp_path: Path
) -> None:
    recipe = load_recipe("qwen3_8b", workload=Workload.RL_THINK, overrides={"simulator": None})
    printed = command("check", write_recipe(recipe, tmp_path / "mine.yaml"), "--cluster", "8x4")
    assert printed.endswith("memory: unknown; name simulator.model and simulator.hardware\n")
    assert [line.partition(":")[0] for line in printed.partition("\n\n")[0].splitlines()] == ["qwen3_8b, rl_think"]


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
def test_flags_that_a_resume_would_drop_are_refused(
    command: Command, tmp_path: Path, flag: str, value: str, shown: str
) -> None:
    name = "run" if flag == "--arms" else "demo"
    said = command(name, "--resume", "--run-root", tmp_path, flag, value, status=2)
    fix = "; an execution resumes with its recorded recipe and arms"
    assert said == f"error: {flag} must be left out with --resume, got {shown}{fix}\n"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
@pytest.mark.parametrize(
    ("asked", "file"), [(["check"], "recipe file"), (["preflight", "--cluster"], "cluster profile")]
)
def test_what_is_no_file_is_no_recipe_and_no_profile(
    command: Command, tmp_path: Path, make: Callable[[Path], None], asked: list[str], file: str
) -> None:
    make(tmp_path / "mine.yaml")
    assert f"must name a {file}, got " in command(*asked, tmp_path / "mine.yaml", status=2)


@pytest.mark.parametrize("name", ["demo", "study"])
@pytest.mark.parametrize("root", ["file", "file/below", "/proc/none/below"])
def test_a_run_root_that_cannot_be_written_ends_in_one_line(
    command: Command, tmp_path: Path, name: str, root: str
) -> None:
    (tmp_path / "file").touch()
    error = command(name, "--run-root", tmp_path / root, status=2)
    assert error.startswith("error: --run-root must be a directory that can be written, got ")
    assert error.count("\n") == 1


@rows(
    """
check tiny --domain-nodes 2 => --domain-nodes must be left out without --cluster, got 2; as in 8x4
check qwen3_8b --cluster 9999999x4 => --cluster must read NODESxGPUS, got '9999999x4'; as in 8x4: 8 nodes of 4 GPUs
preflight --cluster gb200 --timeout-s nan => --timeout-s must lie in (0, 2147483647], got nan
simulate project --model qwen3-8b --gpus 32 --k 3 --acceptance-length 2 --rollouts 1000001
    num_rollouts must be <= 1000000, got 1000001; each of them is simulated
simulate project --model qwen3-8b --gpus 32 --k 3 --acceptance-length 2 --lag 2147483648
    lag must be <= 2147483647, got 2147483648
run tiny --arms all => --arms must be one of speculative, autoregressive, both, got 'all'
bakeoff --seed -1 => seeds must be >= 0, got (-1,)
ablation --seeds -1 => seeds must be >= 0, got (-1,)
"""
)
def test_numbers_that_no_command_can_use_end_in_one_line(command: Command, given: str, expected: str) -> None:
    assert command(*given.split(), status=2) == f"error: {expected}\n"


def ended(*arguments: str, output: int, unbuffered: str = "") -> tuple[int, str]:
    """The status of a command in a process of its own, and what it said of errors."""
    command = [sys.executable, "-m", "slipstream.cli", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["check", "qwen3_8b"], ["--help"]])
def test_a_reader_that_leaves_early_ends_a_command_without_a_word(unbuffered: str, arguments: list[str]) -> None:
    """141 is what a shell says of a command whose reader has left; with `--help` argparse hides it where it can."""
    read, write = os.pipe()
    os.close(read)
    found = ended(*arguments, output=write, unbuffered=unbuffered)
    os.close(write)
    assert found in [(141, ""), *([(0, "")] if arguments == ["--help"] else [])]


def test_an_output_that_is_full_is_an_error() -> None:
    said = "error: the output cannot be written: No space left on device\n"
    with Path("/dev/full").open("w") as full:
        assert ended("check", "qwen3_8b", output=full.fileno()) == (1, said)


def raises(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_an_interrupt_ends_a_command_in_one_word(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load_recipe", raises(KeyboardInterrupt()))
    assert command("check", "tiny", status=130) == "interrupted\n"


def test_an_error_of_a_command_that_can_print_is_not_taken_for_one_of_its_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_command, "resumed", raises(BrokenPipeError(32, "a socket's")))
    with pytest.raises(BrokenPipeError, match="a socket's"):
        cli.main(["demo", "--resume"])
