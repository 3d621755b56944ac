"""The runner of gpu-check: a stage that fails, hangs or crashes is one line among the others, and all is archived."""

import json
import os
import signal
import tarfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.gpu_check import check_command
from slipstream.gpu_check.check_command import FOUND, LINES, STAGES, Line, Stage, run_stage, run_stages
from slipstream.gpu_check.check_stages import Setting, Skipped, apart


def passes(at: Setting) -> None:
    at.figures["seconds_of_it"] = 1.5
    os.write(1, b"all is well\n")


def hangs(at: Setting) -> None:
    passes(at)
    time.sleep(100)


def crashes(at: Setting) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(at: Setting) -> None:
    os._exit(3)


def leaves_a_process(at: Setting) -> None:
    """End, and leave a process in a session of its own, as Ray does."""
    if (pid := os.fork()) == 0:
        os.setsid()
        time.sleep(100)
    at.figures["pid"] = pid


def asks_another_process(at: Setting) -> None:
    at.figures["is_another"] = apart(at, os.getpid) != os.getpid()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "check").mkdir()
    return tmp_path / "check"


def stage(number: int, work: Callable[[Setting], None], *, limit_s: float = 60.0) -> Stage:
    return Stage(number, work, limit_s, not_exercised=("a GPU",))


def forked(stages: list[Stage], output: Path, *, is_dry: bool = True, **options: Any) -> list[Line]:
    """Run the stages as a check without a GPU does, but for Ray."""
    context = get_context("forkserver")
    context.set_forkserver_preload([check_command.__name__])
    return run_stages(stages, output, nullcontext(context), is_dry=is_dry, **options)


def outcomes(lines: list[Line]) -> list[tuple[int, str, str]]:
    return [(line.stage, line.outcome, line.reason) for line in lines]


def archived(output: Path) -> Mapping[str, bytes]:
    with tarfile.open(output.with_suffix(".tar.gz")) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def test_a_stage_that_hangs_crashes_or_exits_is_named_and_the_next_runs(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "_PATIENCE", 1)
    stages = [stage(1, crashes), stage(2, exits), stage(3, hangs, limit_s=5.0), stage(4, passes)]
    told: list[Line] = []

    lines = forked(stages, output, on_line=told.append)

    assert outcomes(lines) == [
        (1, "failed", "ended by SIGSEGV without a result: see log.txt"),
        (2, "failed", "ended with status 3 without a result: see log.txt"),
        (3, "failed", "did not end within its 5 s: log.txt ends with every stack"),
        (4, "passed", ""),
    ]
    assert told == lines
    assert lines[2].figures == lines[3].figures == {"seconds_of_it": 1.5}
    assert {line.not_exercised for line in lines} == {("a GPU",)}
    files = archived(output)
    written = [json.loads(line) for line in files[f"check/{LINES}"].splitlines()]
    assert [(line["stage"], line["outcome"]) for line in written] == [(line.stage, line.outcome) for line in lines]
    assert files["check/04_passes/log.txt"] == b"all is well\n"
    assert b"in hangs" in files["check/03_hangs/log.txt"]  # the stack
    assert b"numpy==" in files["check/packages.txt"]
    assert b"Python 3" in files["check/machine.txt"]


def test_a_stage_leaves_no_process(tmp_path: Path) -> None:
    (line,) = forked([stage(1, leaves_a_process)], tmp_path)
    assert line.outcome == "passed"
    assert not psutil.pid_exists(line.figures["pid"])


def test_on_a_gpu_stages_run_in_fresh_processes_and_start_fresh_ones(tmp_path: Path) -> None:
    (line,) = run_stages([stage(1, asks_another_process)], tmp_path, nullcontext(get_context("spawn")))
    assert (line.outcome, line.figures, line.not_exercised) == ("passed", {"is_another": True}, ())


def test_nothing_runs_after_an_environment_that_lacks_something_but_all_is_archived(output: Path) -> None:
    lines = forked([stage(0, exits), stage(1, passes)], output, is_dry=False)
    reason = "stage 0 failed: ended with status 3 without a result: see log.txt"
    assert outcomes(lines)[1:] == [(1, "skipped", reason)]
    assert "check/00_exits/log.txt" in archived(output)
    assert not (output / "01_passes").exists()


def test_an_interrupted_check_is_archived_with_what_it_has(output: Path) -> None:
    def interrupt(line: Line) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forked([stage(1, passes), stage(2, passes)], output, on_line=interrupt)
    assert json.loads(archived(output)[f"check/{LINES}"])["stage"] == 1


def test_a_stage_that_raises_or_is_interrupted_keeps_what_it_measured_before(tmp_path: Path) -> None:
    def raises(at: Setting) -> None:
        at.figures["start_s"] = 2.0
        raise ValueError("must be 1, got 2")

    def lacks(at: Setting) -> None:
        raise Skipped("needs two GPUs, and this machine has 1")

    def ends(at: Setting) -> None:
        at.figures["learner_gb"] = 64.6
        raise KeyboardInterrupt

    for work, *expected in (
        (raises, "failed", "ValueError: must be 1, got 2", {"start_s": 2.0}),
        (lacks, "skipped", "needs two GPUs, and this machine has 1", {}),
        (lambda at: None, "passed", "", {}),
        (ends, "failed", "was interrupted", {"learner_gb": 64.6}),
    ):
        with pytest.raises(KeyboardInterrupt) if work is ends else nullcontext():
            run_stage(work, Setting(directory=tmp_path, work=tmp_path, is_dry=True))
        found = json.loads((tmp_path / FOUND).read_text())
        assert found == dict(zip(("outcome", "reason", "figures"), expected, strict=True))


def test_the_stages_are_numbered_from_the_environment_on_and_the_guide_names_each() -> None:
    assert [stage.number for stage in STAGES] == list(range(11))
    assert STAGES[0].name == "environment"
    guide = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    for stage in STAGES:
        assert f"| {stage.number} `{stage.name}` |" in guide
