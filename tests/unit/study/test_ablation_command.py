"""`slipstream ablation` refuses a grid before anything starts, and starts the workflow with what it was given."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.drafts.config import FRESH_INITS
from slipstream.recipe import load_recipe, write_recipe
from slipstream.study import ablation_command
from slipstream.study.ablation_grid import Grid


def launched(*arguments: str) -> ablation_command.AblationLaunch:
    parser = argparse.ArgumentParser()
    ablation_command.add_options(parser)
    return ablation_command.launched(parser.parse_args(arguments))


def value(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_by_default_it_is_two_initialisations_by_two_lengths() -> None:
    launch = launched()
    assert launch.grid == Grid(draft_inits=FRESH_INITS, draft_lengths=(3, 7))
    command = launch.command(Path("/runs"))
    assert command[1:4] == ["run", "workflows/ablation.py", "ablation"]
    assert value(command, "--draft_inits") == '["in_domain", "general"]'
    assert (value(command, "--draft_lengths"), value(command, "--seeds")) == ("[3, 7]", "[]")
    assert "--num_steps" not in command
    assert command[-1] == "--reuse_stored"
    assert launch.execution.startswith("ablation-tiny-")


def test_what_is_asked_for_reaches_the_workflow() -> None:
    command = launched(
        "--draft-lengths", "0", "5", "--num-steps", "2", "--overrides", "grpo.group_size=4", "--fresh"
    ).command(Path("/runs"))
    assert (value(command, "--draft_lengths"), value(command, "--draft_inits")) == ("[0, 5]", "[]")
    assert value(command, "--num_steps") == "2"
    assert value(command, "--overrides") == '["grpo.group_size=4"]'
    assert command[-1] == "--no_reuse_stored"


def test_relative_paths_are_handed_on_as_absolute_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(load_recipe("tiny"), tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    arguments = ("--recipe", "mine.yaml", "--draft-lengths", "3", "--overrides", "tracking.uri=sqlite:///my.db")
    command = launched(*arguments).command(Path("/runs"))
    assert value(command, "--recipe") == f"{tmp_path}/mine.yaml"
    assert value(command, "--overrides") == f'["tracking.uri=\\"sqlite:///{tmp_path}/my.db\\""]'


def test_a_variant_that_the_recipe_refuses_ends_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["ablation", "--draft-lengths", "3", "99", "--run-root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: variant rl_zero-in_domain-eagle3-kl_div-k99-seed0: engine.max_model_len must hold")
    assert list(tmp_path.iterdir()) == []


def test_without_a_ranking_there_is_nothing_to_print(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must have left a ranking"):
        ablation_command.result(tmp_path, "abl")
