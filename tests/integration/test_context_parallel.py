"""Exchange of tokens for heads between context-parallel ranks over gloo, beside tensor parallelism, and what it saves.

`test_megatron_parallel.py` and `test_draft_ranks.py` compare context parallelism with a single rank as they compare
every other layout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.learner import parallel
from slipstream.learner.config import LearnerConfig, Packing, ParallelConfig, ScratchConfig, ShapeConfig
from slipstream.learner.cpu import host
from slipstream.learner.megatron import MegatronPolicy
from tests.forked.ranks import on_ranks_of
from tests.integration.test_megatron_parallel import LEARNER, OPTIMIZER
from tests.unit.learner.policies import VOCAB, new_policy, save

TOKENS, ROWS, HEADS, DIM = 6, 2, 4, 3
FOUR_GROUPS = ScratchConfig(
    shape=ShapeConfig(hidden_size=32, num_layers=2, num_query_groups=4, head_dim=16, ffn_hidden_size=48, init_std=0.2),
    max_position_embeddings=64,
)
SEQUENCES = [np.random.default_rng(length).integers(0, VOCAB, length).tolist() for length in (31, 17, 12, 5)]
STARTS = [3] * len(SEQUENCES)


def _exchange(rank: int, learner: LearnerConfig) -> dict[str, np.ndarray]:
    parallel.initialize(learner.parallel)
    whole = torch.arange(TOKENS * ROWS * HEADS * DIM, dtype=torch.float32).view(TOKENS, ROWS, HEADS, DIM)
    own = parallel.context_part(whole, 0).clone().requires_grad_()
    with host.cuda_as_cpu():
        heads = parallel.own_heads(own)
        back = parallel.own_tokens(heads.flatten(2))
        gathered = parallel.all_tokens(back, 0)
        (gathered * whole.flatten(2).square()).sum().backward()
    assert own.grad is not None
    results = {"own": own, "heads": heads, "back": back, "gathered": gathered, "gradient": own.grad}
    return {name: each.detach().numpy() for name, each in results.items()}


@pytest.mark.slow
def test_tokens_are_exchanged_for_heads_and_back_and_so_are_their_gradients() -> None:
    whole = np.arange(TOKENS * ROWS * HEADS * DIM, dtype=np.float32).reshape(TOKENS, ROWS, HEADS, DIM)
    for rank, got in enumerate(on_ranks_of(LearnerConfig(parallel=ParallelConfig(context=2)), _exchange)):
        tokens, heads = slice(3 * rank, 3 * rank + 3), slice(2 * rank, 2 * rank + 2)
        np.testing.assert_array_equal(got["own"], whole[tokens])
        np.testing.assert_array_equal(got["heads"], whole[:, :, heads])
        np.testing.assert_array_equal(got["back"], whole[tokens].reshape(3, ROWS, HEADS * DIM))
        np.testing.assert_array_equal(got["gathered"], whole.reshape(TOKENS, ROWS, HEADS * DIM))
        np.testing.assert_array_equal(got["gradient"], whole[tokens] ** 2)  # of the own tokens, not summed over ranks


def _step(policy: MegatronPolicy) -> dict[str, Any]:
    """Logprobs, largest logits, bytes that forward passes save for backward passes, loss, and weights of an update."""
    parameters = {each.data_ptr() for each in policy._gpt.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    logprobs = policy.logprobs(SEQUENCES, STARTS, 1.3)
    largest = policy.map_logits(SEQUENCES, STARTS, lambda logits, _: logits.amax(1, keepdim=True), width=1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = policy.lm_step(SEQUENCES, STARTS)
    weights = {name: tensor.clone().numpy() for name, tensor in policy.weights()}
    return {"logprobs": [*logprobs, *largest.T], "loss": loss, "saved": sum(saved.values()), "weights": weights}


def _rank(rank: int, learner: LearnerConfig, model: Path) -> dict[str, Any]:
    return _step(MegatronPolicy.load(model, learner=learner, optimizer=OPTIMIZER))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [ParallelConfig(context=2), ParallelConfig(context=2, tensor=2, sequence_parallel=True)],
    ids=["context", "context and sequence"],
)
def test_a_rank_saves_its_part_of_the_activations_and_computes_the_same(layout: ParallelConfig, tmp_path: Path) -> None:
    learner = replace(LEARNER, packing=Packing.ALWAYS)
    model = save(new_policy(FOUR_GROUPS, learner, None), tmp_path)
    expected = _step(MegatronPolicy.load(model, learner=learner, optimizer=OPTIMIZER))
    for rank in on_ranks_of(replace(learner, parallel=layout), _rank, model):
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for row, other in zip(rank["logprobs"], expected["logprobs"], strict=True):
            np.testing.assert_allclose(row, other, rtol=0, atol=2e-5)
        for name, tensor in expected["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], tensor, rtol=0, atol=2e-5, err_msg=name)
        assert rank["saved"] < (1 / layout.world_size + 0.05) * expected["saved"]
