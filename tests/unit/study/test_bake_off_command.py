"""`slipstream bakeoff` refuses drafters before anything starts, and starts the workflow with what it was given."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.recipe import load_recipe, write_recipe
from slipstream.study import bake_off_command


def launched(*arguments: str) -> bake_off_command.BakeOffLaunch:
    parser = argparse.ArgumentParser()
    bake_off_command.add_options(parser)
    return bake_off_command.launched(parser.parse_args(arguments))


def value(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_by_default_every_drafter_that_needs_nothing_installed_takes_part() -> None:
    launch = launched()
    command = launch.command(Path("/runs"))
    assert command[1:4] == ["run", "workflows/bake_off.py", "bake_off"]
    assert value(command, "--methods") == '["eagle3", "draft_model", "ngram"]'
    assert value(command, "--online") == '["off", "always"]'
    assert value(command, "--num_speculative_tokens") == "3"
    assert not {"--workload", "--num_steps", "--seed"} & set(command)
    assert command[-1] == "--reuse_stored"
    assert launch.execution.startswith("bakeoff-tiny-")


def test_what_is_asked_for_reaches_the_workflow() -> None:
    command = launched(
        *("--methods", "ngram", "--num-speculative-tokens", "2", "--num-steps", "4", "--seed", "5"),
        *("--workload", "rl_think", "--overrides", "grpo.group_size=4", "--fresh"),
    ).command(Path("/runs"))
    assert value(command, "--methods") == '["ngram"]'
    assert [value(command, f"--{name}") for name in ("num_speculative_tokens", "num_steps", "seed", "workload")] == [
        "2",
        "4",
        "5",
        "rl_think",
    ]
    assert value(command, "--overrides") == '["grpo.group_size=4"]'
    assert command[-1] == "--no_reuse_stored"


def test_relative_paths_are_handed_on_as_absolute_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(load_recipe("tiny"), tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    command = launched("--recipe", "mine.yaml", "--overrides", "tracking.uri=sqlite:///my.db").command(Path("/runs"))
    assert value(command, "--recipe") == f"{tmp_path}/mine.yaml"
    assert json.loads(value(command, "--overrides")) == [f'tracking.uri="sqlite:///{tmp_path}/my.db"']


def test_a_drafter_that_the_recipe_refuses_ends_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bakeoff", "--num-speculative-tokens", "99", "--run-root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: drafter eagle3-in_domain-off: engine.max_model_len must hold")
    assert list(tmp_path.iterdir()) == []


def test_without_a_comparison_there_is_nothing_to_print(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must have left a comparison"):
        bake_off_command.result(tmp_path, "bake")
