"""The command line refuses bad input in one line before anything starts."""

import pytest

from slipstream.cli import main


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


def test_an_unknown_recipe_ends_in_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--recipe", "huge"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: recipe must name a recipe file, got 'huge'; known recipes: ")
    assert error.count("\n") == 1
