"""What is handed on: records as files, weights by their hash, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.config import ConfigError
from slipstream.stages.context import RunContext
from slipstream.stages.deliverables import assemble, deliver, num_bytes


def _context(root: Path) -> RunContext:
    return RunContext(execution="e", root=str(root), experiment="x", workload="rl_zero")


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


def _never(name: str, target: Path) -> None:
    raise AssertionError(f"{name} was fetched to {target}")


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_records_are_handed_on_and_weights_stay_in_the_store_under_their_hash(tmp_path: Path) -> None:
    folder = deliver(_context(tmp_path), "arm", _arm(tmp_path), records=("arm.json",), weights=("policy",))

    assert _names(folder) == ["arm.json", "deliverable.json"]
    (model,) = json.loads((folder / "deliverable.json").read_text())["weights"]
    assert (model["at"], model["num_bytes"]) == ("policy", 12)
    stored = tmp_path / "store" / "weights" / model["identity"]
    assert _names(stored) == ["config.json", "model.safetensors"]


def test_a_later_task_sees_what_was_handed_on_whatever_became_of_the_directory(tmp_path: Path) -> None:
    directory = _arm(tmp_path)
    folder = deliver(_context(tmp_path), "arm", directory, records=("arm.json",), weights=("policy",))
    (directory / "policy" / "model.safetensors").unlink()
    (directory / "policy" / "model.safetensors").write_text("another one")

    view = assemble(_context(tmp_path), folder, _never)

    assert _names(view) == ["arm.json", "deliverable.json", "policy/config.json", "policy/model.safetensors"]
    assert (view / "policy" / "model.safetensors").read_text() == "0123456789"
    assert view.is_relative_to(tmp_path)
    assert assemble(_context(tmp_path), folder, _never) == view


def test_weights_are_found_again_after_a_move_of_the_root(tmp_path: Path) -> None:
    here = _context(tmp_path / "here")
    folder = deliver(here, "arm", _arm(tmp_path / "here"), records=("arm.json",), weights=("policy",))
    view = assemble(here, folder, _never)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / view.relative_to(tmp_path / "here")
    assert (moved / "policy" / "model.safetensors").read_text() == "0123456789"


def test_a_view_whose_links_lead_nowhere_is_laid_out_anew(tmp_path: Path) -> None:
    folder = deliver(_context(tmp_path), "arm", _arm(tmp_path), records=("arm.json",), weights=("policy",))
    view = assemble(_context(tmp_path), folder, _never)
    link = view / "policy" / "model.safetensors"
    link.unlink()
    link.symlink_to(tmp_path / "before the move")
    assert assemble(_context(tmp_path), folder, _never) == view
    assert link.read_text() == "0123456789"


def test_equal_weights_are_stored_once_and_take_no_space_twice(tmp_path: Path) -> None:
    directory = _arm(tmp_path)
    for node in ("one", "other"):
        deliver(_context(tmp_path), node, directory, records=("arm.json",), weights=("policy",))

    assert len(list((tmp_path / "store" / "weights").iterdir())) == 1
    (stored,) = (tmp_path / "store" / "weights").glob("*/model.safetensors")
    assert stored.samefile(directory / "policy" / "model.safetensors")


def test_the_record_of_a_policy_is_no_part_of_its_identity(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_text("0123456789")
    manifests = []
    for seconds in ("1", "2"):
        (policy / "policy.json").write_text(seconds)
        folder = deliver(_context(tmp_path), "policy", policy, records=("policy.json",), weights=(".",))
        manifests.append((folder / "deliverable.json").read_text())
        assert (assemble(_context(tmp_path), folder, _never) / "policy.json").read_text() == seconds
    assert manifests[0] == manifests[1]


def test_a_model_of_links_is_stored_as_the_files_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").write_text("0123456789")
    policy = tmp_path / "runs" / "policy"
    policy.mkdir(parents=True)
    (policy / "model.safetensors").symlink_to(tmp_path / "hub" / "model.safetensors")
    (policy / "policy.json").write_text("{}")

    context = _context(tmp_path / "runs")
    folder = deliver(context, "policy", policy, records=("policy.json",), weights=(".",))

    (stored,) = (tmp_path / "runs" / "store" / "weights").glob("*/model.safetensors")
    assert not stored.is_symlink()
    assert (assemble(context, folder, _never) / "model.safetensors").read_text() == "0123456789"


def test_uploaded_weights_are_fetched_once_by_a_root_that_has_not_got_them(tmp_path: Path) -> None:
    here, there = _context(tmp_path / "here"), _context(tmp_path / "there")
    folder = deliver(here, "arm", _arm(tmp_path / "here"), records=("arm.json",), weights=("policy",), upload=True)
    assert num_bytes(folder) == 2 + 12 + (folder / "deliverable.json").stat().st_size
    fetched = []

    def fetch(name: str, target: Path) -> None:
        fetched.append(name)
        target.mkdir()
        for path in (folder / name).iterdir():
            (target / path.name).write_bytes(path.read_bytes())

    views = [assemble(there, folder, fetch) for _ in range(2)]

    assert len(fetched) == 1
    assert (views[1] / "policy" / "model.safetensors").read_text() == "0123456789"
    assert "weights" not in {path.name for path in views[1].iterdir()}


def test_weights_that_arrive_changed_are_refused(tmp_path: Path) -> None:
    here, there = _context(tmp_path / "here"), _context(tmp_path / "there")
    folder = deliver(here, "arm", _arm(tmp_path / "here"), records=("arm.json",), weights=("policy",), upload=True)

    def fetch(name: str, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_text("9876543210")

    with pytest.raises(ConfigError, match="weights must be those of"):
        assemble(there, folder, fetch)
    assert not list((tmp_path / "there" / "store" / "weights").glob("[!.]*"))


def test_a_root_that_is_not_shared_is_refused_with_the_fix(tmp_path: Path) -> None:
    here, there = _context(tmp_path / "here"), _context(tmp_path / "there")
    folder = deliver(here, "arm", _arm(tmp_path / "here"), records=("arm.json",), weights=("policy",))

    with pytest.raises(ConfigError, match=r"run_root must be storage that every task sees.*upload_weights"):
        assemble(there, folder, _never)


def test_stored_weights_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    folder = deliver(_context(tmp_path), "arm", _arm(tmp_path), records=("arm.json",), weights=("policy",))
    (stored,) = (tmp_path / "store" / "weights").glob("*/model.safetensors")
    stored.write_text("012")

    with pytest.raises(ConfigError, match="must be 12 bytes, got 5"):
        assemble(_context(tmp_path), folder, _never)
