"""`slipstream study` and its presets refuse a grid before anything starts, and hand the workflow what they got."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.recipe import load_recipe, write_recipe
from slipstream.run_command import Launch
from slipstream.study.study_command import add_options, launched, result


def launch(preset: str, *arguments: str) -> Launch:
    parser = argparse.ArgumentParser()
    add_options(parser, preset)
    return launched(parser.parse_args(arguments))


def inputs(preset: str, *arguments: str) -> dict[str, Any]:
    """Inputs of the workflow, with lists and numbers read like `pyflyte run` reads them."""
    command = launch(preset, *arguments).command(Path("/runs"))
    assert command[1] == "run"
    values = dict(zip(command[4:-1:2], command[5:-1:2], strict=True))
    read = {name[2:]: json.loads(v) if v[0] in "[0123456789" else v for name, v in values.items()}
    return {"workflow": " ".join(command[2:4]), **read, "reuse": command[-1]}


ABLATION = {
    "workflow": "workflows/ablation.py ablation",
    "recipe": "tiny",
    "run_root": "/runs",
    "draft_inits": ["in_domain", "general"],
    "draft_lengths": [3, 7],
    **{name: [] for name in ("methods", "losses", "seeds", "workloads", "overrides")},
    "reuse": "--reuse_stored",
}
BAKE_OFF = {
    "workflow": "workflows/bake_off.py bake_off",
    "recipe": "tiny",
    "run_root": "/runs",
    "methods": ["eagle3", "draft_model", "ngram"],
    "inits": ["in_domain", "general"],
    "online": ["off", "always"],
    "num_speculative_tokens": 3,
    "overrides": [],
    "reuse": "--reuse_stored",
}
SHORT = ("--num-steps", "2", "--overrides", "grpo.group_size=4", "--fresh")
SHORTENED = {"num_steps": 2, "overrides": ["grpo.group_size=4"], "reuse": "--no_reuse_stored"}
ONE = ("--methods", "ngram", "--num-speculative-tokens", "2", "--seed", "0", "--workload", "rl_think")
CHOSEN = {"methods": ["ngram"], "num_speculative_tokens": 2, "seed": 0, "workload": "rl_think"}
LENGTHS, GIVEN = ("--draft-lengths", "0", "5"), {"draft_inits": [], "draft_lengths": [0, 5]}


@pytest.mark.parametrize(
    ("preset", "arguments", "given"),
    [
        ("ablation", (), ABLATION),
        ("study", (), ABLATION),
        ("ablation", (*LENGTHS, *SHORT), {**ABLATION, **GIVEN, **SHORTENED}),
        ("bakeoff", (), BAKE_OFF),
        ("study", ("--in-turn",), BAKE_OFF),
        ("bakeoff", (*ONE, *SHORT), {**BAKE_OFF, **CHOSEN, **SHORTENED}),
    ],
)
def test_the_workflow_gets_what_is_asked_for_and_the_presets(
    preset: str, arguments: tuple[str, ...], given: dict[str, Any]
) -> None:
    assert inputs(preset, *arguments) == given
    assert launch(preset, *arguments).execution.startswith(f"{preset}-tiny-")


def test_relative_paths_are_handed_on_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(load_recipe("tiny"), tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    found = inputs("study", "--recipe", "mine.yaml", "--overrides", "tracking.uri=sqlite:///my.db")
    assert found["recipe"] == f"{tmp_path}/mine.yaml"
    assert found["overrides"] == [f'tracking.uri="sqlite:///{tmp_path}/my.db"']


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bakeoff", "--num-speculative-tokens", "99"), "drafter eagle3-in_domain-off: engine.max_model_len must hold"),
        (("study", "--online", "off"), "--online must be left out without steps in turn, got ['off']"),
        (("study", "--in-turn", "--losses", "tv"), "--losses must be left out with steps in turn, got ['tv']"),
        (("bakeoff", "--seed", "1", "2"), "--seeds must name at most one value with steps in turn, got [1, 2]"),
    ],
)
def test_what_cannot_be_ends_in_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert main([*arguments, "--run-root", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_without_a_ranking_there_is_nothing_to_print(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the study must have left a ranking, got .*/bake_off"):
        result(tmp_path, launch("bakeoff"))
