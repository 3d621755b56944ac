"""A draft that learns beside the policy, in the real loop between drawn rollouts and a real Megatron learner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from slipstream.data.prompts import PromptStream
from slipstream.drafts.config import DraftConfig, DraftOnline
from slipstream.drafts.learner_draft import Chats, LearnerDraft, sample_parts
from slipstream.drafts.trainer import DraftTrainer
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.config import GrpoConfig, OptimizerConfig
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.config import LearnerConfig, Recompute
from slipstream.records.steps import RefitCheck, StepRecord
from slipstream.refit.fingerprint import ALL, Turn, file_fingerprints, weight_totals
from slipstream.rewards.reward import RewardResult
from slipstream.train.checkpoints import Checkpoints
from slipstream.train.loop import Draft, SyncLoop, TrainedDraft, Trainer
from slipstream.types import Arm, Dtype, Prompt, Rollout, RolloutGroup
from slipstream.workers.learner_process import LearnerProcess
from tests.small import draft_with
from tests.unit.drafts.small import CHATS, CONFIG
from tests.unit.sampled import accepted, rollout
from tests.unit.train.world import BareLearner

ALWAYS = draft_with(
    CONFIG, online={"when": DraftOnline.ALWAYS, "optimizer": {"learning_rate": 1e-2}}, pretrain={"tokens_per_step": 40}
)
STREAM = tuple(Prompt(id=str(i), text=str(i), token_ids=(2, 5 + i), answer="") for i in range(4))
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, clip_grad=0.01)  # clips: a shared norm would show
GRPO = GrpoConfig(num_steps=4, prompts_per_step=2, group_size=2, optimizer=OPTIMIZER)
LEARNER = LearnerConfig(max_tokens_per_microbatch=32)
ACCEPTED = accepted(100, 80, 50, 20)


class DrawnRollouts:
    """Engine and gate at once: rollouts that depend on the seed alone, with the versions that it was refitted to."""

    def __init__(self) -> None:
        self.versions: list[tuple[int, int | None]] = []

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        self.versions.append((version, draft_version))
        return RefitCheck(num_tensors=0, elapsed_s=0.0)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        random = np.random.default_rng(seed)
        version, draft_version = self.versions[-1]

        def answers(prompt: Prompt) -> tuple[Rollout, ...]:
            drawn = [(*random.integers(5, 16, size=random.integers(3, 9)).tolist(), 3) for _ in range(group_size)]
            how: Any = {"prompt_id": prompt.id, "policy_version": version, "draft_version": draft_version}
            return tuple(rollout(tokens, -2.0, **how) for tokens in drawn)

        groups = tuple(RolloutGroup(prompt=prompt, rollouts=answers(prompt)) for prompt in prompts)
        return GenerationResult(groups=groups, acceptance=ACCEPTED, generation_s=1000.0)


def score(groups: Sequence[RolloutGroup]) -> RewardResult:
    lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    return RewardResult(rewards=tuple(float(length % 3) for length in lengths), num_timeouts=0, num_crashes=0)


def started(
    policy: Path, draft: Path, config: DraftConfig = ALWAYS, learner: LearnerConfig = LEARNER
) -> LearnerProcess:
    process = LearnerProcess(learner)
    process.load(policy, GRPO.optimizer)
    if config.online.when is not DraftOnline.OFF:
        process.continue_draft(draft, policy, config, Dtype.BFLOAT16)
    return process


def run(
    process: LearnerProcess,
    *,
    config: DraftConfig = ALWAYS,
    grpo: GrpoConfig = GRPO,
    history: Sequence[StepRecord] = (),
    reference: float | None = None,
    killed_after: int | None = None,
    rollouts: DrawnRollouts | None = None,
) -> tuple[list[StepRecord], DrawnRollouts]:
    records, rollouts = list(history), rollouts or DrawnRollouts()
    is_off = config.online.when is DraftOnline.OFF

    def on_step(record: StepRecord) -> None:
        records.append(record)
        if len(records) == killed_after:
            raise InterruptedError

    draft = Draft(version=0) if is_off else TrainedDraft(config, reference=reference, history=history)
    sampling = SamplingConfig(temperature=0.8, max_response_tokens=10)
    learner = cast(Any, process)  # its rows are arrays in one block, not lists of them
    loop = SyncLoop(
        arm=Arm.SPECULATIVE,
        engine=rollouts,
        gate=rollouts,
        prompts=PromptStream(prompts=STREAM, batch_size=2, seed=0),
        score=score,
        trainer=Trainer(learner=learner, config=grpo, sampling=sampling, draft=draft),
        on_step=on_step,
    )
    with nullcontext() if killed_after is None else pytest.raises(InterruptedError):
        loop.run(start_step=len(history))
    return records, rollouts


class Offloaded(DrawnRollouts):
    """Rollouts before each of which a learner gives back what it needs for updates alone."""

    def __init__(self, process: LearnerProcess) -> None:
        super().__init__()
        self.process = process
        self.given_back: list[int] = []

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        self.given_back.append(self.process.offload())
        return super().refit(version, draft_version=draft_version)


def policy_bits(process: LearnerProcess) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in process._loaded.weights()}


def draft_bits(process: LearnerProcess) -> dict[str, bytes]:
    assert process._online is not None
    return {name: tensor.numpy().tobytes() for name, tensor in process._online.state().items()}


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_a_run_that_trains_its_draft_ends_with_the_policy_of_one_that_does_not_bit_for_bit(
    policy: Path, draft: Path, recompute: Recompute, updates_per_step: int
) -> None:
    learner, grpo = replace(LEARNER, recompute=recompute), replace(GRPO, updates_per_step=updates_per_step)
    alone, beside = started(policy, draft, CONFIG, learner), started(policy, draft, ALWAYS, learner)
    before = draft_bits(beside)
    expected, fixed = run(alone, config=CONFIG, grpo=grpo)
    found, changing = run(beside, grpo=grpo)
    assert policy_bits(beside) == policy_bits(alone) != policy_bits(started(policy, draft))
    assert [record.train for record in found] == [record.train for record in expected]
    assert max(record.train.grad_norm for record in found) > GRPO.optimizer.clip_grad
    assert fixed.versions == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert changing.versions == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [record.draft_version for record in found] == [0, 1, 2, 3]
    assert all(record.draft_update is None and record.draft_decision is None for record in expected)
    for record in found:
        update = record.draft_update
        assert update is not None
        assert (update.num_updates, update.loss > 0.0) == (updates_per_step, True)
        assert 0.0 < update.elapsed_s <= record.times.train_s
    after = draft_bits(beside)
    assert all(before[name] != after[name] for name in before)  # every trained tensor, and the count of steps


def test_a_learner_that_rests_while_rollouts_are_drawn_ends_with_the_same_policy_and_draft_bit_for_bit(
    policy: Path, draft: Path, tmp_path: Path
) -> None:
    offloaded, other = started(policy, draft), started(policy, draft)
    rollouts = Offloaded(offloaded)
    run(offloaded, rollouts=rollouts)
    run(other)
    # Before the first step there are the gradients of the policy, then moments, and the draft's gradients are freed.
    num_policy = offloaded._loaded.architecture.num_parameters()
    num_draft = offloaded._drafting.num_parameters
    assert rollouts.given_back[0] >= 4 * num_policy
    assert rollouts.given_back[1:] == [rollouts.given_back[1]] * 3
    assert rollouts.given_back[1] - rollouts.given_back[0] == 8 * (num_policy + num_draft)
    offloaded.offload()
    assert policy_bits(offloaded) == policy_bits(other)
    assert offloaded.offload() == 0
    offloaded.save_checkpoint(tmp_path / "offloaded", {})
    offloaded.finish_checkpoint()
    assert draft_bits(offloaded) == draft_bits(other)


def test_a_resumed_run_ends_with_the_same_policy_and_draft(policy: Path, draft: Path, tmp_path: Path) -> None:
    config = draft_with(ALWAYS, online={"when": DraftOnline.WHEN_STALE})
    # A draft that is said to have reached 3.5, and never does, is trained in each step that another one follows.
    whole, killed, resumed = (started(policy, draft, config) for _ in range(3))
    six = replace(GRPO, num_steps=6)
    expected, _ = run(whole, config=config, grpo=six, reference=3.5)
    checkpoints = Checkpoints(directory=tmp_path / "checkpoints", recipe="a recipe")
    learner = InProcess(killed)
    with checkpoints.finished(learner):
        steps, _ = run(killed, config=config, grpo=six, reference=3.5, killed_after=3)
        checkpoints.save(learner, steps)
    history, _ = checkpoints.restore(InProcess(resumed))
    assert list(history) == list(steps)
    assert draft_bits(resumed) == draft_bits(killed)
    found, rollouts = run(resumed, config=config, grpo=six, history=history, reference=3.5)
    assert policy_bits(resumed) == policy_bits(whole)
    assert draft_bits(resumed) == draft_bits(whole)
    assert [record.draft_version for record in found] == [record.draft_version for record in expected]
    assert found[-1].draft_version == 5
    assert rollouts.versions[0] == (3, expected[3].draft_version)


def test_a_draft_learns_from_the_output_layer_and_embeddings_that_the_policy_has_now(policy: Path, draft: Path) -> None:
    process = started(policy, draft)
    trainer = process._drafting
    assert isinstance(trainer, DraftTrainer)
    model = trainer._model
    start = model.verifier_lm_head.weight.clone()
    run(process, grpo=replace(GRPO, num_steps=1))
    assert torch.equal(model.verifier_lm_head.weight, start)  # the step's hidden states are of this policy
    embeddings, head = (tensor.clone() for tensor in process._loaded.vocabulary_weights())
    assert not torch.equal(head, start)
    trainer.follow(lambda: (embeddings, head))
    assert torch.equal(model.verifier_lm_head.weight, head)
    assert torch.equal(model.embed_tokens.weight, embeddings)


def draft_totals(process: LearnerProcess, dtypes: dict[str, str]) -> dict[str, int]:
    return weight_totals([process.weight_fingerprints(dtypes, ALL, is_draft=True)])


def test_what_the_learner_says_of_its_draft_is_what_its_file_holds(policy: Path, draft: Path, tmp_path: Path) -> None:
    process = started(policy, draft)
    dtypes = dict.fromkeys((name for name, _ in process._drafting.weights()), "bfloat16")
    assert draft_totals(process, dtypes) == file_fingerprints(draft, dtypes)
    run(process, grpo=replace(GRPO, num_steps=1))
    process.save_draft(tmp_path / "trained")
    assert draft_totals(process, dtypes) == file_fingerprints(tmp_path / "trained", dtypes)
    assert draft_totals(process, dtypes) != file_fingerprints(draft, dtypes)
    assert process.weight_fingerprints(dtypes, Turn(index=1, count=2), is_draft=True) == {}  # it has layer 0 alone


def test_a_draft_trained_in_float32_is_sent_as_engines_compute_it(policy: Path, draft: Path, tmp_path: Path) -> None:
    process = started(policy, draft)
    trained = dict(process._drafting.weights())
    assert {tensor.dtype for tensor in trained.values() if tensor.is_floating_point()} == {torch.float32}
    snapshot = process.publish(tmp_path, 1, is_draft=True)
    assert snapshot is not None
    sent = load_file(snapshot.path)
    assert sent.keys() == trained.keys()
    for name, tensor in sent.items():
        expected = trained[name].to(torch.bfloat16) if trained[name].is_floating_point() else trained[name]
        assert tensor.dtype is expected.dtype and torch.equal(tensor, expected)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in sent.items()}
    assert draft_totals(process, dtypes) == file_fingerprints(Path(snapshot.path), dtypes)
    own = sum(tensor.nbytes for _, tensor in process._loaded.weights())
    assert process.weight_bytes() == own + sum(tensor.nbytes for tensor in sent.values())


def test_a_checkpoint_without_a_draft_resumes_no_run_that_trains_one(policy: Path, draft: Path, tmp_path: Path) -> None:
    alone = started(policy, draft, CONFIG)
    alone.save_checkpoint(tmp_path / "step-000001", {})
    alone.finish_checkpoint()
    with pytest.raises(CheckpointError, match=r"must hold the draft's \d+ trained tensors, got 0 others"):
        started(policy, draft).load_checkpoint(tmp_path / "step-000001")


def test_online_training_lowers_the_loss_at_a_rate_that_warms_up(policy: Path, draft: Path, chats: Chats) -> None:
    trainer = DraftTrainer(policy, draft_with(ALWAYS, pretrain={"tokens_per_step": 100}), given=draft, is_online=True)
    losses, rates = [], []
    for _ in range(30):
        losses.append(trainer.learn(chats, temperature=1.0))
        rates.append(trainer._optimizer.steppers[0].param_groups[0]["lr"])
    assert losses[-1] < 0.5 * losses[0]
    assert rates == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, *[1e-2] * 26])


def test_responses_of_one_token_teach_nothing_and_are_no_error(policy: Path, draft: Path, chats: Chats) -> None:
    trainer = DraftTrainer(policy, ALWAYS, given=draft, is_online=True)
    short = [(aux[:4], last[:4]) for aux, last in chats.states]
    assert trainer.learn(Chats([chat[:4] for chat in CHATS], [3, 3], short), temperature=1.0) == 0.0


@given(
    lengths=st.lists(st.integers(1, 50), max_size=12),
    num_parts=st.integers(1, 5),
    num_tokens=st.integers(1, 100),
    seed=st.text(max_size=3),
)
def test_parts_are_disjoint_and_within_bounds(lengths: list[int], num_parts: int, num_tokens: int, seed: str) -> None:
    draw = partial(sample_parts, lengths, num_parts=num_parts, num_tokens=num_tokens)
    parts = draw(seed=seed)
    taken = [index for part in parts for index in part]
    assert len(parts) == num_parts
    assert len(set(taken)) == len(taken)
    assert all(len(part) <= 1 or sum(lengths[i] for i in part) <= num_tokens for part in parts)
    assert all(parts) or len(lengths) < num_parts
    assert parts == draw(seed=seed)


def test_parts_differ_from_step_to_step() -> None:
    one, other = (sample_parts([1] * 20, num_parts=1, num_tokens=5, seed=seed) for seed in "01")
    assert one != other


@pytest.mark.parametrize(("cap", "num_ranks", "most"), [(None, 1, 12), (8, 1, 8), (8, 2, 4)])
def test_an_update_takes_no_more_tokens_than_it_is_given(cap: int | None, num_ranks: int, most: int) -> None:
    taken: list[int] = []

    class Noted(DraftTrainer):
        _num_steps = 0

        def step(self, chats: Chats, **_: Any) -> float:
            taken.append(sum(map(len, chats.token_ids)))
            assert list(chats.prompt_lengths) == [tokens[0] for tokens in chats.token_ids]
            return float(len(taken))

    config = draft_with(ALWAYS, pretrain={"tokens_per_step": 12}, online={"tokens_per_update": cap, "updates": 3})
    noted = Noted.__new__(Noted)
    LearnerDraft.__init__(noted, config, is_online=True, writes=True)
    chats = [[1, 0], [2, 0]] * 12
    states = [(torch.zeros(2, 1), torch.zeros(2, 1))] * len(chats)
    given = Chats(chats, [tokens[0] for tokens in chats], states)
    assert noted.learn(given, temperature=1.0, num_ranks=num_ranks) == 2.0
    assert taken == [most] * 3


class InProcess(BareLearner):
    """A learner in this process, as checkpoints need it."""

    def __init__(self, process: LearnerProcess) -> None:
        self._process = process
        self.save_checkpoint = process.save_checkpoint
        self.load_checkpoint = process.load_checkpoint
        self.inspect_checkpoint = process.inspect_checkpoint

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        del timeout_s
        self._process.finish_checkpoint()
