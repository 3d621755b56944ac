"""SIGKILL on engine, learner and driver of asynchronous runs: no group is trained on twice, and none is lost.

This file is the driver too: it trains arms, and SIGKILL ends engine, learner or itself on the way.

    python -m tests.faults.test_killed_drivers POLICY DRAFT DIRECTORY LIFE

What its learner was given is noted in `DIRECTORY/LOOP/trained.jsonl`, a line a step.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from slipstream.config import merge
from slipstream.data.prompts import PromptStream
from slipstream.drafts import length
from slipstream.drafts.length import constant
from slipstream.grpo.update import Trained, Update
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.steps import ArmRecord
from slipstream.refit.channel import discard_transfers
from slipstream.train import arm
from slipstream.types import Prompt
from slipstream.workers import learners
from slipstream.workers.session import connect
from tests.small import RECIPE, additions, train_arm

pytestmark = pytest.mark.slow

NUM_STEPS, PROMPTS_PER_STEP, GROUP_SIZE, K = 8, 2, 4, 2
_LOSS = {"correction": "token", "truncated_importance_sampling": 2.0}
_GRPO = {"num_steps": NUM_STEPS, "prompts_per_step": PROMPTS_PER_STEP, "group_size": GROUP_SIZE, "loss": _LOSS}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training, in which a process dies in the n-th call of a method, and the driver.

    Attributes:
        own: after which step, and how many seconds later.
    """

    mode: str
    engine: tuple[str, int] = ("", 0)
    learner: tuple[str, int] = ("", 0)
    own: tuple[int, float] = (-1, 0.0)


LIVES = (
    # Before the first checkpoint, while engine and learner work.
    (Training(mode="one_step_off", own=(0, 0.1)),),
    (
        Training(mode="one_step_off", engine=("generate", 3), learner=("train_step", 6)),
        Training(mode="in_flight", own=(3, 0.03)),  # while a checkpoint is being written
    ),
    # While the learner writes its second policy; of the step before it wrote the policy and the draft.
    (Training(mode="in_flight", engine=("advance", 2), learner=("start_publish", 3)),),
)


class Mortal:
    """Engines or a learner; the first of their processes is killed in the n-th call of a method."""

    def __init__(self, target: Any, death: tuple[str, int]) -> None:
        self._target = target
        self._method, self._calls_left = death

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._calls_left -= 1
            if self._calls_left == 0:
                pid = self._target.workers[0].pid
                os.kill(pid, signal.SIGSTOP)  # so that it cannot be done before it is killed
                threading.Timer(0.1, os.kill, [pid, signal.SIGKILL]).start()
        return getattr(self._target, name)


class NotedLearner(Mortal):
    """Notes the prompts of every step that it trained."""

    def __init__(self, learner: Any, death: tuple[str, int], note: Callable[[Update], None]) -> None:
        super().__init__(learner, death)
        self._note = note

    def train_step(self, update: Update) -> Trained:
        trained = self.__getattr__("train_step")(update)
        self._note(update)
        return trained


def recipe_of(mode: str) -> Recipe:
    """Recipe of an arm whose draft learns at every step; the autopilot watches where it can, and tries k = 0."""
    draft = {"online": {"when": "always"}, "autopilot": mode == "one_step_off"}
    changes = {"grpo": _GRPO, "draft": draft, "loop": {"mode": mode, "max_off_policy_steps": 1}}
    return load_recipe("tiny", overrides=merge(RECIPE, changes))


def all_prompts(policy: Path) -> tuple[Prompt, ...]:
    """Prompts of the whole training, each of which is trained on once."""
    return tuple(additions(policy, num=NUM_STEPS * PROMPTS_PER_STEP))


def batches(policy: Path) -> list[list[str]]:
    """The prompts of each step in the order in which they are submitted."""
    grpo = recipe_of("one_step_off").grpo
    stream = PromptStream(prompts=all_prompts(policy), batch_size=PROMPTS_PER_STEP, seed=grpo.seed)
    return [[prompt.id for prompt in stream.batch(step)] for step in range(NUM_STEPS)]


def train(training: Training, policy: Path, draft: Path, directory: Path) -> None:
    """Train from the last checkpoint, if there is one."""
    length.PATIENCE_STEPS = 2
    recipe, prompts, deaths = recipe_of(training.mode), all_prompts(policy), [training.learner]
    by_tokens = {prompt.token_ids: prompt.id for prompt in prompts}

    def note(update: Update) -> None:
        batch = update.batch
        ids = [by_tokens[tuple(row[:n])] for row, n in zip(batch.token_ids, batch.prompt_lengths, strict=True)]
        assert all(len(set(ids[i : i + GROUP_SIZE])) == 1 for i in range(0, len(ids), GROUP_SIZE))
        with (directory / "trained.jsonl").open("a") as file:
            file.write(json.dumps([batch.policy_version, ids[::GROUP_SIZE]]) + "\n")

    def log(metrics: Mapping[str, float], step: int) -> None:
        if step == training.own[0]:
            threading.Timer(training.own[1], os.kill, [os.getpid(), signal.SIGKILL]).start()

    @contextmanager
    def start_learner(config: Any, **where: Any) -> Iterator[Any]:
        with learners.start_learner(config, **where) as learner:
            yield NotedLearner(learner, deaths.pop() if deaths else ("", 0), note)

    arm.start_learner = start_learner
    how: dict[str, Any] = {"schedule": constant(K) if recipe.draft.autopilot else (), "log": log}
    mortal = partial(Mortal, death=training.engine)
    record = train_arm(recipe, policy, directory, prompts=prompts, k=K, draft=draft, within=mortal, **how)
    write_record(record, directory / "arm.json")


def main(policy: Path, draft: Path, directory: Path, life: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    connect()
    for training in LIVES[life]:
        train(training, policy, draft, directory / training.mode)


_LIFE_S = 300.0  # on a busy machine
_KILLED = -signal.SIGKILL
_SHOWN = 3000  # last characters of each driver's output in a failure: the error is at its end


def live(life: int, policy: Path, draft: Path, directory: Path) -> tuple[int, str]:
    """Run a driver on the Ray of these tests; return its exit status and its output."""
    log = directory / f"life-{life}.log"
    command = [sys.executable, "-m", "tests.faults.test_killed_drivers", policy, draft, directory, str(life)]
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
    # What died with a process was drawn again, and counted.
    assert sum(step.overlap.num_regenerated for step in record.steps if step.overlap is not None) >= GROUP_SIZE


def test_every_group_is_trained_on_once_whoever_is_killed(
    tmp_path: Path, policy: Path, make_draft: Callable[[Path, Path, int], Path], ray_session: None
) -> None:
    """`LIVES` says who dies when."""
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
    piloted = [step.autopilot for step in records["one_step_off"].steps if step.autopilot is not None]
    assert len(piloted) == NUM_STEPS
    assert any(step.is_probe and not step.speculates for step in piloted)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
