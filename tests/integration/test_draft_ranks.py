"""Hidden states and a draft's training on two gloo ranks against one: the same numbers whatever the split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.drafts.config import DraftOnline
from slipstream.drafts.eagle3 import build_draft, save_draft
from slipstream.drafts.trainer import DraftTrainer
from slipstream.grpo.config import LossConfig, OptimizerConfig
from slipstream.grpo.update import Update, part_of
from slipstream.learner import parallel
from slipstream.learner.config import LearnerConfig, Packing, ParallelConfig, Recompute, ScratchConfig, ShapeConfig
from slipstream.learner.megatron import Capture
from slipstream.learner.packing import plan_shards
from slipstream.ragged import Ragged
from slipstream.types import Dtype, TrainBatch
from slipstream.workers.learner_process import LearnerProcess
from tests.forked.ranks import on_ranks_of
from tests.small import draft_with
from tests.unit.learner.policies import VOCAB, new_policy, save

SCRATCH = ScratchConfig(
    shape=ShapeConfig(hidden_size=32, num_layers=4, head_dim=16, ffn_hidden_size=48, init_std=0.2),
    max_position_embeddings=64,
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_grad=0.5)
LAYERS = (0, 2, 3)  # the embeddings, and layers of both stages
DRAFT = draft_with(
    eagle3={"aux_hidden_state_layer_ids": LAYERS, "tokens_per_row": 1},
    pretrain={"ttt_steps": 2, "num_steps": 4, "optimizer": {"warmup_steps": 2, "learning_rate": 1e-3}},
)
ONLINE = draft_with(DRAFT, online={"when": DraftOnline.ALWAYS, "optimizer": {"learning_rate": 1e-3}})
ALONE = LearnerConfig(max_tokens_per_microbatch=66, num_threads=1)
SEQUENCE = ParallelConfig(tensor=2, sequence_parallel=True)
PIPELINE = ParallelConfig(pipeline=2)
LEARNERS = {
    "tensor": replace(ALONE, parallel=ParallelConfig(tensor=2)),
    "sequence": replace(ALONE, parallel=SEQUENCE),
    "sequence, packed, layers recomputed": replace(
        ALONE, parallel=SEQUENCE, packing=Packing.ALWAYS, recompute=Recompute.FULL
    ),
    "pipeline": replace(ALONE, parallel=PIPELINE),
    "pipeline, packed, parts recomputed": replace(
        ALONE, parallel=PIPELINE, packing=Packing.ALWAYS, recompute=Recompute.SELECTIVE
    ),
    "pipeline, layers recomputed": replace(ALONE, parallel=PIPELINE, recompute=Recompute.FULL),
    "data": replace(ALONE, parallel=ParallelConfig(data=2)),
    "context": replace(ALONE, parallel=ParallelConfig(context=2)),
    "context, packed, layers recomputed": replace(
        ALONE, parallel=ParallelConfig(context=2), packing=Packing.ALWAYS, recompute=Recompute.FULL
    ),
}


def _sequences() -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(0)
    return tuple(tuple(rng.integers(0, VOCAB, rng.integers(8, 32)).tolist()) for _ in range(9))


def _update(*, trains_draft: bool = False) -> Update:
    sequences = _sequences()
    batch = TrainBatch(
        token_ids=sequences,
        prompt_lengths=(3,) * len(sequences),
        rollout_logprobs=tuple((-3.4,) * (len(tokens) - 3) for tokens in sequences),
        advantages=tuple(np.random.default_rng(1).normal(size=len(sequences)).tolist()),
        policy_version=0,
    )
    return Update(
        batch=batch,
        trainer_logprobs=None,
        ref_logprobs=None,
        loss=LossConfig(),
        temperature=1.0,
        trains_draft=trains_draft,
    )


def _states(process: LearnerProcess, mine: tuple[int, ...]) -> tuple[dict[int, Any], dict[int, Any]]:
    """Hidden states of this rank's share, computed for themselves, and captured in an update."""
    sequences, update, policy = _sequences(), _update(), process._loaded
    found = policy.hidden_states([sequences[index] for index in mine], LAYERS)
    capture = Capture(LAYERS)
    policy.train_step(part_of(update, mine), capture=capture)
    alone = {index: [each.numpy() for each in pair] for index, pair in zip(mine, found, strict=True)}
    beside = {index: [each.numpy() for each in capture.states[place]] for place, index in enumerate(mine)}
    return alone, beside


def _outcome(model: Path, learner: LearnerConfig, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    sequences, layout = _sequences(), learner.parallel
    mine = plan_shards([len(tokens) for tokens in sequences], layout.data)[layout.data_rank(rank)]
    chats, lengths = Ragged.of([sequences[index] for index in mine], np.int32), [3] * len(mine)
    process = LearnerProcess(learner, rank=rank, world_size=world_size)
    process.load(model, OPTIMIZER)
    losses: dict[str, list[float]] = {}
    for name, gib in (("captured once", 1.0), ("captured at each step", 0.0)):
        config = draft_with(DRAFT, pretrain={"states_cache_gib": gib})
        process.start_draft(model, config)
        assert process.hold_draft_chats((mine, chats, lengths), config) is (gib > 0)
        losses[name] = [process.draft_step(indices, 0.8) for indices in ((0, 1, 2, 3), (4, 5), (6,), (7, 8))]
    progress = process.evaluate_draft((chats, lengths), 0.8)
    weights = {name: tensor.clone().numpy() for name, tensor in process._drafting.weights()}
    assert isinstance(process._drafting, DraftTrainer)
    alone, beside = _states(process, mine)
    online = _online(process, model, mine)
    return {
        "online": online,
        "losses": losses,
        "share": process._drafting.share,
        "acceptance": [*progress.rate_by_position, progress.mean_acceptance_length],
        "weights": weights,
        "alone": alone,
        "beside": beside,
    }


def _online(process: LearnerProcess, model: Path, mine: tuple[int, ...]) -> tuple[list[float], dict[str, Any]]:
    """Losses of a draft that learns beside a moving policy, from all of an update at once, and its weights."""
    process.load(model, OPTIMIZER)
    process.continue_draft(model.parent / "draft", model, ONLINE, Dtype.FLOAT32)
    updates = [process.train_step(part_of(_update(trains_draft=True), mine)).draft for _ in range(2)]
    losses = [update.loss for update in updates if update is not None]
    return losses, {name: tensor.clone().numpy() for name, tensor in process._drafting.weights()}


def _rank(rank: int, learner: LearnerConfig, model: Path) -> dict[str, Any]:
    parallel.initialize(learner.parallel)
    return _outcome(model, learner, rank, 2)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("single")
    model = save(new_policy(SCRATCH, ALONE, None), directory)
    save_draft(build_draft(model, DRAFT), directory / "draft")
    return model, _outcome(model, ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)
def test_two_ranks_train_the_draft_that_one_does(learner: LearnerConfig, single: tuple[Path, dict[str, Any]]) -> None:
    model, expected = single
    got = on_ranks_of(learner, _rank, model)
    assert got[0]["alone"].keys() | got[1]["alone"].keys() == expected["alone"].keys()
    for rank in got:
        for name in ("alone", "beside"):
            for index, pair in rank[name].items():
                for one, other in zip(pair, expected[name][index], strict=True):
                    np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)
        for name, losses in expected["losses"].items():
            assert rank["losses"][name] == pytest.approx(losses, rel=1e-5)
        assert rank["acceptance"] == pytest.approx(expected["acceptance"], rel=1e-5)
        for name, tensor in rank["weights"].items():
            np.testing.assert_allclose(tensor, expected["weights"][name], rtol=0, atol=1e-4, err_msg=name)
        _, expected_weights = expected["online"]
        losses, weights = rank["online"]
        assert losses == pytest.approx(expected["online"][0], rel=1e-5)
        assert len(losses) == 2
        for name, tensor in weights.items():
            np.testing.assert_allclose(tensor, expected_weights[name], rtol=0, atol=1e-4, err_msg=name)
    copies = 2 // learner.parallel.data  # two ranks of one copy compute half of its chats each
    assert [rank["share"] for rank in got] == [(0, 1) if copies == 1 else (number, 2) for number in range(2)]
    for name, tensor in got[0]["weights"].items():
        np.testing.assert_array_equal(tensor, got[1]["weights"][name], err_msg=name)
    for name, tensor in got[0]["online"][1].items():
        np.testing.assert_array_equal(tensor, got[1]["online"][1][name], err_msg=name)
