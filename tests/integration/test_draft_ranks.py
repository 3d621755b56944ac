"""Hidden states, a draft's training and an MTP layer's on two gloo ranks against one: the same whatever the split."""

from __future__ import annotations

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
from slipstream.learner.config import LearnerConfig, ScratchConfig, ShapeConfig
from slipstream.learner.megatron import Capture, MegatronPolicy
from slipstream.learner.packing import plan_shards
from slipstream.ragged import Ragged
from slipstream.types import Dtype, TrainBatch
from slipstream.workers.learner_process import LearnerProcess
from tests.forked.ranks import learner_of, on_ranks_of
from tests.small import draft_with
from tests.unit.learner import mimo
from tests.unit.learner.policies import VOCAB, new_policy, save

pytestmark = pytest.mark.slow

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
LEARNERS = (
    *("tensor", "sequence", "sequence, packed, layers recomputed", "pipeline", "pipeline, packed, parts recomputed"),
    *("pipeline, layers recomputed", "data", "context", "context, packed, layers recomputed"),
)


def _sequences() -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(0)
    return tuple(tuple(rng.integers(0, VOCAB, rng.integers(8, 32)).tolist()) for _ in range(9))


def _update(*, trains_draft: bool = False) -> Update:
    sequences = _sequences()
    batch = TrainBatch(
        token_ids=sequences,
        prompt_lengths=[3] * len(sequences),
        rollout_logprobs=[[-3.4] * (len(tokens) - 3) for tokens in sequences],
        advantages=np.random.default_rng(1).normal(size=len(sequences)).tolist(),
        policy_version=0,
    )
    known: dict[str, Any] = {"trainer_logprobs": None, "ref_logprobs": None}
    return Update(batch=batch, loss=LossConfig(), temperature=1.0, trains_draft=trains_draft, **known)


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
    losses["online"], online = _online(process, model, mine)
    assert len(losses["online"]) == 2
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


@pytest.mark.parametrize("name", LEARNERS)
def test_two_ranks_train_the_draft_that_one_does(name: str, single: tuple[Path, dict[str, Any]]) -> None:
    learner, (model, expected) = learner_of(name, ALONE), single
    got = on_ranks_of(learner, _rank, model)
    assert got[0]["alone"].keys() | got[1]["alone"].keys() == expected["alone"].keys()
    for rank in got:
        for states in ("alone", "beside"):
            for index, pair in rank[states].items():
                for one, other in zip(pair, expected[states][index], strict=True):
                    np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)
        for which, losses in expected["losses"].items():
            assert rank["losses"][which] == pytest.approx(losses, rel=1e-5)
        assert rank["acceptance"] == pytest.approx(expected["acceptance"], rel=1e-5)
        for which in ("weights", "online"):
            for key, tensor in rank[which].items():
                np.testing.assert_allclose(tensor, expected[which][key], rtol=0, atol=1e-4, err_msg=key)
                np.testing.assert_array_equal(tensor, got[0][which][key], err_msg=key)
    copies = 2 // learner.parallel.data  # two ranks of one copy compute half of its chats each
    assert [rank["share"] for rank in got] == [(0, 1) if copies == 1 else (number, 2) for number in range(2)]


def _teach(rank: int, learner: LearnerConfig, model: Path) -> dict[str, Any]:
    """Three updates of an MTP layer on this rank's share of the sequences, each from its own state."""
    optimizer = OptimizerConfig(learning_rate=1e-3, clip_grad=0.05)
    policy = MegatronPolicy.load(model, learner=learner, optimizer=optimizer)
    trainer = policy.start_mtp(optimizer)
    sequences = mimo.sequences(10)[slice(rank * 5, rank * 5 + 5) if learner.parallel.data > 1 else slice(None)]
    starts = [3] * len(sequences)
    states = policy.hidden_states(sequences, policy.architecture.mtp_layer_ids)
    losses = []
    for _ in range(3):
        trainer.restore({name: tensor.clone() for name, tensor in trainer.state().items()})
        losses.append(trainer.step(sequences, starts, states, learning_rate=1e-3, temperature=0.9, num_passes=2))
    return {
        "losses": losses,
        "evaluated": trainer.evaluate(sequences, starts, states, num_tokens=2),
        "weights": {name: tensor.numpy().copy() for name, tensor in policy.mtp_weights()},
        "trunk": {name: tensor.numpy().copy() for name, tensor in policy.weights()},
    }


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and what one rank makes of it."""
    model = mimo.write_model(tmp_path_factory.mktemp("single") / "model")
    return model, _teach(0, ALONE, model)


@pytest.mark.parametrize("name", ["tensor", "tensor in chunks", "data"])
def test_two_ranks_teach_an_mtp_layer_what_one_does(name: str, taught: tuple[Path, dict[str, Any]]) -> None:
    model, single = taught
    for rank in on_ranks_of(learner_of(name, ALONE), _teach, model):
        np.testing.assert_allclose(rank["losses"], single["losses"], rtol=1e-4)
        np.testing.assert_allclose(rank["evaluated"][0], single["evaluated"][0], atol=1e-4)
        assert rank["evaluated"][1] == pytest.approx(single["evaluated"][1], abs=1e-4)
        for key, tensor in single["weights"].items():
            np.testing.assert_allclose(rank["weights"][key], tensor, rtol=0, atol=3e-4, err_msg=key)
        for key, tensor in single["trunk"].items():
            np.testing.assert_array_equal(rank["trunk"][key], tensor, err_msg=key)
