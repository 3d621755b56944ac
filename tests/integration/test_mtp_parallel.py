"""The MTP layer of a learner on two gloo ranks against one: the same numbers whatever the split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.grpo.config import OptimizerConfig
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.learner.megatron import MegatronPolicy
from tests.forked.ranks import on_ranks_of
from tests.unit.learner import mimo

LEARNER = LearnerConfig(max_tokens_per_microbatch=64, num_threads=1)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_grad=0.05)
LEARNERS = {
    "tensor": replace(LEARNER, parallel=ParallelConfig(tensor=2)),
    "tensor in chunks": replace(LEARNER, parallel=ParallelConfig(tensor=2), logprob_chunk_tokens=10),
    "data": replace(LEARNER, parallel=ParallelConfig(data=2)),
}


def _train(policy: MegatronPolicy, mine: slice) -> dict[str, Any]:
    """Three updates on this rank's share of the sequences, the middle one from its own state."""
    trainer = policy.start_mtp(OPTIMIZER)
    sequences = mimo.sequences(10)[mine]
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


def _rank(rank: int, learner: LearnerConfig, model: Path) -> dict[str, Any]:
    policy = MegatronPolicy.load(model, learner=learner, optimizer=OPTIMIZER)
    mine = slice(rank * 5, rank * 5 + 5) if learner.parallel.data > 1 else slice(None)
    return _train(policy, mine)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and what one rank makes of it."""
    model = mimo.write_model(tmp_path_factory.mktemp("single") / "model")
    return model, _train(MegatronPolicy.load(model, learner=LEARNER, optimizer=OPTIMIZER), slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)
def test_two_ranks_teach_the_layer_what_one_does(learner: LearnerConfig, taught: tuple[Path, dict[str, Any]]) -> None:
    model, single = taught
    for rank in on_ranks_of(learner, _rank, model):
        np.testing.assert_allclose(rank["losses"], single["losses"], rtol=1e-4)
        np.testing.assert_allclose(rank["evaluated"][0], single["evaluated"][0], atol=1e-4)
        assert rank["evaluated"][1] == pytest.approx(single["evaluated"][1], abs=1e-4)
        for name, tensor in single["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], tensor, rtol=0, atol=3e-4, err_msg=name)
        for name, tensor in single["trunk"].items():
            np.testing.assert_array_equal(rank["trunk"][name], tensor, err_msg=name)
