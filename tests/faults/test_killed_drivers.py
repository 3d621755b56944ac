"""SIGKILL on engine, learner and driver of asynchronous runs: no group is trained on twice, and none is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.records.files import read_record
from slipstream.records.steps import ArmRecord
from slipstream.refit.channel import discard_transfers
from tests.faults.mortal_driver import GROUP_SIZE, LIVES, NUM_STEPS, PROMPTS_PER_STEP, batches

pytestmark = pytest.mark.slow

_LIFE_S = 300.0  # on a busy machine
_KILLED = -signal.SIGKILL
_SHOWN = 3000  # last characters of each driver's output in a failure: the error is at its end


def live(life: int, policy: Path, draft: Path, directory: Path) -> tuple[int, str]:
    """Run a driver on the Ray of these tests; return its exit status and its output."""
    import ray

    log = directory / f"life-{life}.log"
    command = [sys.executable, "-m", "tests.faults.mortal_driver", str(policy), str(draft), str(directory), str(life)]
    with log.open("w") as file:
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(_LIFE_S)
        finally:
            process.kill()
    discard_transfers(process.pid)
    return status, log.read_text()


def trained(directory: Path) -> list[list[str]]:
    """The prompts of each step as the final weights have learned from them: of what was repeated, the last time."""
    lines = [json.loads(line) for line in (directory / "trained.jsonl").read_text().splitlines()]
    assert len(lines) > NUM_STEPS, "some step must have been repeated"
    by_step = {step: prompts for step, prompts in lines}
    assert sorted(by_step) == list(range(NUM_STEPS))
    return [by_step[step] for step in range(NUM_STEPS)]


def check_record(record: ArmRecord) -> None:
    """All steps are there, none learned from what was too old, and the draft was trained and sent at every one."""
    assert [step.step for step in record.steps] == list(range(NUM_STEPS))
    assert [step.num_rollouts for step in record.steps] == [PROMPTS_PER_STEP * GROUP_SIZE] * NUM_STEPS
    assert max(lag.lag for step in record.steps for lag in step.lags) == 1
    assert all(step.draft_update is not None for step in record.steps)


def num_regenerated(record: ArmRecord) -> int:
    return sum(step.overlap.num_regenerated for step in record.steps if step.overlap is not None)


def test_every_group_is_trained_on_once_whoever_is_killed(
    tmp_path: Path,
    make_policy: Callable[[Path, int], Path],
    make_draft: Callable[[Path, Path, int], Path],
    ray_session: None,
) -> None:
    """`LIVES` says who dies when."""
    policy = make_policy(tmp_path / "policy", 0)
    draft = make_draft(tmp_path / "draft", policy, 1)

    ended, logs = zip(*(live(life, policy, draft, tmp_path) for life in range(len(LIVES))), strict=True)

    assert ended == (_KILLED, _KILLED, 0), "\n".join(log[-_SHOWN:] for log in logs)
    for log, engine_at in ((logs[1], "generate"), (logs[2], "generation in flight")):
        assert f"died during {engine_at}" in log, log
        assert "the learner restarts from its last checkpoint" in log, log
    assert "resuming from step-00000" in logs[2]

    submitted = batches(policy)
    assert trained(tmp_path / "one_step_off") == submitted
    in_flight = [prompt for batch in trained(tmp_path / "in_flight") for prompt in batch]
    assert sorted(in_flight) == sorted(prompt for batch in submitted for prompt in batch)
    records = {loop: read_record(ArmRecord, tmp_path / loop / "arm.json") for loop in ("one_step_off", "in_flight")}
    for record in records.values():
        check_record(record)
        assert num_regenerated(record) >= GROUP_SIZE  # what died with a process was drawn again, and counted
    piloted = [step.autopilot for step in records["one_step_off"].steps if step.autopilot is not None]
    assert len(piloted) == NUM_STEPS
    assert any(step.is_probe and not step.speculates for step in piloted)
