"""Every example is a recipe that loads, and its reward scores what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.recipe import load_recipe

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/recipe.yaml")), ids=lambda path: path.parent.name)
def test_an_example_is_a_recipe_of_its_own_name(path: Path) -> None:
    assert load_recipe(str(path)).name == path.parent.name


def test_the_reward_of_the_example_prefers_a_short_right_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boxed = "\\boxed{42}"
    rows = [(f"{boxed}", "42"), (f"{'by adding the terms, ' * 3}{boxed}", "42"), (boxed, "41"), ("42", "42")]
    responses = tmp_path / "responses.jsonl"
    responses.write_text("".join(json.dumps({"response": text, "reference": gold}) + "\n" for text, gold in rows))
    command = ["score", str(EXAMPLES / "own_reward" / "recipe.yaml"), "--responses", str(responses)]
    assert main([*command, "--json"]) == 0
    assert [json.loads(line)["score"] for line in capsys.readouterr().out.splitlines()] == [1.0, 0.9, 0.0, 0.0]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "mean 0.475 of 4 responses, 0 without a reward" in table
    assert "reward/right 0.5" in table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--responses must hold at least one response, got "),
        ("{", "--responses must hold JSON lines, got line 1 of "),
        ('{"response": "4"}', "--responses must have the text `response` and a `reference` in line 1, got "),
    ],
)
def test_responses_that_cannot_be_scored_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "responses.jsonl").write_text(text)
    assert main(["score", "tiny", "--responses", str(tmp_path / "responses.jsonl")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
