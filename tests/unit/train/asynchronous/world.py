"""A whole training of nothing: weights are a hash of all that was learned, and rollouts a function of weights and seed.

So two trainings end with the same weights only if every step of both learned from the same rollouts in the same order.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.prompts import PromptStream
from slipstream.grpo.config import GrpoConfig, LossConfig, OptimizerConfig
from slipstream.grpo.update import Trained, Update
from slipstream.records import RefitCheck, StepRecord, TrainStats
from slipstream.rewards.verifier import RewardResult
from slipstream.rollout.config import SamplingConfig
from slipstream.rollout.engine import GenerationResult
from slipstream.train.asynchronous.meeting import Meeting
from slipstream.train.asynchronous.one_step_off import OneStepOffLoop
from slipstream.train.asynchronous.pending import Pending, Tally
from slipstream.train.checkpoints import Checkpoints
from slipstream.train.loop import SyncLoop
from slipstream.train.step import Trainer
from slipstream.types import Arm, FinishReason, Prompt, Rollout, RolloutGroup, StageTimes

NUM_STEPS = 6
GROUP_SIZE = 2
PROMPTS_PER_STEP = 3
PROMPTS = tuple(Prompt(id=str(i), text=str(i), token_ids=(1, i), answer="7") for i in range(12))
STREAM = PromptStream(prompts=PROMPTS, batch_size=PROMPTS_PER_STEP, seed=0)
SAMPLING = SamplingConfig(temperature=0.5, max_response_tokens=8)
CONFIG = GrpoConfig(
    num_steps=NUM_STEPS,
    prompts_per_step=PROMPTS_PER_STEP,
    group_size=GROUP_SIZE,
    optimizer=OptimizerConfig(learning_rate=1e-4),
    loss=LossConfig(truncated_importance_sampling=2.0),
    seed=5,
)
NO_TIMES = StageTimes(data_s=0.0, prepare_s=0.0, generation_s=0.0, logprob_s=0.0, train_s=0.0, step_s=0.0)
START = "start"


def hashed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass
class Delays:
    """Of every call, at random but for seed None, which makes none."""

    seed: int | None = None
    longest_s: float = 0.01

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def wait(self) -> None:
        if self.seed is not None:
            time.sleep(self._random.random() * self.longest_s)


@dataclass
class World:
    """Learner, engines and the way of the weights between them; it notes what each was handed."""

    delays: Delays = field(default_factory=Delays)
    weights: str = START
    engine_weights: str = START
    version: int = -1
    calls: list[Any] = field(default_factory=list)  # of the learner and of the refits, in order
    generated: list[Any] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    scored: list[tuple[str, ...]] = field(default_factory=list)

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        self.delays.wait()
        self.calls.append(("refit", version, draft_version, self.weights))
        self.engine_weights, self.version = self.weights, version
        return RefitCheck(num_tensors=version, elapsed_s=0.0)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        version, weights = self.version, self.engine_weights
        self.delays.wait()
        assert (version, weights) == (self.version, self.engine_weights), "refitted while it generated"
        self.generated.append(([prompt.id for prompt in prompts], sampling, group_size, seed, version))
        groups = tuple(drawn(prompt, weights, f"{seed}", version, group_size) for prompt in prompts)
        return GenerationResult(groups=groups, acceptance=None, generation_s=0.25)

    def score(self, groups: Sequence[RolloutGroup]) -> RewardResult:
        self.delays.wait()
        self.scored.append(tuple(group.prompt.id for group in groups))
        lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
        return RewardResult(rewards=tuple(float(length % 3) for length in lengths), num_timeouts=1, num_crashes=0)

    def logprobs(self, batch: Any, temperature: float) -> list[Any]:
        raise AssertionError("one update a step needs no pass of its own")

    def ref_logprobs(self, batch: Any, temperature: float) -> None:
        raise AssertionError("there is no reference")

    def train_step(self, update: Update) -> Trained:
        self.delays.wait()
        batch = update.batch
        self.calls.append(("train", self.weights))
        self.updates.append(update)
        self.weights = hashed(self.weights, batch.token_ids, batch.advantages, batch.rollout_logprobs)
        stats = TrainStats(
            loss=int(self.weights[:6], 16) / 2**24, grad_norm=1.0, kl=0.0, clip_fraction=0.0, num_tokens=1, learning_rate=0.1
        )
        own = [np.full(len(row), -0.5, dtype=np.float32) for row in batch.rollout_logprobs]
        return Trained(stats=stats, own_logprobs=own)

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        path.mkdir(parents=True)
        (path / "state.json").write_text(json.dumps({"weights": self.weights, "extra": extra}))

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        """Nothing is written in the background."""

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        state = json.loads((path / "state.json").read_text())
        self.weights = state["weights"]
        return state["extra"]


def drawn(prompt: Prompt, weights: str, seed: str, version: int, group_size: int) -> RolloutGroup:
    def rollout(sample: int) -> Rollout:
        source = random.Random(f"{weights}/{prompt.id}/{seed}/{sample}")
        tokens = tuple(source.randrange(3, 50) for _ in range(source.randrange(1, 8)))
        return Rollout(
            prompt_id=prompt.id,
            token_ids=tokens,
            rollout_logprobs=tuple(-source.random() for _ in tokens),
            finish_reason=FinishReason.STOP,
            policy_version=version,
            draft_version=None,
        )

    return RolloutGroup(prompt=prompt, rollouts=tuple(rollout(sample) for sample in range(group_size)))


def synchronous(world: World) -> list[StepRecord]:
    """Train with the synchronous loop."""
    records: list[StepRecord] = []
    SyncLoop(
        arm=Arm.AUTOREGRESSIVE,
        engine=world,
        learner=world,
        gate=world,
        prompts=STREAM,
        score=world.score,
        config=CONFIG,
        sampling=SAMPLING,
        on_step=records.append,
    ).run(start_step=0)
    return records


def trainer_of(world: World, lag: int) -> Trainer:
    return Trainer(learner=world, config=CONFIG, temperature=SAMPLING.temperature, max_lag=lag)


def one_step_off(
    world: World,
    lag: int,
    *,
    directory: Path | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    meeting: Meeting | None = None,
) -> list[StepRecord]:
    """Train with the loop that runs `lag` batches behind; from the last checkpoint of `directory`, if that is given."""
    checkpoints = None if directory is None else Checkpoints(directory=directory, recipe="a recipe")
    history, pending = [], Pending()
    if checkpoints is not None:
        restored = checkpoints.restore(world)
        history = restored.steps
        pending = Pending() if restored.pending is None else Pending.from_bytes(restored.pending)

    def step_done(record: StepRecord, waiting: Pending | None = None) -> None:
        history.append(record)
        if checkpoints is not None:
            assert waiting is not None
            checkpoints.save(world, history, waiting.to_bytes())
        on_step(record)

    OneStepOffLoop(
        arm=Arm.AUTOREGRESSIVE,
        engine=world,
        gate=world,
        prompts=STREAM,
        score=world.score,
        trainer=trainer_of(world, lag),
        sampling=SAMPLING,
        lag=lag,
        on_step=step_done,
        meeting=meeting or Meeting(),
        pending=pending,
        tally=None if directory is None else Tally(directory / "submitted"),
    ).run(start_step=len(history))
    return history


def timeless(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Without what the clock said."""
    return [replace(record, times=NO_TIMES, overlap=None) for record in records]
