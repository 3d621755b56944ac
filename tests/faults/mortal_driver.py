"""A driver of `test_killed_drivers.py`: it trains arms, and SIGKILL ends engine, learner or itself on the way.

    python -m tests.faults.mortal_driver POLICY DRAFT DIRECTORY LIFE

What its learner was given is noted in `DIRECTORY/LOOP/trained.jsonl`, a line a step.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import merge
from slipstream.data.prompts import PromptStream
from slipstream.drafts import length
from slipstream.drafts.length import constant
from slipstream.grpo.update import Trained, Update
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import write_record
from slipstream.types import Arm, Prompt
from tests.small import RECIPE, additions, odd_sum

NUM_STEPS, PROMPTS_PER_STEP, GROUP_SIZE, K = 8, 2, 4, 2
_LOSS = {"correction": "token", "truncated_importance_sampling": 2.0}
_GRPO = {"num_steps": NUM_STEPS, "prompts_per_step": PROMPTS_PER_STEP, "group_size": GROUP_SIZE, "loss": _LOSS}


@dataclass(frozen=True, kw_only=True)
class Deaths:
    """Deaths in one training: of a process in the n-th call of a method, and of the driver.

    Attributes:
        own: after which step, and how many seconds later.
    """

    engine: tuple[str, int] = ("", 0)
    learner: tuple[str, int] = ("", 0)
    own: tuple[int, float] = (-1, 0.0)


@dataclass(frozen=True, kw_only=True)
class Training:
    mode: str
    deaths: Deaths = field(default_factory=Deaths)


LIVES = (
    # Before the first checkpoint, while engine and learner work.
    (Training(mode="one_step_off", deaths=Deaths(own=(0, 0.1))),),
    (
        Training(mode="one_step_off", deaths=Deaths(engine=("generate", 3), learner=("train_step", 6))),
        Training(mode="in_flight", deaths=Deaths(own=(3, 0.03))),  # while a checkpoint is being written
    ),
    # While the learner writes its second policy; of the step before it wrote the policy and the draft.
    (Training(mode="in_flight", deaths=Deaths(engine=("advance", 2), learner=("start_publish", 3))),),
)


class Mortal:
    """Engines or a learner; one process of theirs is killed in the n-th call of a method."""

    def __init__(self, target: Any, actor: Any, death: tuple[str, int]) -> None:
        import ray

        self._target = target
        self._method, self._calls_left = death
        self._pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._calls_left -= 1
            if self._calls_left == 0:
                threading.Timer(0.001, os.kill, [self._pid, signal.SIGKILL]).start()
        return getattr(self._target, name)


class NotedLearner(Mortal):
    """Notes the prompts of every step that it trained."""

    def __init__(self, learner: Any, death: tuple[str, int], note: Callable[[Update], None]) -> None:
        super().__init__(learner, learner.workers[0].actor, death)
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
    from slipstream.drafts.methods import speculative_config
    from slipstream.train import arm
    from slipstream.workers import engines, learners

    length.PATIENCE_STEPS = 2
    recipe, deaths, prompts = recipe_of(training.mode), training.deaths, all_prompts(policy)
    schedule = constant(K) if recipe.draft.autopilot else ()
    directory.mkdir(parents=True, exist_ok=True)
    by_tokens = {prompt.token_ids: prompt.id for prompt in prompts}
    left = [deaths.learner]

    def note(update: Update) -> None:
        batch = update.batch
        ids = [by_tokens[tuple(row[:n])] for row, n in zip(batch.token_ids, batch.prompt_lengths, strict=True)]
        assert all(len(set(ids[i : i + GROUP_SIZE])) == 1 for i in range(0, len(ids), GROUP_SIZE))
        with (directory / "trained.jsonl").open("a") as file:
            file.write(json.dumps([batch.policy_version, ids[::GROUP_SIZE]]) + "\n")

    def log(metrics: Mapping[str, float], step: int) -> None:
        if step == deaths.own[0]:
            threading.Timer(deaths.own[1], os.kill, [os.getpid(), signal.SIGKILL]).start()

    @contextmanager
    def start_engine() -> Iterator[Any]:
        speculative = speculative_config(recipe.draft, draft, K, schedule=schedule)
        kv_cache = recipe.loop.in_flight_kv_cache
        with engines.start_engine(
            policy, config=recipe.engine, speculative_config=speculative, kv_cache=kv_cache
        ) as engine:
            yield Mortal(engine, engine.workers[0].actor, deaths.engine)

    @contextmanager
    def start_learner(config: Any, **where: Any) -> Iterator[Any]:
        with learners.start_learner(config, **where) as learner:
            yield NotedLearner(learner, left.pop() if left else ("", 0), note)

    arm.start_learner = start_learner
    plan = arm.ArmPlan(
        arm=Arm.SPECULATIVE, num_speculative_tokens=K, draft=draft, start_engine=start_engine, schedule=schedule
    )
    run = arm.Run(
        recipe=recipe, plan=plan, policy=policy, prompts=prompts, decode=odd_sum, directory=directory, log=log
    )
    record = run.train()
    write_record(record, directory / "arm.json")


def main(policy: Path, draft: Path, directory: Path, life: int) -> None:
    from slipstream.workers.session import connect

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    connect()
    for training in LIVES[life]:
        train(training, policy, draft, directory / training.mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
