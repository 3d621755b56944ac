"""The learner on several gloo ranks against one: the same numbers whatever the split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from slipstream.grpo.config import Correction, Level, LossConfig, LossKind, OptimizerConfig, OptimizerMethod
from slipstream.grpo.update import Update, part_of, part_of_batch
from slipstream.learner.config import LearnerConfig, LoraConfig, Packing, ScratchConfig, ShapeConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.packing import plan_shards
from slipstream.refit.fingerprint import held_whole, part_fingerprints, weight_totals
from slipstream.types import Dtype, TrainBatch
from tests.forked.ranks import learner_of, on_ranks_of
from tests.unit.learner import families
from tests.unit.learner.policies import VOCAB, new_policy, save

pytestmark = pytest.mark.slow

# Small weights keep every gradient well above rounding, which Adam would divide by itself.
SCRATCH = ScratchConfig(
    shape=ShapeConfig(hidden_size=32, num_layers=4, head_dim=16, ffn_hidden_size=48, init_std=0.02),
    max_position_embeddings=64,
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_grad=0.5)
MUON = replace(OPTIMIZER, method=OptimizerMethod.MUON, clip_grad=0.05)  # which the norm exceeds
LOSS = LossConfig(
    kl_coefficient=0.1,
    correction=Correction.SEQUENCE,
    truncated_importance_sampling=0.6,
    mask_band=(0.5, 2.0),
    mask_level=Level.SEQUENCE,
)
LORA = LoraConfig(rank=4, alpha=8.0)
LEARNER = LearnerConfig(max_tokens_per_microbatch=66, num_threads=1)
LEARNERS = (
    "tensor",
    "sequence",
    "pipeline",
    "data",
    "tensor in chunks, layers recomputed",
    "sequence in chunks, parts recomputed",
    "sequence, layers recomputed",
    "pipeline in chunks, parts recomputed",
    "data in chunks, layers recomputed",
    "data, optimizer split",
    "data in chunks, optimizer split, bfloat16",
    "tensor, packed",
    "sequence in chunks, packed, layers recomputed",
    "pipeline in chunks, packed",
    "sequence in chunks, optimizer split",
    "context",
    "context, parts recomputed, optimizer split",
    "context in chunks, packed, layers recomputed",
    "context in chunks, packed, optimizer split, bfloat16",
    "context and data, packed, optimizer split",
    "context and pipeline",
)
# What a split does to an embedding that is the output too: tensors, layers, sequences and optimizer apart and together.
TIED = (
    *("tensor", "pipeline", "data", "data in chunks, optimizer split, bfloat16", "pipeline in chunks, packed"),
    *("sequence in chunks, optimizer split", "context and pipeline"),
)
CASES = [(False, name) for name in LEARNERS] + [(True, name) for name in TIED]
BY_MUON = (
    *("tensor", "pipeline", "data", "data, optimizer split", "data in chunks, optimizer split, bfloat16"),
    *("sequence in chunks, optimizer split", "context, parts recomputed, optimizer split"),
    "tensor and data, optimizer split",
)
WITH_ADAPTERS = ("tensor", "sequence, layers recomputed", "pipeline", "data, optimizer split", "context")


def _sequences() -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(0)
    return tuple(tuple(rng.integers(0, VOCAB, rng.integers(6, 32)).tolist()) for _ in range(9))


def _train(
    policy: MegatronPolicy,
    learner: LearnerConfig,
    directory: Path,
    rank: int = 0,
    *,
    loss: LossConfig = LOSS,
    counts: Sequence[bool] = (),
) -> dict[str, Any]:
    """Two updates of this rank's share of the sequences; what it says of them, by their index."""
    sequences = _sequences()
    layout = learner.parallel
    mine = plan_shards([len(tokens) for tokens in sequences], layout.data)[layout.data_rank(rank)]
    whole = TrainBatch(
        token_ids=sequences,
        prompt_lengths=[3] * len(sequences),
        # Ratios to the policy, which is near uniform, of about 0.94; of sequence 3 about 4.6: it is masked out.
        rollout_logprobs=[[-5.0 if i == 3 else -3.4] * (len(tokens) - 3) for i, tokens in enumerate(sequences)],
        advantages=np.random.default_rng(1).normal(size=len(sequences)).tolist(),
        policy_version=0,
        counts=counts,
    )
    part = part_of_batch(whole, mine)

    def logprobs() -> dict[int, np.ndarray]:
        return dict(zip(mine, policy.logprobs(part.token_ids, part.prompt_lengths, 1.3), strict=True))

    before = logprobs()
    known = [before.get(index, np.zeros(len(tokens) - 3)) for index, tokens in enumerate(sequences)]
    updates = Update(batch=whole, trainer_logprobs=known, ref_logprobs=known, loss=loss, temperature=1.3)
    update = part_of(replace(updates, max_response_tokens=32), mine)
    stats = [policy.train_step(update).stats]
    policy.save_checkpoint(directory / "checkpoint", {})
    stats.append(policy.train_step(update).stats)
    policy.finish_checkpoint()
    policy.load_checkpoint(directory / "checkpoint")
    assert policy.train_step(update).stats == stats[-1], "resumed and uninterrupted differ"
    return {
        "before": before,
        "after": logprobs(),
        "stats": [dataclasses.asdict(step) for step in stats],
        "weights": _weights(policy),
        "fingerprints": part_fingerprints(policy.held_weights()),
        "gathered": part_fingerprints(held_whole(name, tensor) for name, tensor in policy.weights()),
    }


def _weights(policy: MegatronPolicy) -> dict[str, np.ndarray]:
    return {name: tensor.float().clone().numpy() for name, tensor in policy.weights()}


def _rank(
    rank: int,
    learner: LearnerConfig,
    model: Path,
    directory: Path,
    *,
    optimizer: OptimizerConfig = OPTIMIZER,
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    policy = MegatronPolicy.load(model, learner=learner, optimizer=optimizer, lora=lora)
    result = _train(policy, learner, directory, rank)
    if lora is not None:
        policy.save_hf(directory / "adapted", model)
    result["random"] = _weights(new_policy(SCRATCH, learner, None))
    return result


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    directory = tmp_path_factory.mktemp("single")
    model = save(new_policy(replace(SCRATCH, tie_word_embeddings=request.param), LEARNER, None), directory)
    results: dict[Any, Any] = {}
    for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16):
        learner = replace(LEARNER, dtype=dtype)
        for optimizer in (OPTIMIZER, MUON):
            policy = MegatronPolicy.load(model, learner=learner, optimizer=optimizer)
            results[dtype, optimizer.method] = _train(policy, learner, directory)
        results[dtype, OPTIMIZER.method]["random"] = _weights(new_policy(SCRATCH, learner, None))
    adapted = MegatronPolicy.load(model, learner=LEARNER, optimizer=OPTIMIZER, lora=LORA)
    results[LORA] = _train(adapted, LEARNER, directory)
    adapted.save_hf(directory / "adapted", model)
    return model, results


@pytest.mark.parametrize(
    ("saved", "name"),
    CASES,
    indirect=["saved"],
    ids=[f"{'tied' if tied else 'untied'}, {name}" for tied, name in CASES],
)
def test_several_ranks_compute_what_one_does(saved: tuple[Path, dict[Any, Any]], name: str, tmp_path: Path) -> None:
    learner = learner_of(name, LEARNER)
    model, single = saved[0], saved[1][learner.dtype, OPTIMIZER.method]
    got = on_ranks_of(learner, _rank, model, tmp_path)
    _require_same(got, single, rough=learner.dtype is Dtype.BFLOAT16)
    for rank in got:
        for key, tensor in rank["random"].items():
            np.testing.assert_array_equal(tensor, single["random"][key], err_msg=key)


@pytest.mark.parametrize("saved", [False], ids=["untied"], indirect=True)
@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_two_ranks_train_adapters_as_one_does(name: str, saved: tuple[Path, dict[Any, Any]], tmp_path: Path) -> None:
    got = on_ranks_of(learner_of(name, LEARNER), partial(_rank, lora=LORA), saved[0], tmp_path)
    _require_same(got, saved[1][LORA], rough=False)
    found, expected = (
        load_file(path / "adapted" / "adapter" / "adapter_model.safetensors") for path in (tmp_path, saved[0].parent)
    )
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        np.testing.assert_allclose(tensor, expected[key], rtol=0, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("saved", [False, True], ids=["untied", "tied"], indirect=True)
@pytest.mark.parametrize("name", BY_MUON)
def test_ranks_orthogonalize_whole_matrices_as_one_does(
    name: str, saved: tuple[Path, dict[Any, Any]], tmp_path: Path
) -> None:
    learner = learner_of(name, LEARNER)
    got = on_ranks_of(learner, partial(_rank, optimizer=MUON), saved[0], tmp_path)
    single = saved[1][learner.dtype, MUON.method]
    _require_same(got, single, rough=learner.dtype is Dtype.BFLOAT16, atol=1e-6)


def _require_same(got: list[dict[str, Any]], single: dict[str, Any], *, rough: bool, atol: float = 2e-5) -> None:
    assert weight_totals(rank["fingerprints"] for rank in got) == weight_totals([got[0]["gathered"]])
    # A bfloat16 near 3.4 is known to 0.008, and AdamW's first steps are signs: gradients near 0 go either way.
    for rank in got:
        for name in ("before", "after"):
            for index, row in rank[name].items():
                np.testing.assert_allclose(row, single[name][index], rtol=0, atol=0.05 if rough else 2e-5)
        for step, expected in zip(rank["stats"], single["stats"], strict=True):
            assert step == pytest.approx(expected, rel=2e-2 if rough else 1e-4, abs=1e-3 if rough else 1e-6)
        assert rank["weights"].keys() == single["weights"].keys()
        for name, tensor in rank["weights"].items():
            np.testing.assert_allclose(tensor, single["weights"][name], rtol=0, atol=6e-3 if rough else atol)
    assert {index for rank in got for index in rank["before"]} == single["before"].keys()


def _each(
    rank: int, learner: LearnerConfig, cases: dict[str, tuple[Path, dict[str, Any]]], directory: Path
) -> dict[str, dict[str, Any]]:
    """Train the model of each case anew: how, the case says."""
    found = {}
    for name, (model, how) in cases.items():
        policy = MegatronPolicy.load(model, learner=learner, optimizer=OPTIMIZER)
        (directory / name).mkdir(parents=True, exist_ok=True)
        found[name] = _train(policy, learner, directory / name, rank, **how)
    return found


def test_two_ranks_split_each_family_as_one_computes_it(tmp_path: Path) -> None:
    """Biases on queries, keys and values are split with their rows; the others have neither biases nor norms there."""
    cases: dict[str, Any] = {name: (tmp_path / name, {}) for name in ("qwen2", "llama3", "mistral")}
    for name, (model, _) in cases.items():
        families.write_model(model, name, initializer_range=0.02)
    single = _each(0, LEARNER, cases, tmp_path / "one")
    got = on_ranks_of(learner_of("tensor", LEARNER), _each, cases, tmp_path / "two")
    for name, expected in single.items():
        # The gradient of a key's bias is near 0, and AdamW's first steps are signs.
        _require_same([rank[name] for rank in got], expected, rough=False, atol=3e-4)


@pytest.mark.parametrize("saved", [False], ids=["untied"], indirect=True)
def test_two_ranks_that_share_the_responses_compute_each_kind_of_loss_as_one_does(
    saved: tuple[Path, dict[Any, Any]], tmp_path: Path
) -> None:
    losses = [replace(LOSS, kind=kind, clip_low=0.05, clip_high=0.05) for kind in LossKind]
    counts = [index not in (2, 5) for index in range(9)]
    cases = {loss.kind.value: (saved[0], {"loss": loss, "counts": counts}) for loss in losses}
    single = _each(0, LEARNER, cases, tmp_path / "one")
    assert len({each["stats"][1]["loss"] for each in single.values()}) == len(LossKind)
    got = on_ranks_of(learner_of("data, packed", LEARNER), _each, cases, tmp_path / "two")
    for name, expected in single.items():
        _require_same([rank[name] for rank in got], expected, rough=False)


FOUR_GROUPS = replace(SCRATCH, shape=replace(SCRATCH.shape, num_layers=2, num_query_groups=4, init_std=0.2))
OTHERS = [np.random.default_rng(length).integers(0, VOCAB, length).tolist() for length in (31, 17, 12, 5)]


def _step(policy: MegatronPolicy) -> dict[str, Any]:
    """Logprobs, largest logits, bytes that forward passes save for backward passes, loss, and weights of an update."""
    parameters = {each.data_ptr() for each in policy._gpt.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    logprobs = policy.logprobs(OTHERS, [3] * 4, 1.3)
    largest = policy.map_logits(OTHERS, [3] * 4, lambda logits, _: logits.amax(1, keepdim=True), width=1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = policy.lm_step(OTHERS, [3] * 4)
    return {"rows": [*logprobs, *largest.T], "loss": loss, "saved": sum(saved.values()), "weights": _weights(policy)}


def _step_of(rank: int, learner: LearnerConfig, model: Path) -> dict[str, Any]:
    return _step(MegatronPolicy.load(model, learner=learner, optimizer=OPTIMIZER))


@pytest.mark.parametrize("name", ["context, packed", "context and sequence, packed"])
def test_a_context_rank_saves_its_part_of_the_activations_and_computes_the_same(name: str, tmp_path: Path) -> None:
    learner = replace(LEARNER, packing=Packing.ALWAYS)
    model = save(new_policy(FOUR_GROUPS, learner, None), tmp_path)
    expected, split = _step_of(0, learner, model), learner_of(name, LEARNER)
    for rank in on_ranks_of(split, _step_of, model):
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for row, other in zip(rank["rows"], expected["rows"], strict=True):
            np.testing.assert_allclose(row, other, rtol=0, atol=2e-5)
        for key, tensor in expected["weights"].items():
            np.testing.assert_allclose(rank["weights"][key], tensor, rtol=0, atol=2e-5, err_msg=key)
        assert rank["saved"] < (1 / split.parallel.world_size + 0.05) * expected["saved"]
