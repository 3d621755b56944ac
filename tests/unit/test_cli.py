"""The command line refuses bad input in one line before anything starts."""

import textwrap
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.recipe import CONFIGS, load_recipe, write_recipe
from slipstream.types import Workload


def test_check_accepts_the_shipped_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": train ")[0] for line in lines] == [
        "tiny, rl_zero: fine; prompts kept",
        "tiny, rl_think: fine; prompts kept",
    ]
    assert all(line.endswith("validation 30") for line in lines)


def test_check_reads_no_hub_and_says_when_sizes_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "qwen3_8b"]) == 0
    rest = "fine; the sizes of its prompt sets are checked when the data are read"
    assert capsys.readouterr().out.splitlines() == [
        f"qwen3_8b, {workload}: {rest}" for workload in ("rl_zero", "rl_think")
    ]


def test_check_prints_one_plan_for_both_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "qwen3_8b_h200", "--cluster", "1x8"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("1 x 8 GPUs, colocated\n") == 1
    assert "\nnode0  -              L0 E0  L1 E1  L2 E2  L3 E3  L4 E4  L5 E5  L6 E6  L7 E7\n" in printed
    assert "\nH200 SXM has        141.0\n" in printed


@pytest.mark.parametrize(("recipe", "cluster"), [("qwen3_8b", "8x4"), ("qwen3_8b_h200", "1x8")])
def test_the_documents_show_what_check_prints(capsys: pytest.CaptureFixture[str], recipe: str, cluster: str) -> None:
    assert main(["check", recipe, "--cluster", cluster]) == 0
    _, _, plan = capsys.readouterr().out.partition("\n\n")
    page = (CONFIGS.parent / "docs" / "cluster.md").read_text()
    assert textwrap.indent(plan, "    ") in page


def test_check_says_that_a_recipe_without_gpus_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tiny", "--cluster", "1x8"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("\nno GPUs: every process runs on one host (placement.gpus_per_node 0)\n")


def test_check_says_where_memory_is_unknown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_recipe(load_recipe("qwen3_8b", overrides={"simulator": None}), tmp_path / "mine.yaml")
    assert main(["check", str(path), "--cluster", "8x4"]) == 0
    assert capsys.readouterr().out.endswith("memory: unknown; name simulator.model and simulator.hardware\n")


@pytest.mark.parametrize(
    ("cluster", "field"), [(["2x4"], "placement.nodes"), (["8x2"], "placement.gpus_per_node"), (["8"], "--cluster")]
)
def test_a_cluster_that_is_too_small_is_an_error(
    capsys: pytest.CaptureFixture[str], cluster: list[str], field: str
) -> None:
    assert main(["check", "qwen3_8b", "--cluster", *cluster]) == 2
    assert capsys.readouterr().err.startswith(f"error: {field} must ")


def test_an_unknown_recipe_ends_in_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--recipe", "huge"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: recipe must name a recipe file, got 'huge'; known recipes: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seed", "0"], "--seed must be left out with --resume, got 0"),
        (["--num-steps", "3"], "--num-steps must be left out with --resume, got 3"),
        (["--recipe", "tiny"], "--recipe must be left out with --resume, got 'tiny'"),
        (["--workload", "rl_zero"], "--workload must be left out with --resume, got <Workload.RL_ZERO: 'rl_zero'>"),
    ],
)
def test_flags_that_a_resume_would_drop_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], named: str
) -> None:
    assert main(["demo", "--resume", "--run-root", str(tmp_path), *arguments]) == 2
    fix = "; an execution goes on with the recipe that it recorded"
    assert capsys.readouterr().err == f"error: {named}{fix}\n"


def test_check_takes_a_recipe_that_names_its_workload_at_its_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_recipe(load_recipe("qwen3_8b", workload=Workload.RL_THINK), tmp_path / "mine.yaml")
    assert main(["check", str(path)]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["qwen3_8b, rl_think"]
