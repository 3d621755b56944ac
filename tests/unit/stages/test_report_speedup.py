"""Where the report of the last run is found."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slipstream.stages.report_speedup import _link_latest


def _report(root: Path, execution: str) -> Path:
    directory = root / execution / "report_speedup"
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(execution)
    return directory


def test_latest_leads_to_the_last_report_wherever_the_root_is_moved(tmp_path: Path) -> None:
    root = tmp_path / "old"
    for execution in ("first", "ablation/second"):
        _link_latest(root, _report(root, execution))
    root.rename(tmp_path / "new")
    assert (tmp_path / "new" / "latest" / "run.json").read_text() == "ablation/second"
    assert not (tmp_path / "new" / "latest").readlink().is_absolute()


def test_a_directory_that_is_called_latest_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "latest").mkdir()
    with caplog.at_level(logging.WARNING):
        _link_latest(tmp_path, _report(tmp_path, "first"))
    assert caplog.messages == [f"report_speedup: {tmp_path / 'latest'} is a directory, not our link, and is left alone"]
    assert not (tmp_path / "latest").is_symlink()
