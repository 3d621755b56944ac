"""A mixture of experts on one rank and on several, over gloo: they compute what transformers does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.checkpoint.on_disk import LearnerRanks, open_checkpoint
from slipstream.learner.config import LearnerConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.packing import plan_shards
from slipstream.refit.fingerprint import file_fingerprints, held_whole, part_fingerprints, weight_totals
from tests.forked.ranks import learner_of, on_ranks_of
from tests.integration import qwen3_moe

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, betas=(0.5, 0.9), clip_grad=1e6)  # so large a norm is never clipped
SHARES = {"exp_avg": 0.5, "momentum_buffer": 0.1}  # of the first gradient in a moment
ONE = LearnerConfig(max_tokens_per_microbatch=40, num_threads=1)
LEARNERS = (
    *("experts", "experts, optimizer split, layers recomputed", "experts, parts recomputed", "experts, packed"),
    *("data", "three stages", "context, packed, parts recomputed"),  # a copy of all experts on each rank
)


class OneRank(LearnerRanks):
    def __init__(self) -> None:
        self.rank, self.size, self._group = 0, 1, None


def train(policy: MegatronPolicy, learner: LearnerConfig, directory: Path, rank: int = 0) -> dict[str, Any]:
    """Logprobs and two updates of this rank's share."""
    whole, layout = qwen3_moe.sequences(), learner.parallel
    shares = plan_shards([len(tokens) for tokens in whole], layout.data)
    mine = shares[layout.data_rank(rank)]
    batch = [whole[index] for index in mine]
    starts = [1] * len(batch)
    rows = policy.logprobs(batch, starts, 1.0)
    alone = policy.logprobs(batch[:1] if mine == shares[0] else [], starts[:1] if mine == shares[0] else [], 1.0)
    loaded = {name: tensor.clone() for name, tensor in policy.weights()}
    losses = [policy.lm_step(batch, starts)]
    policy.save_checkpoint(directory / "checkpoint", {})
    losses.append(policy.lm_step(batch, starts))
    policy.finish_checkpoint()
    policy.load_checkpoint(directory / "checkpoint")
    assert policy.lm_step(batch, starts) == losses[-1], "resumed and uninterrupted differ"
    return {
        "rows": dict(zip(mine, rows, strict=True)),
        "alone": alone,
        "losses": losses,
        "loaded": loaded,
        "trained": {name: tensor.clone() for name, tensor in policy.weights()},
        "held": part_fingerprints(policy.held_weights()),
        "gathered": part_fingerprints(held_whole(name, tensor) for name, tensor in policy.weights()),
    }


def run_rank(
    rank: int, learner: LearnerConfig, model: Path, directory: Path, optimizer: OptimizerConfig = OPTIMIZER
) -> dict[str, Any]:
    policy = MegatronPolicy.load(model, learner=learner, optimizer=optimizer)
    result = train(policy, learner, directory, rank)
    (directory / "tokenizer").mkdir(exist_ok=True)
    policy.save_hf(directory / "saved", directory / "tokenizer")
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    qwen3_moe.write_model(path, seed=0)
    return path


def require_gradients(checkpoint: Path, expected: dict[str, torch.Tensor], *, clip: float = 1e6) -> None:
    """The first moments after one update are half the clipped gradients, the momenta of Muon a tenth of them."""
    scale = min(1.0, clip / float(torch.cat([each.flatten() for each in expected.values()]).norm()))
    reader, _ = open_checkpoint(OneRank(), checkpoint)
    with reader:
        kinds = {name.partition("/")[2]: kind for name in reader.index if (kind := name.partition("/")[0]) in SHARES}
        assert kinds.keys() == expected.keys()
        for name, gradient in expected.items():
            got = reader.read_whole(f"{kinds[name]}/{name}") / (SHARES[kinds[name]] * scale)
            torch.testing.assert_close(got, gradient, rtol=1e-3, atol=2e-6, msg=f"{name} {{}}".format)


@pytest.mark.parametrize("normalizes", [True, False], ids=["chosen experts sum to 1", "shares of all experts"])
def test_one_rank_computes_what_transformers_does(normalizes: bool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    qwen3_moe.write_model(model, seed=0, normalizes=normalizes)
    got = train(MegatronPolicy.load(model, learner=ONE, optimizer=OPTIMIZER), ONE, tmp_path)
    for index, tokens in enumerate(qwen3_moe.sequences()):
        np.testing.assert_allclose(got["rows"][index], qwen3_moe.logprobs(model, tokens), rtol=0, atol=1e-5)
    loss, gradients = qwen3_moe.gradients(model, qwen3_moe.sequences())
    assert got["losses"][0] == pytest.approx(loss, abs=1e-6)
    assert all(gradients[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 1e-4 for layer in (0, 2))
    require_gradients(tmp_path / "checkpoint", gradients)
    original = load_file(model / "model.safetensors")
    assert original.keys() == got["loaded"].keys()
    assert all(torch.equal(original[name], tensor) for name, tensor in got["loaded"].items())
    assert weight_totals([got["held"]]) == weight_totals([got["gathered"]])


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_experts_on_several_ranks_compute_what_transformers_does(name: str, model: Path, tmp_path: Path) -> None:
    got = on_ranks_of(learner_of(name, ONE), run_rank, model, tmp_path)
    batch = qwen3_moe.sequences()
    expected = [qwen3_moe.logprobs(model, tokens) for tokens in batch]
    seen = {index: row for rank in got for index, row in rank["rows"].items()}
    for index, row in enumerate(expected):
        np.testing.assert_allclose(seen[index], row, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[0]["alone"][0], expected[min(got[0]["rows"])], rtol=0, atol=1e-5)
    loss, gradients = qwen3_moe.gradients(model, batch)
    assert all(rank["losses"] == got[0]["losses"] for rank in got)
    assert got[0]["losses"][0] == pytest.approx(loss, abs=1e-6)
    require_gradients(tmp_path / "checkpoint", gradients)

    original = load_file(model / "model.safetensors")
    for rank in got:
        assert all(torch.equal(original[name], tensor) for name, tensor in rank["loaded"].items())
        assert rank["gathered"] == got[0]["gathered"]
    totals = weight_totals(rank["held"] for rank in got)
    assert totals == weight_totals([got[0]["gathered"]])
    assert totals == file_fingerprints(tmp_path / "saved", dict.fromkeys(original, "float32"))

    resumed = MegatronPolicy.load(model, learner=ONE, optimizer=OPTIMIZER)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.lm_step(batch, [1] * len(batch)) == pytest.approx(got[0]["losses"][1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS[:2])
def test_muon_steps_experts_on_two_ranks_as_on_one(name: str, model: Path, tmp_path: Path) -> None:
    optimizer = replace(OPTIMIZER, method=OptimizerMethod.MUON, clip_grad=0.05)  # which the norm exceeds
    got = on_ranks_of(learner_of(name, ONE), run_rank, model, tmp_path, optimizer)
    (tmp_path / "one").mkdir()
    expected = train(MegatronPolicy.load(model, learner=ONE, optimizer=optimizer), ONE, tmp_path / "one")
    _, gradients = qwen3_moe.gradients(model, qwen3_moe.sequences())
    require_gradients(tmp_path / "checkpoint", gradients, clip=optimizer.clip_grad)
    for rank in got:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        for key, tensor in rank["trained"].items():
            seen = gradients[key].abs() > 1e-3 * gradients[key].abs().max()  # else AdamW divides rounding by itself
            torch.testing.assert_close(tensor[seen], expected["trained"][key][seen], rtol=0, atol=1e-6, msg=key)


@pytest.mark.slow
def test_experts_in_bfloat16_have_masters_of_their_own(model: Path, tmp_path: Path) -> None:
    got = on_ranks_of(learner_of("experts, optimizer split, bfloat16", ONE), run_rank, model, tmp_path)
    loss, gradients = qwen3_moe.gradients(model, qwen3_moe.sequences())
    # Rounding chooses other experts for some tokens, so that no value is known better.
    assert got[0]["losses"][0] == pytest.approx(loss, abs=0.2)
    assert weight_totals(rank["held"] for rank in got) == weight_totals([got[0]["gathered"]])
    reader, _ = open_checkpoint(OneRank(), tmp_path / "checkpoint")
    with reader:
        assert {name.removeprefix("main/") for name in reader.index if name.startswith("main/")} == gradients.keys()
