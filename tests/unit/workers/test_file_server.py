"""Copies of the driver's files: what tells files apart, and who removes what is left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.config import ConfigError
from slipstream.workers import file_server
from slipstream.workers.file_server import NodeStore, files_under


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(10, 20))
    return path


def test_a_directory_is_listed_with_all_below_it_and_a_file_alone(tmp_path: Path) -> None:
    write(tmp_path / "policy" / "config.json", "{}")
    write(tmp_path / "policy" / "part" / "model.safetensors", "abc")

    assert {name: (file.size, file.modified_ns) for name, file in files_under(tmp_path / "policy").items()} == {
        "policy/config.json": (2, 20),
        "policy/part/model.safetensors": (3, 20),
    }
    assert list(files_under(tmp_path / "policy" / "config.json")) == ["config.json"]
    assert files_under(tmp_path / "missing") == {}


def test_the_agent_tells_contents_apart_that_size_and_time_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server.tempfile, "tempdir", str(tmp_path))
    store = NodeStore()
    one = store.listing(write(tmp_path / "a" / "w", "abc"), with_digests=True)["w"]
    other = store.listing(write(tmp_path / "b" / "w", "abd"), with_digests=True)["w"]

    assert (one.size, one.modified_ns) == (other.size, other.modified_ns)
    assert one.digest != other.digest
    with pytest.raises(ConfigError, match="must be a file or directory on the driver's host"):
        store.listing(tmp_path / "missing")


def test_an_agent_removes_what_a_dead_one_left_and_nothing_of_a_living_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server.tempfile, "tempdir", str(tmp_path))
    living = NodeStore()
    left_over = tmp_path / f"{file_server._PREFIX}dead"
    write(left_over / "lock", "")

    other = NodeStore()

    assert not left_over.exists()
    assert living._root.is_dir()
    assert other._root.is_dir()


def test_a_copy_that_does_not_fit_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_server.tempfile, "tempdir", str(tmp_path))

    with pytest.raises(OSError, match=r"must have 1,000,000,000,000,000 bytes free for a copy of /policy, has"):
        NodeStore()._require_space(Path("/policy"), 10**15)


def test_an_agent_keeps_one_copy_of_a_path_and_what_other_paths_share_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server.tempfile, "tempdir", str(tmp_path))
    store = NodeStore()
    old, new = (tmp_path / name for name in ("old", "new"))
    for copy in (old, new):
        copy.mkdir()

    store._forget_older(Path("/policy"), old)
    store._forget_older(Path("/same"), old)
    store._forget_older(Path("/policy"), new)
    assert old.is_dir()

    store._forget_older(Path("/same"), new)
    assert not old.exists()
    assert new.is_dir()
