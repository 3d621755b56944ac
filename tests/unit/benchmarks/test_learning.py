from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning import main
from benchmarks.study import SeedResult, Study, append
from slipstream.types import Workload
from tests.unit.benchmarks.test_study import result

ASKED = ["--seeds", "0", "1", "--k", "7"]


def kept(root: Path, *seeds: int) -> list[SeedResult]:
    study = Study(recipe="tiny", workload=Workload.RL_ZERO, k=7, evaluate=False, pinned=False)
    results = [result(seed, study=study) for seed in seeds]
    for each in results:
        append(each, root / "results.jsonl")
    return results


def test_seeds_that_are_finished_are_shown_and_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path, 0, 1)

    assert main([*ASKED, "--root", str(tmp_path)]) == 0

    output = capsys.readouterr().out
    assert "to run: none" in output
    assert "2 of 2 seeds gain" in output
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_two_seeds_at_once_need_cores_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--root", str(tmp_path), "--parallel", "2"]) == 2

    assert "--parallel must be 1 without --pin, got 2" in capsys.readouterr().err


def test_more_seeds_at_once_than_cores_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--root", str(tmp_path), "--parallel", "4096", "--pin"]) == 2

    assert "--parallel must be at most the" in capsys.readouterr().err
