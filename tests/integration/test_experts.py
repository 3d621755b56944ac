"""A mixture of experts on one rank and on several, over gloo: they compute what transformers does.

A learner sends tokens to the experts that other routers chose, as transformers does when it is told.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.grpo.config import LossConfig, OptimizerConfig, OptimizerMethod
from slipstream.grpo.update import Update, part_of
from slipstream.learner.checkpoint.on_disk import LearnerRanks, open_checkpoint
from slipstream.learner.config import LearnerConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.packing import plan_shards
from slipstream.refit.fingerprint import file_fingerprints, held_whole, part_fingerprints, weight_totals
from slipstream.types import TrainBatch
from slipstream.workers.learner_process import LearnerProcess
from tests.forked.ranks import learner_of, on_ranks_of
from tests.integration import qwen3_moe

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, betas=(0.5, 0.9), clip_grad=1e6)  # so large a norm is never clipped
SHARES = {"exp_avg": 0.5, "momentum_buffer": 0.1}  # of the first gradient in a moment
ONE = LearnerConfig(max_tokens_per_microbatch=40, num_threads=1)
LEARNERS = (
    *("experts", "experts, optimizer split, layers recomputed", "experts, parts recomputed", "experts, packed"),
    *("data", "three stages", "context, packed, parts recomputed"),  # a copy of all experts on each rank
)


BATCH = qwen3_moe.sequences()
STARTS = [1] * len(BATCH)
NORMALIZES = pytest.mark.parametrize("normalizes", [True, False], ids=["chosen sum to 1", "shares of all experts"])


class OneRank(LearnerRanks):
    def __init__(self) -> None:
        self.rank, self.size, self._group = 0, 1, None


def train(policy: MegatronPolicy, learner: LearnerConfig, directory: Path, rank: int = 0) -> dict[str, Any]:
    """Logprobs and two updates of this rank's share."""
    shares = plan_shards([len(tokens) for tokens in BATCH], learner.parallel.data)
    mine = shares[learner.parallel.data_rank(rank)]
    batch = [BATCH[index] for index in mine]
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


@NORMALIZES
def test_one_rank_computes_what_transformers_does(normalizes: bool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    qwen3_moe.write_model(model, seed=0, normalizes=normalizes)
    got = train(MegatronPolicy.load(model, learner=ONE, optimizer=OPTIMIZER), ONE, tmp_path)
    for index, tokens in enumerate(BATCH):
        np.testing.assert_allclose(got["rows"][index], qwen3_moe.logprobs(model, tokens), rtol=0, atol=1e-5)
    loss, gradients = qwen3_moe.gradients(model, BATCH)
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
    expected = [qwen3_moe.logprobs(model, tokens) for tokens in BATCH]
    seen = {index: row for rank in got for index, row in rank["rows"].items()}
    for index, row in enumerate(expected):
        np.testing.assert_allclose(seen[index], row, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[0]["alone"][0], expected[min(got[0]["rows"])], rtol=0, atol=1e-5)
    loss, gradients = qwen3_moe.gradients(model, BATCH)
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
    assert resumed.lm_step(BATCH, STARTS) == pytest.approx(got[0]["losses"][1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS[:2])
def test_muon_steps_experts_on_two_ranks_as_on_one(name: str, model: Path, tmp_path: Path) -> None:
    optimizer = replace(OPTIMIZER, method=OptimizerMethod.MUON, clip_grad=0.05)  # which the norm exceeds
    got = on_ranks_of(learner_of(name, ONE), run_rank, model, tmp_path, optimizer)
    (tmp_path / "one").mkdir()
    expected = train(MegatronPolicy.load(model, learner=ONE, optimizer=optimizer), ONE, tmp_path / "one")
    _, gradients = qwen3_moe.gradients(model, BATCH)
    require_gradients(tmp_path / "checkpoint", gradients, clip=optimizer.clip_grad)
    for rank in got:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        for key, tensor in rank["trained"].items():
            seen = gradients[key].abs() > 1e-3 * gradients[key].abs().max()  # else AdamW divides rounding by itself
            torch.testing.assert_close(tensor[seen], expected["trained"][key][seen], rtol=0, atol=1e-6, msg=key)


@pytest.mark.slow
def test_experts_in_bfloat16_have_masters_of_their_own(model: Path, tmp_path: Path) -> None:
    got = on_ranks_of(learner_of("experts, optimizer split, bfloat16", ONE), run_rank, model, tmp_path)
    loss, gradients = qwen3_moe.gradients(model, BATCH)
    # Rounding chooses other experts for some tokens, so that no value is known better.
    assert got[0]["losses"][0] == pytest.approx(loss, abs=0.2)
    assert weight_totals(rank["held"] for rank in got) == weight_totals([got[0]["gathered"]])
    reader, _ = open_checkpoint(OneRank(), tmp_path / "checkpoint")
    with reader:
        assert {name.removeprefix("main/") for name in reader.index if name.startswith("main/")} == gradients.keys()


def other_routes(path: Path) -> list[np.ndarray]:
    """Experts that routers choose whose weights are a little different, as an engine's rounding makes them."""
    model = qwen3_moe.load(path)
    torch.manual_seed(1)
    with torch.no_grad():
        for router in filter(None, qwen3_moe.routers(model)):
            router.weight += 0.05 * torch.randn_like(router.weight)
    return [qwen3_moe.routed(model, tokens)[1] for tokens in BATCH]


def update_of(routes: list[np.ndarray]) -> Update:
    """An update whose gradient is that of the mean next-token loss."""
    how = {"token_ids": BATCH, "prompt_lengths": STARTS, "routes": routes, "policy_version": 0}
    logprobs = [[0.0] * (len(tokens) - 1) for tokens in BATCH]
    batch = TrainBatch(rollout_logprobs=logprobs, advantages=[1.0] * len(BATCH), **how)
    return Update(batch=batch, trainer_logprobs=None, ref_logprobs=None, loss=LossConfig(), temperature=1.0)


def replay(rank: int, learner: LearnerConfig, model: Path, path: Path, routes: list[np.ndarray]) -> Any:
    """This rank's logprobs by the given routes, by its own routers, and in an update by the given routes again."""
    policy = MegatronPolicy.load(model, learner=learner, optimizer=OPTIMIZER)
    mine = plan_shards([len(tokens) for tokens in BATCH], learner.parallel.data)[learner.parallel.data_rank(rank)]
    part = part_of(update_of(routes), mine)
    starts = part.batch.prompt_lengths
    before = policy.logprobs(part.batch.token_ids, starts, 1.0, routes=part.batch.routes)
    own = policy.logprobs(part.batch.token_ids, starts, 1.0)
    trained = policy.train_step(part)
    policy.save_checkpoint(path, {})
    policy.finish_checkpoint()
    return {"mine": mine, "before": before, "own": own, "during": trained.own_logprobs}


def require_replayed(got: list[Any], model: Path, routes: list[np.ndarray], path: Path) -> None:
    """Logprobs and gradients are transformers' with the same experts; without routes those of the routers' own."""
    mixture, largest = qwen3_moe.load(model), 0.0
    for rank in got:
        for place, index in enumerate(rank["mine"]):
            told = qwen3_moe.routed(mixture, BATCH[index], routes[index])[0].detach().numpy()
            own = qwen3_moe.routed(mixture, BATCH[index])[0].detach().numpy()
            for row in (rank["before"][place], rank["during"][place]):
                np.testing.assert_allclose(row, told, rtol=0, atol=1e-5)
            np.testing.assert_allclose(rank["own"][place], own, rtol=0, atol=1e-5)
            largest = max(largest, float(np.abs(told - own).max()))
    assert largest > 0.01, "the routes must be others than the learner's own"
    require_gradients(path, qwen3_moe.gradients(model, BATCH, routes)[1])


@NORMALIZES
def test_tokens_go_where_they_are_sent_and_routers_still_learn(normalizes: bool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    qwen3_moe.write_model(model, seed=0, normalizes=normalizes)
    routes = other_routes(model)
    got = replay(0, ONE, model, tmp_path / "checkpoint", routes)
    require_replayed([got], model, routes, tmp_path / "checkpoint")
    process = LearnerProcess(ONE)
    process.load(model, None)
    for row, own in zip(process.logprobs(update_of(routes).batch, 1.0), got["before"], strict=True):
        np.testing.assert_array_equal(row, own)
    with pytest.raises(ValueError, match=r"routes of sequence 0 must have the shape \(30, 3, 2\), got \(29, 3, 2\)"):
        process.logprobs(update_of([routes[0][1:], *routes[1:]]).batch, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "data"])
def test_tokens_go_where_they_are_sent_on_several_ranks(name: str, model: Path, tmp_path: Path) -> None:
    routes = other_routes(model)
    got = on_ranks_of(learner_of(name, ONE), replay, model, tmp_path / "checkpoint", routes)
    if name == "three stages":
        got = got[-1:]  # the stage that has the logits
    require_replayed(got, model, routes, tmp_path / "checkpoint")
