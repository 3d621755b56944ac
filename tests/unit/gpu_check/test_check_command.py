"""The runner of gpu-check: a stage that fails, hangs or crashes is one line among the others, and all is archived."""

import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from slipstream.gpu_check.check_command import FOUND, LINES, STAGES, Line, Process, Stage, run_stage, run_stages
from slipstream.gpu_check.check_stages import Setting, Skipped

PASSES = """
import json, pathlib, sys
found = {"outcome": "passed", "reason": "", "figures": {"seconds_of_it": 1.5}}
pathlib.Path(sys.argv[1], "found.json").write_text(json.dumps(found))
print("all is well")
"""
HANGS = "import time; time.sleep(100)"
CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
SUPERVISED_CRASHES = "import sys; sys.exit(128 + 11)"  # a shell's status of what SIGSEGV ended
EXITS = "import sys; sys.exit(3)"


def process(number: int, code: str, *, limit_s: float = 60.0) -> Process:
    def work(at: Setting) -> None:
        """Stand for the code, which runs in a process."""

    work.__name__ = f"stage{number}"
    stage = Stage(number, work, limit_s, not_exercised=("a GPU",))
    return Process(stage=stage, command=[sys.executable, "-c", code], limit_s=limit_s)


def outcomes(lines: list[Line]) -> list[tuple[int, str, str]]:
    return [(line.stage, line.outcome, line.reason) for line in lines]


def archived(output: Path) -> Mapping[str, bytes]:
    with tarfile.open(output.with_suffix(".tar.gz")) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_stage_that_hangs_crashes_or_exits_is_named_and_the_next_one_runs(tmp_path: Path, lanes: int) -> None:
    output = tmp_path / "check"
    output.mkdir()
    codes = {1: CRASHES, 2: SUPERVISED_CRASHES, 3: EXITS, 5: PASSES}
    processes = [process(number, code) for number, code in codes.items()]
    processes.insert(3, process(4, PASSES + HANGS, limit_s=2.0))
    told: list[Line] = []

    lines = run_stages(processes, output, lanes=lanes, on_line=told.append)

    assert outcomes(lines) == [
        (1, "failed", "ended by SIGSEGV without a result: see log.txt"),
        (2, "failed", "ended by SIGSEGV without a result: see log.txt"),
        (3, "failed", "ended with status 3 without a result: see log.txt"),
        (4, "failed", "did not end within its 2 s: log.txt ends with every stack"),
        (5, "passed", ""),
    ]
    assert told == lines
    assert lines[3].figures == lines[4].figures == {"seconds_of_it": 1.5}
    files = archived(output)
    written = [json.loads(line) for line in files[f"check/{LINES}"].splitlines()]
    assert [(line["stage"], line["outcome"]) for line in written] == [(line.stage, line.outcome) for line in lines]
    assert files["check/05_stage5/log.txt"] == b"all is well\n"
    assert b"numpy==" in files["check/packages.txt"]
    assert b"Python 3" in files["check/machine.txt"]


def test_nothing_runs_after_an_environment_that_lacks_something_but_all_is_archived(tmp_path: Path) -> None:
    output = tmp_path / "check"
    output.mkdir()
    lines = run_stages([process(0, EXITS), process(1, PASSES)], output)
    reason = "stage 0 failed: ended with status 3 without a result: see log.txt"
    assert outcomes(lines)[1:] == [(1, "skipped", reason)]
    assert "check/00_stage0/log.txt" in archived(output)
    assert not (output / "01_stage1").exists()


def test_an_interrupted_check_is_archived_with_what_it_has(tmp_path: Path) -> None:
    output = tmp_path / "check"
    output.mkdir()

    def interrupt(line: Line) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stages([process(1, PASSES), process(2, PASSES)], output, on_line=interrupt)
    assert json.loads(archived(output)[f"check/{LINES}"])["stage"] == 1


def test_a_stage_that_raises_keeps_what_it_measured_before(tmp_path: Path) -> None:
    def raises(at: Setting) -> None:
        at.figures["start_s"] = 2.0
        raise ValueError("must be 1, got 2")

    def lacks(at: Setting) -> None:
        raise Skipped("needs two GPUs, and this machine has 1")

    found = []
    for work in (raises, lacks, lambda at: None):
        run_stage(work, Setting(directory=tmp_path, work=tmp_path, is_dry=True))
        found.append(json.loads((tmp_path / FOUND).read_text()))
    assert found == [
        {"outcome": "failed", "reason": "ValueError: must be 1, got 2", "figures": {"start_s": 2.0}},
        {"outcome": "skipped", "reason": "needs two GPUs, and this machine has 1", "figures": {}},
        {"outcome": "passed", "reason": "", "figures": {}},
    ]


def test_a_stage_that_is_interrupted_keeps_what_it_measured_before(tmp_path: Path) -> None:
    def ends(at: Setting) -> None:
        at.figures["learner_gb"] = 64.6
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(ends, Setting(directory=tmp_path, work=tmp_path, is_dry=True))
    found = json.loads((tmp_path / FOUND).read_text())
    assert found == {"outcome": "failed", "reason": "was interrupted", "figures": {"learner_gb": 64.6}}


def test_the_stages_are_numbered_from_the_environment_on_and_the_guide_names_each() -> None:
    assert [stage.number for stage in STAGES] == list(range(11))
    assert STAGES[0].name == "environment"
    guide = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    for stage in STAGES:
        assert f"| {stage.number} `{stage.name}` |" in guide
