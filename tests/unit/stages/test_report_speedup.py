"""Where the report of the last run is found."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
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


def test_executions_that_end_at_one_moment_do_not_stand_in_each_others_way(tmp_path: Path) -> None:
    reports = [_report(tmp_path, f"e{number}") for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda report: _link_latest(tmp_path, report), reports))  # raises what a call raised
    assert (tmp_path / "latest" / "run.json").read_text().startswith("e")
    assert not list(tmp_path.glob(".latest*"))


def test_a_directory_that_is_called_latest_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "latest").mkdir()
    with caplog.at_level(logging.WARNING):
        _link_latest(tmp_path, _report(tmp_path, "first"))
    assert caplog.messages == [f"report_speedup: {tmp_path / 'latest'} is a directory, not our link, and is left alone"]
    assert not (tmp_path / "latest").is_symlink()
