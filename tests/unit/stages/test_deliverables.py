"""What is handed on: records as files, weights by their path, and nothing else."""

import json
from pathlib import Path

import pytest

from slipstream.config import ConfigError
from slipstream.stages.deliverables import assemble, deliver
from tests.small import run_context

MODEL = Path("policy", "model.safetensors")


def _arm(root: Path) -> Path:
    """An arm's directory: 12 bytes of weights, 2 of records, and what must stay there."""
    directory = root / "e" / "train_grpo_speculative"
    for name, text in {
        "arm.json": "{}",
        "policy/config.json": "[]",
        "policy/model.safetensors": "0123456789",
        "checkpoints/step-000002/rank-0.safetensors": "x" * 1000,
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _hand_on(root: Path, directory: Path, *, weights: str = "policy") -> Path:
    return deliver(run_context(root), "arm", directory, records=("arm.json",), weights=(weights,))


def test_records_are_handed_on_as_files_and_weights_by_their_path(tmp_path: Path) -> None:
    folder = _hand_on(tmp_path, _arm(tmp_path))
    assert _names(folder) == ["arm.json", "deliverable.json"]
    whole = assemble(run_context(tmp_path), folder)
    assert _names(whole) == ["arm.json", "policy/config.json", "policy/model.safetensors"]
    told = json.loads((folder / "deliverable.json").read_text())
    assert told == {"path": str(whole.relative_to(tmp_path)), "num_bytes": 14}


def test_a_later_task_sees_what_was_handed_on_whatever_became_of_the_directory(tmp_path: Path) -> None:
    directory = _arm(tmp_path)
    folder = _hand_on(tmp_path, directory)
    first = assemble(run_context(tmp_path), folder)
    assert (first / MODEL).samefile(directory / MODEL)  # not copied
    (directory / MODEL).unlink()
    (directory / MODEL).write_text("another one")
    assert (assemble(run_context(tmp_path), folder) / MODEL).read_text() == "0123456789"
    again = assemble(run_context(tmp_path), _hand_on(tmp_path, directory))  # a retry made something else
    assert again != first
    assert (again / MODEL).read_text() == "another one"


def test_a_folder_that_lost_its_weights_stays_incomplete_when_it_is_handed_on_again(tmp_path: Path) -> None:
    directory = _arm(tmp_path)
    (assemble(run_context(tmp_path), _hand_on(tmp_path, directory)) / MODEL).unlink()
    with pytest.raises(ConfigError, match="must hold 14 bytes, got 4; remove it"):
        assemble(run_context(tmp_path), _hand_on(tmp_path, directory))


def test_weights_are_found_again_after_a_move_of_the_root(tmp_path: Path) -> None:
    folder = _hand_on(tmp_path / "here", _arm(tmp_path / "here")).relative_to(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    whole = assemble(run_context(tmp_path / "there"), tmp_path / "there" / folder)
    assert (whole / MODEL).read_text() == "0123456789"


def test_a_model_of_links_is_handed_on_as_the_files_they_lead_to(tmp_path: Path) -> None:
    directory = _arm(tmp_path)
    (directory / MODEL).rename(tmp_path / "of the hub")
    (directory / MODEL).symlink_to(tmp_path / "of the hub")
    whole = assemble(run_context(tmp_path), _hand_on(tmp_path, directory, weights="."))
    assert not (whole / MODEL).is_symlink()
    assert (whole / MODEL).read_text() == "0123456789"


def test_a_stage_without_its_model_or_its_record_hands_nothing_on(tmp_path: Path) -> None:
    directory = _arm(tmp_path)
    with pytest.raises(ConfigError, match="weights must hold a model, got 'draft'"):
        _hand_on(tmp_path, directory, weights="draft")
    (directory / "arm.json").unlink()
    with pytest.raises(AssertionError, match="has no records"):
        _hand_on(tmp_path, directory)


def test_a_root_that_is_not_shared_and_weights_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    folder = _hand_on(tmp_path / "here", _arm(tmp_path / "here"))
    with pytest.raises(ConfigError, match=r"run_root must be storage that every task sees.*; mount the same storage"):
        assemble(run_context(tmp_path / "there"), folder)
    (assemble(run_context(tmp_path / "here"), folder) / MODEL).write_text("012")
    with pytest.raises(ConfigError, match="must hold 14 bytes, got 7"):
        assemble(run_context(tmp_path / "here"), folder)
