"""Every example, those of the documents included, is a recipe that loads, and its commands print what they promise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.recipe import load_recipe

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_FILE = re.compile(r"^```\w+ title=\"([\w.]+\.\w+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)


FEW = ["--set", "data.synthetic.num_draft_rows=50"]  # in sets that are not looked at


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The files of docs/bring_your_own.md, written beside one another."""
    files = _FILE.findall((ROOT / "docs" / "bring_your_own.md").read_text())
    for name, text in files:
        (tmp_path / name).write_text(text)
    assert len(files) == 6
    return tmp_path


def test_the_data_of_the_page_are_shown_as_the_policy_reads_them(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", str(page / "own_data.yaml"), *FEW]) == 0
    printed = capsys.readouterr().out
    assert printed.count("answer '") == 3  # the easy rows
    assert (
        "50 tokens, answer '17'\n<|im_start|><|user|>add up: 1+2=?<|im_end|><|im_start|><|assistant|>\\boxed{3}"
        "<|im_end|><|im_start|><|user|>add up: 8+1+2+6=?<|im_end|><|im_start|><|assistant|>\n"
    ) in printed
    lines = [line.split() for line in printed.splitlines()]
    assert ["train", "3", "48", "48", "50", "50", "50"] in lines
    assert ["train", str(page / "problems.csv"), "3", "3", "none"] in lines


def test_the_task_of_the_page_is_made_by_reasoning_gym(
    page: Path, capsys: pytest.CaptureFixture[str], stand_in: None
) -> None:
    assert main(["data", str(page / "own_task.yaml"), *FEW]) == 0
    assert ", data source reasoning_gym:chain_sum\n<|im_start|><|user|>" in capsys.readouterr().out


def test_the_rewards_of_the_page_are_summed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["score", str(page / "own_reward.yaml"), "--responses", str(page / "responses.jsonl")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines()[2:5]] == ["1.076", "0.09", "0"]
    assert "reward/compute_score_boxed 0.666667\n" in printed
    assert "reward/brevity_score 0.553333\n" in printed


def test_the_rows_of_the_example_are_all_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(EXAMPLES / "own_data" / "recipe.yaml")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(row[2:4] for row in rows if row[1:2] == [str(EXAMPLES / "own_data" / "problems.csv")]) == ["48", "48"]


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
