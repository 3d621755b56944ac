"""The command line refuses bad input in one line before anything starts."""

import pytest

from slipstream.cli import main


def test_check_accepts_the_shipped_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tiny"]) == 0
    assert "tiny, rl_zero: fine" in capsys.readouterr().out


def test_an_unknown_recipe_ends_in_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--recipe", "huge"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: recipe must name a recipe file, got 'huge'; known recipes: ")
    assert error.count("\n") == 1
