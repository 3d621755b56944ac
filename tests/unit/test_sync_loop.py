"""The GRPO loop, with a learner and an engine that satisfy the protocols and note what they are asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.data.prompts import PromptStream
from slipstream.grpo.config import GrpoConfig
from slipstream.grpo.loss import LossConfig
from slipstream.loop.batch import assemble, mismatch
from slipstream.loop.sync import SyncLoop
from slipstream.policy.config import OptimizerConfig
from slipstream.policy.stats import TrainStats
from slipstream.records import RefitCheck, StepRecord
from slipstream.rewards.verifier import RewardResult
from slipstream.rollout.config import SamplingConfig
from slipstream.rollout.engine import GenerationResult
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup, TrainBatch

PROMPTS = tuple(Prompt(id=str(i), text=str(i), token_ids=(1, i), answer="7") for i in range(4))


class FakeEngine:
    """Answers `7` with the version it was last given; `stuck` engines never take a refit."""

    def __init__(self, *, stuck: bool = False) -> None:
        self.version, self.stuck = 0, stuck
        self.seeds: list[int] = []

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        self.seeds.append(seed)
        rollouts = [
            Rollout(
                prompt_id=prompt.id,
                token_ids=(7, 2),
                rollout_logprobs=(-0.5, -0.25),
                finish_reason=FinishReason.STOP,
                policy_version=self.version,
                draft_version=None,
            )
            for prompt in prompts
        ]
        groups = tuple(
            RolloutGroup(prompt=p, rollouts=(r,) * group_size) for p, r in zip(prompts, rollouts, strict=True)
        )
        return GenerationResult(groups=groups, acceptance=None, generation_s=0.0)

    def close(self) -> None:
        pass


class FakeGate:
    """Tells the engine the new version."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def refit(self, version: int) -> RefitCheck:
        if not self.engine.stuck:
            self.engine.version = version
        return RefitCheck(num_tensors=3, elapsed_s=0.0)


class FakeLearner:
    """Counts updates."""

    def __init__(self) -> None:
        self.batches: list[TrainBatch] = []

    def logprobs(self, batch: TrainBatch, temperature: float) -> list[Any]:
        return [np.array([-0.5, -0.5], dtype=np.float32) for _ in batch.token_ids]

    def ref_logprobs(self, batch: TrainBatch, temperature: float) -> None:
        return None

    def train_step(
        self, batch: TrainBatch, trainer_logprobs: list[Any], ref_logprobs: Any, loss: LossConfig, temperature: float
    ) -> TrainStats:
        self.batches.append(batch)
        return TrainStats(loss=0.1, grad_norm=1.0, kl=0.0, clip_fraction=0.0, num_tokens=8, learning_rate=1e-4)

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        raise AssertionError("the loop itself saves nothing")

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        raise AssertionError("the loop itself loads nothing")


def _loop(engine: FakeEngine, learner: FakeLearner, records: list[StepRecord]) -> SyncLoop:
    def score(groups: Sequence[RolloutGroup]) -> RewardResult:
        return RewardResult(rewards=(1.0, 0.0, 1.0, 1.0), num_timeouts=0, num_crashes=0)

    return SyncLoop(
        engine=engine,
        learner=learner,
        prompts=PromptStream(prompts=PROMPTS, batch_size=2, seed=0),
        score=score,
        config=GrpoConfig(
            num_steps=3, prompts_per_step=2, group_size=2, optimizer=OptimizerConfig(learning_rate=1e-4), seed=5
        ),
        sampling=SamplingConfig(max_response_tokens=4),
        gate=FakeGate(engine),
        on_step=records.append,
    )


def test_a_step_generates_with_the_newest_policy_and_learns_once() -> None:
    engine, learner, records = FakeEngine(), FakeLearner(), []
    _loop(engine, learner, records).run(start_step=0)
    assert [record.policy_version for record in records] == [0, 1, 2]
    assert [batch.advantages for batch in learner.batches] == [(0.5, -0.5, 0.0, 0.0)] * 3
    first = records[0]
    assert (first.reward_mean, first.num_zero_signal_groups, first.num_response_tokens) == (0.75, 1, 8)
    assert first.mismatch_kl == pytest.approx(0.125)  # mean of 0 and 0.25
    assert first.mismatch_max == pytest.approx(0.25)


def test_the_five_stages_add_up_to_the_step() -> None:
    records: list[StepRecord] = []
    _loop(FakeEngine(), FakeLearner(), records).run(start_step=0)
    for record in records:
        assert sum(record.times.by_stage().values()) <= record.times.step_s


def test_a_resumed_loop_sees_the_prompts_and_seeds_of_an_uninterrupted_one() -> None:
    whole, resumed = FakeEngine(), FakeEngine()
    learners = FakeLearner(), FakeLearner()
    _loop(whole, learners[0], []).run(start_step=0)
    _loop(resumed, learners[1], []).run(start_step=2)
    assert len(set(whole.seeds)) == 3
    assert resumed.seeds == whole.seeds[2:]
    assert learners[1].batches == learners[0].batches[2:]


def test_rollouts_of_a_policy_that_was_not_refitted_stop_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"must come from policy version 1, got \[0\]"):
        _loop(FakeEngine(stuck=True), FakeLearner(), []).run(start_step=0)


def test_rollouts_of_another_draft_stop_the_run() -> None:
    group = FakeEngine().generate(PROMPTS[:1], sampling=SamplingConfig(max_response_tokens=2), group_size=2, seed=0)

    with pytest.raises(RuntimeError, match=r"must come from draft version 3, got \{None\}"):
        assemble(group.groups, [1.0, 0.0], policy_version=0, draft_version=3, scale_by_std=False)


def test_mismatch_by_hand() -> None:
    """Gaps (rollout - trainer) of 0 and log 4: ratios 1 and 1/4, so k1 = log(4) / 2 and k3 = (1/4 - 1 + log 4) / 2."""
    gap = mismatch([(-1.0, -1.0)], [np.array([-1.0, -1.0 - np.log(4.0)], dtype=np.float32)], band=(0.5, 2.0))

    assert gap.k1 == pytest.approx(np.log(4.0) / 2, abs=1e-6)
    assert gap.k3 == pytest.approx((np.log(4.0) - 0.75) / 2, abs=1e-6)
    assert gap.mean == gap.k1
    assert gap.outside_fraction == 0.5


def test_a_nan_logprob_stops_the_run() -> None:
    with pytest.raises(FloatingPointError, match="1 response tokens have a NaN"):
        mismatch([(0.0, float("nan"))], [np.zeros(2, dtype=np.float32)])


def test_assemble_joins_prompt_and_response() -> None:
    group = FakeEngine().generate(PROMPTS[:1], sampling=SamplingConfig(max_response_tokens=2), group_size=2, seed=0)
    batch = assemble(group.groups, [1.0, 0.0], policy_version=0, draft_version=None, scale_by_std=False)
    assert batch.token_ids == ((1, 0, 7, 2), (1, 0, 7, 2))
    assert batch.prompt_lengths == (2, 2)
    assert batch.rollout_logprobs == ((-0.5, -0.25),) * 2
