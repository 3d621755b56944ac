"""The learner on two gloo ranks against one: the same numbers whatever the split."""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.grpo.config import LossConfig, OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.policy import parallel
from slipstream.policy.config import LearnerConfig, ParallelConfig, ScratchConfig
from slipstream.policy.megatron import MegatronPolicy
from slipstream.refit.fingerprint import held_whole, part_fingerprints, weight_totals
from slipstream.types import TrainBatch

VOCAB = 32
# Small weights keep every gradient well above rounding, which Adam would divide by itself.
SCRATCH = ScratchConfig(
    hidden_size=32, num_layers=4, head_dim=16, ffn_hidden_size=48, max_position_embeddings=64, init_std=0.02
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_grad=0.5)
LAYOUTS = {
    "tensor": ParallelConfig(tensor=2),
    "sequence": ParallelConfig(tensor=2, sequence_parallel=True),
    "pipeline": ParallelConfig(pipeline=2),
    "data": ParallelConfig(data=2),
}


def _learner(layout: ParallelConfig) -> LearnerConfig:
    return LearnerConfig(max_tokens_per_microbatch=66, num_threads=1, parallel=layout)


def _sequences() -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(0)
    return tuple(tuple(rng.integers(0, VOCAB, rng.integers(6, 32)).tolist()) for _ in range(9))


def _train(policy: MegatronPolicy, directory: Path) -> dict[str, Any]:
    sequences = _sequences()
    lengths = tuple(3 for _ in sequences)
    before = policy.logprobs(sequences, lengths, 1.0)
    batch = TrainBatch(
        token_ids=sequences,
        prompt_lengths=lengths,
        rollout_logprobs=tuple(tuple(row.tolist()) for row in before),
        advantages=tuple(np.random.default_rng(1).normal(size=len(sequences)).tolist()),
        policy_version=0,
    )
    update = Update(
        batch=batch,
        trainer_logprobs=before,
        ref_logprobs=before,
        loss=LossConfig(kl_coefficient=0.1),
        temperature=1.0,
    )
    stats = [policy.train_step(update).stats]
    policy.save_checkpoint(directory / "checkpoint", {})
    stats.append(policy.train_step(update).stats)
    policy.load_checkpoint(directory / "checkpoint")
    assert policy.train_step(update).stats == stats[-1], "resumed and uninterrupted differ"
    return {
        "before": before,
        "after": policy.logprobs(sequences, lengths, 1.0),
        "stats": [dataclasses.asdict(step) for step in stats],
        "weights": {name: tensor.clone().numpy() for name, tensor in policy.weights()},
        "fingerprints": part_fingerprints(policy.held_weights()),
    }


def _rank(rank: int, layout: ParallelConfig, port: int, model: Path, directory: Path) -> dict[str, Any]:
    policy = MegatronPolicy.load(
        model, learner=_learner(layout), optimizer=OPTIMIZER, rank=rank, world_size=2, master_port=port
    )
    result = _train(policy, directory)
    parallel.barrier()
    parallel.teardown()
    return result


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("single")
    (directory / "tokenizer").mkdir()
    scratch = dataclasses.replace(SCRATCH, tie_word_embeddings=request.param)
    policy = MegatronPolicy.from_scratch(
        scratch, vocab_size=VOCAB, eos_token_id=1, learner=_learner(ParallelConfig()), optimizer=OPTIMIZER
    )
    policy.save_hf(directory / "model", directory / "tokenizer")
    return directory / "model", _train(policy, directory)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_ranks_compute_what_one_does(
    layout: ParallelConfig, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    model, single = saved
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(_rank, rank, layout, port, model, tmp_path) for rank in range(2)]
        got = [rank.result(timeout=120) for rank in ranks]
    gathered = (held_whole(name, torch.from_numpy(tensor)) for name, tensor in got[0]["weights"].items())
    assert weight_totals(rank["fingerprints"] for rank in got) == weight_totals([part_fingerprints(gathered)])
    for rank in (0, 1):
        for name in ("before", "after"):
            for row, expected in zip(got[rank][name], single[name], strict=True):
                np.testing.assert_allclose(row, expected, rtol=0, atol=2e-5)
        for step, expected in zip(got[rank]["stats"], single["stats"], strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert got[rank]["weights"].keys() == single["weights"].keys()
        for name, tensor in got[rank]["weights"].items():
            torch.testing.assert_close(
                torch.from_numpy(tensor), torch.from_numpy(single["weights"][name]), rtol=0, atol=2e-5
            )
