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
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.prompts import PromptStream
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult, GroupRequest, Portion
from slipstream.grpo.config import GrpoConfig, LoopConfig, LossConfig, OptimizerConfig, TooOld
from slipstream.grpo.update import Trained, Update
from slipstream.records.steps import DraftUpdate, Mismatch, RefitCheck, StepRecord, TrainStats
from slipstream.refit.channel import Exported
from slipstream.refit.fingerprint import ALL
from slipstream.refit.gate import Export
from slipstream.rewards.reward import RewardResult
from slipstream.train.asynchronous import AsyncLoop
from slipstream.train.batch import Pending, Scored, Submitted, Versions
from slipstream.train.checkpoints import Checkpoints
from slipstream.train.loop import Draft, Learner, SyncLoop, Trainer
from slipstream.train.queues import ThreadGroup
from slipstream.types import Arm, LoopMode, Prompt, Rollout, RolloutGroup, StageTimes, VersionSpan
from tests.unit.sampled import rollout as sampled

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
STEP = StepRecord(
    step=6,
    times=StageTimes(data_s=1.0, prepare_s=2.0, generation_s=4.0, logprob_s=8.0, train_s=16.0, step_s=32.0),
    reward_mean=0.125,
    num_rollouts=64,
    num_response_tokens=100,
    num_truncated=3,
    num_reward_timeouts=5,
    num_reward_crashes=6,
    num_reward_failures=8,
    reward_metrics={"length": 2.5},
    num_zero_signal_groups=7,
    train=TrainStats(loss=0.1, grad_norm=0.2, kl=0.3, clip_fraction=0.4, num_tokens=9, learning_rate=0.5),
    mismatch=Mismatch(k1=0.6, k3=0.7, mean=0.8, largest=0.9, outside_fraction=0.95),
    acceptance=None,
    policy_version=10,
    draft_version=None,
    refit=RefitCheck(num_tensors=11, elapsed_s=0.15),
    num_engine_restarts=12,
    engine_idle_fraction=0.25,
    longest_response_tokens=7,
    num_preemptions=14,
    num_filtered=15,
)
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


class BareLearner(Learner):
    """Refuses whatever it is asked; a fake answers what its test asks."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the learner is not to be asked this")

    logprobs = ref_logprobs = train_step = save_checkpoint = load_checkpoint = inspect_checkpoint = _refuse

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        """Nothing is written in the background."""


@dataclass
class World(BareLearner):
    """Learner, engines and the way of the weights between them; it notes what each was handed."""

    delays: Delays = field(default_factory=Delays)
    weights: str = START
    engine_weights: str = START
    version: int = -1
    draft: Draft = field(default_factory=Draft)
    drafts: dict[int, int | None] = field(default_factory=dict)  # version of the draft, by that of the policy
    calls: list[Any] = field(default_factory=list)  # of the learner and of the refits, in order
    generated: list[Any] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    scored: list[tuple[str, ...]] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)  # prompts, as the weights have learned from them
    exported: dict[int, str] = field(default_factory=dict)  # weights by version
    delivered: list[int] = field(default_factory=list)  # versions, as the engines were to take them
    frees_learner: bool = True

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        return self.deliver(self.export(version, draft_version=draft_version))

    def export(self, version: int, *, draft_version: int | None) -> Export:
        self.delays.wait()
        assert self.version in (version - 1, version, -1), (
            f"version {self.version} is delivered, the file of another is reused"
        )
        self.calls.append(("refit", version, draft_version, self.weights))
        self.exported[version] = self.weights
        return replace(export_of(version, draft_version=draft_version), frees_learner=self.frees_learner)

    def deliver(self, export: Export) -> RefitCheck:
        self.delivered.append(export.version)
        self.delays.wait()
        weights = self.exported.pop(export.version)
        assert self.frees_learner or weights == self.weights, "trained before the engines had its weights"
        self.engine_weights, self.version = weights, export.version
        self.drafts[export.version] = export.draft_version
        return RefitCheck(num_tensors=export.version, elapsed_s=0.0)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        version, weights = self.version, self.engine_weights
        self.delays.wait()
        assert (version, weights) == (self.version, self.engine_weights), "refitted while it generated"
        self.generated.append(([prompt.id for prompt in prompts], sampling, group_size, seed, version))
        versions = (version, self.drafts[version])
        groups = tuple(drawn(prompt, weights, f"{seed}", versions, group_size) for prompt in prompts)
        return GenerationResult(groups=groups, acceptance=None, generation_s=0.25)

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        return ()

    def score(self, groups: Sequence[RolloutGroup]) -> RewardResult:
        self.delays.wait()
        self.scored.append(tuple(group.prompt.id for group in groups))
        lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
        return RewardResult(rewards=tuple(float(length % 3) for length in lengths), num_timeouts=1, num_crashes=0)

    def train_step(self, update: Update) -> Trained:
        self.delays.wait()
        batch = update.batch
        self.calls.append(("train", self.weights))
        self.updates.append(update)
        self.trained += [str(ids[1]) for ids in batch.token_ids[::GROUP_SIZE]]
        self.weights = hashed(self.weights, batch.token_ids, batch.advantages, batch.rollout_logprobs)
        stats = replace(STEP.train, loss=int(self.weights[:6], 16) / 2**24)
        own = [np.full(len(row), -0.5, dtype=np.float32) for row in batch.rollout_logprobs]
        draft = DraftUpdate(loss=1.0, num_updates=1, elapsed_s=0.0) if update.trains_draft else None
        return Trained(stats=stats, own_logprobs=own, draft=draft)

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        path.mkdir(parents=True)
        (path / "state.json").write_text(json.dumps({"weights": self.weights, "trained": self.trained, "extra": extra}))

    def inspect_checkpoint(self, path: Path) -> dict[str, Any]:
        return json.loads((path / "state.json").read_text())["extra"]

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        state = json.loads((path / "state.json").read_text())
        self.weights, self.trained = state["weights"], state["trained"]
        return state["extra"]


def export_of(version: int, *, draft_version: int | None = None) -> Export:
    """Of weights that nobody compares."""
    weights: dict[str, Any] = {"weights": Exported(policy_version=version), "policy": None, "draft": None}
    how: dict[str, Any] = {"turn": ALL, "draft_turn": ALL, "frees_learner": True}
    return Export(version=version, draft_version=draft_version, **weights, **how)


def scored(index: int = 0, *, generated_s: float = 0.0) -> Scored:
    """No rollouts, without rewards."""
    result = GenerationResult(groups=(), acceptance=None, generation_s=0.0)
    rewards = RewardResult(rewards=(), num_timeouts=0, num_crashes=0)
    return Scored(index=index, result=result, rewards=rewards, generated_s=generated_s)


def drawn(prompt: Prompt, weights: str, seed: str, versions: Versions, group_size: int) -> RolloutGroup:
    def rollout(sample: int) -> Rollout:
        source = random.Random(f"{weights}/{prompt.id}/{seed}/{sample}")
        tokens = tuple(source.randrange(3, 50) for _ in range(source.randrange(1, 8)))
        logprobs = tuple(-source.random() for _ in tokens)
        return sampled(tokens, logprobs, prompt_id=prompt.id, policy_version=versions[0], draft_version=versions[1])

    return RolloutGroup(prompt=prompt, rollouts=tuple(rollout(sample) for sample in range(group_size)))


def synchronous(world: World) -> list[StepRecord]:
    """Train with the synchronous loop."""
    records: list[StepRecord] = []
    SyncLoop(
        arm=Arm.AUTOREGRESSIVE,
        engine=world,
        gate=world,
        prompts=STREAM,
        score=world.score,
        trainer=_trainer(world, CONFIG),
        on_step=records.append,
    ).run(start_step=0)
    return records


def one_step_off(world: World, lag: int, **how: Any) -> list[StepRecord]:
    """Train with the loop that runs `lag` batches behind."""
    return _asynchronous(world, LoopConfig(mode=LoopMode.ONE_STEP_OFF, max_off_policy_steps=lag), **how)


def in_flight(world: FlightWorld, lag: int, *, too_old: TooOld = TooOld.FINISH, **how: Any) -> list[StepRecord]:
    """Train with engines that never stop."""
    loop = LoopConfig(mode=LoopMode.IN_FLIGHT, max_off_policy_steps=lag, too_old=too_old)
    return _asynchronous(world, loop, **how)


def _asynchronous(
    world: World,
    loop: LoopConfig,
    *,
    directory: Path | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    threads: ThreadGroup | None = None,
) -> list[StepRecord]:
    """Train, from the last checkpoint of `directory` if that is given; one is written there after each step."""
    checkpoints = None if directory is None else Checkpoints(directory=directory, recipe="a recipe")
    history, saved = ([], None) if checkpoints is None else checkpoints.restore(world)

    def step_done(record: StepRecord, waiting: Pending | None = None) -> None:
        history.append(record)
        assert checkpoints is not None or waiting is None, "nobody keeps what was generated and not trained on"
        if checkpoints is not None and waiting is not None:
            checkpoints.save(world, history, waiting.to_bytes())
        on_step(record)

    config = replace(CONFIG, checkpoint_every_steps=NUM_STEPS + 1 if directory is None else 1)
    engines: Any = world
    AsyncLoop(
        arm=Arm.AUTOREGRESSIVE,
        engines=engines,
        prompts=STREAM,
        score=world.score,
        trainer=_trainer(world, config, draft=world.draft, max_lag=loop.max_off_policy_steps),
        loop=loop,
        on_step=step_done,
        threads=threads or ThreadGroup(),
        pending=Pending() if saved is None else Pending.from_bytes(saved),
        submitted=None if directory is None else Submitted(directory / "submitted"),
    ).run(start_step=len(history))
    return history


@dataclass
class _Flying:
    """A group under way: each rollout's tokens so far, and how many it will have."""

    request: GroupRequest
    versions: list[list[int]]  # of each token of each rollout
    lengths: list[int]


@dataclass
class FlightWorld(World):
    """Its engines take one token a rollout and call; a few rollouts are ten times as long as the others."""

    lag: int = 1
    flying: dict[int, _Flying] = field(default_factory=dict)
    submitted: list[int] = field(default_factory=list)  # group indices, in order
    submitted_seeds: list[tuple[int, ...]] = field(default_factory=list)  # of the same groups
    completed: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of all rollouts that came back
    num_restarts: int = 0
    is_busy: bool = False

    def deliver(self, export: Export) -> RefitCheck:
        assert not self.is_busy, "refitted inside an iteration"
        return super().deliver(export)

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig = SAMPLING) -> None:
        for request in requests:
            assert request.index < (self.version + self.lag + 1) * PROMPTS_PER_STEP, "further ahead than the lag allows"
            step, place = divmod(request.index, PROMPTS_PER_STEP)
            assert request.prompt == STREAM.batch(step)[place]
            self.submitted.append(request.index)
            self.submitted_seeds.append(request.seeds)
            self.flying[request.index] = _Flying(
                request=request, versions=[[] for _ in request.seeds], lengths=[length_of(s) for s in request.seeds]
            )

    def advance(self, *, max_s: float) -> Portion:
        self.is_busy = True
        self.delays.wait()
        done = []
        for index, group in list(self.flying.items()):
            for versions, length in zip(group.versions, group.lengths, strict=True):
                versions += [self.version] * (len(versions) < length)
            if all(len(tokens) == length for tokens, length in zip(group.versions, group.lengths, strict=True)):
                done.append((index, self._landed(self.flying.pop(index))))
        self.completed += [index for index, _ in done]
        self.is_busy = False
        return Portion(groups=tuple(done), acceptance=None, started_s=0.0, ended_s=0.0)

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        num = 0
        for group in [self.flying[index] for index in indices]:
            group.request = replace(group.request, seeds=seeds(group.request))
            for place, seed in enumerate(group.request.seeds):
                if len(group.versions[place]) < group.lengths[place]:
                    group.versions[place], group.lengths[place] = [], length_of(seed)
                    num += 1
        self.num_restarts += num
        return num

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        return tuple(group.request for group in self.flying.values())

    def _landed(self, group: _Flying) -> RolloutGroup:
        self.lengths += group.lengths
        prompt, drafts = group.request.prompt, self.drafts

        def rollout(seed: int, versions: list[int]) -> Rollout:
            first, runs = versions[0], [(version, len(list(tokens))) for version, tokens in groupby(versions)]
            spans = [VersionSpan(policy_version=v, draft_version=drafts[v], num_tokens=num) for v, num in runs]
            how: dict[str, Any] = {"policy_version": first, "draft_version": drafts[first], "versions": tuple(spans)}
            tokens = tuple(3 + (seed + place) % 40 for place in range(len(versions)))
            return sampled(tokens, -0.5, prompt_id=prompt.id, **how)

        return RolloutGroup(prompt=prompt, rollouts=tuple(map(rollout, group.request.seeds, group.versions)))


def length_of(seed: int) -> int:
    """One rollout in eight is long."""
    return 40 if seed % 8 == 0 else 1 + seed % 4


def timeless(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Without what the clock said."""
    return [replace(record, times=NO_TIMES, overlap=None, machine=None, ended_at_s=0.0) for record in records]


def _trainer(world: Any, config: GrpoConfig, **others: Any) -> Trainer:
    return Trainer(learner=world, config=config, sampling=SAMPLING, **others)
