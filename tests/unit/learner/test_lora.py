"""Adapters of the policy against transformers, against torch's AdamW on the same factors, and against a resumed run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import Qwen3ForCausalLM

from slipstream.config import ConfigError, from_mapping
from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture, require_adaptable
from slipstream.learner.config import LearnerConfig, LoraConfig, LoraTarget, Packing, PolicyConfig, Recompute
from slipstream.learner.lora import initial_a, peft_name
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.weights import initial_weights
from slipstream.refit.fingerprint import file_fingerprints, part_fingerprints, weight_totals
from slipstream.types import Dtype
from tests.integration import qwen3_moe
from tests.unit.learner import mimo, policies
from tests.unit.learner.policies import LEARNER, OPTIMIZER, SCRATCH, new_policy, random_sequences, save, update_of

MIXTURE = Path(__file__).parents[1] / "recipe_fields" / "mixture"
LORA = LoraConfig(rank=4, alpha=6.0)
ATTENTION = LoraConfig(rank=4, alpha=6.0, targets=(LoraTarget.QUERY, LoraTarget.VALUE))
SOME = LoraConfig(rank=3, alpha=6.0, targets=(LoraTarget.UP, LoraTarget.KEY, LoraTarget.DOWN))
TIED = replace(SCRATCH, tie_word_embeddings=True)
ADAMW = replace(OPTIMIZER, learning_rate=1e-2, weight_decay=0.0, clip_grad=0.5)
SHAPES = {"q_proj": (64, 32), "k_proj": (32, 32), "v_proj": (32, 32), "o_proj": (32, 64)}
SHAPES |= {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(new_policy(TIED, optimizer=None), tmp_path_factory.mktemp("base"))


def _load(base: Path, lora: LoraConfig | None = LORA, learner: LearnerConfig = LEARNER) -> MegatronPolicy:
    return MegatronPolicy.load(base, learner=learner, optimizer=ADAMW, lora=lora)


def _targeted(name: str, lora: LoraConfig) -> bool:
    return name.endswith(tuple(f".{target.value}.weight" for target in lora.targets))


@pytest.mark.parametrize("lora", [LORA, ATTENTION, SOME], ids=["all", "attention", "some"])
def test_updates_move_the_targets_alone_and_the_base_never(base: Path, lora: LoraConfig) -> None:
    policy, files = _load(base, lora), load_file(base / "model.safetensors")
    assert all(torch.equal(tensor, files[name]) for name, tensor in policy.weights())
    before = policy.logprobs(random_sequences(), [3] * 9, 0.8)
    for step in range(2):
        policy.train_step(update_of(policy, seed=step))
    for name, tensor in policy.weights():
        assert torch.equal(tensor, files[name]) is not _targeted(name, lora), name
    for row, other in zip(policy.base_logprobs(random_sequences(), [3] * 9, 0.8), before, strict=True):
        np.testing.assert_array_equal(row, other)
    merged = {name: tensor.clone() for name, tensor in policy.weights()}
    assert policy._adapters is not None
    with policy._adapters.switched_off():
        assert all(torch.equal(tensor, files[name]) for name, tensor in policy.weights())
    assert all(torch.equal(tensor, merged[name]) for name, tensor in policy.weights())


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all", "some"])
def test_pefts_files_and_the_merged_model_have_the_policys_logits(base: Path, lora: LoraConfig, tmp_path: Path) -> None:
    policy = _load(base, lora)
    for step in range(2):
        policy.train_step(update_of(policy, seed=step))
    path = save(policy, tmp_path)
    config = json.loads((path / "adapter" / "adapter_config.json").read_text())
    factors = load_file(path / "adapter" / "adapter_model.safetensors")
    named = {(layer, t.value) for layer in range(3) for t in lora.targets}
    expected: dict[str, tuple[int, int]] = {}
    for layer, target in named:
        block = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        rows, columns = SHAPES[target]
        stem = f"base_model.model.model.layers.{layer}.{block}.{target}"
        expected |= {f"{stem}.lora_A.weight": (lora.rank, columns), f"{stem}.lora_B.weight": (rows, lora.rank)}
    assert {name: tuple(tensor.shape) for name, tensor in factors.items()} == expected
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"]) == (lora.rank, 6)
    assert config["target_modules"] == [target.value for target in lora.targets]

    merged = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, parameter in adapted.named_parameters():
        a, b = (factors.get(peft_name(name, factor)) for factor in "ab")
        if a is not None and b is not None:
            parameter.data += config["lora_alpha"] / config["r"] * b @ a
    sequences = random_sequences()
    for tokens, logprobs in zip(sequences, policy.logprobs(sequences, [1] * 9, 1.0), strict=True):
        with torch.no_grad():
            logits, others = (model(torch.tensor([tokens])).logits[0] for model in (merged, adapted))
        torch.testing.assert_close(logits, others, rtol=0, atol=2e-6)
        np.testing.assert_allclose(logprobs, policies.chosen(logits, tokens).numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_the_merged_weights_are_those_that_the_learner_computes_with(base: Path, dtype: Dtype, tmp_path: Path) -> None:
    learner = replace(LEARNER, dtype=dtype)
    policy = _load(base, learner=learner)
    policy.train_step(update_of(policy))
    path = save(policy, tmp_path)
    whole = MegatronPolicy.load(path, learner=learner, optimizer=None)
    sequences = random_sequences(seed=1)
    for row, other in zip(*(each.logprobs(sequences, [3] * 9, 1.0) for each in (policy, whole)), strict=True):
        np.testing.assert_array_equal(row, other)
    totals = weight_totals([part_fingerprints(policy.held_weights())])
    assert totals.keys() == {name for name, _ in policy.weights()}
    assert totals == file_fingerprints(path, dict.fromkeys(totals, dtype.value))


@pytest.mark.parametrize(
    ("lora", "learner"),
    [
        (LORA, LEARNER),
        (SOME, LEARNER),
        (LORA, replace(LEARNER, packing=Packing.ALWAYS)),
        (SOME, replace(LEARNER, packing=Packing.ALWAYS, recompute=Recompute.FULL)),
        (ATTENTION, replace(LEARNER, recompute=Recompute.FULL, logprob_chunk_tokens=10)),
    ],
    ids=["all", "some", "all, Megatron's layers", "some, Megatron's layers recomputed", "attention, recomputed"],
)
def test_updates_equal_torchs_on_the_factors(base: Path, lora: LoraConfig, learner: LearnerConfig) -> None:
    policy = _load(base, lora, learner)
    hf = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32)
    frozen = {name: parameter.detach() for name, parameter in hf.named_parameters()}
    a = {n: initial_a(n, rank=lora.rank, columns=w.shape[1]) for n, w in frozen.items() if _targeted(n, lora)}
    b = {name: torch.zeros(len(frozen[name]), lora.rank) for name in a}
    factors = [factor.requires_grad_() for named in (a, b) for factor in named.values()]
    adam = torch.optim.AdamW(factors, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)

    def merged() -> dict[str, torch.Tensor]:
        scale = lora.alpha / lora.rank
        return {name: w + scale * b[name] @ a[name] if name in a else w for name, w in frozen.items()}

    for step in range(3):
        sequences = random_sequences(seed=step)
        expected, _ = policies.torch_step(lambda ids: functional_call(hf, merged(), (ids,)), adam, sequences, 4)
        assert policy.lm_step(sequences, [4] * len(sequences)) == pytest.approx(expected, abs=1e-5)
    policies.require_close(policy, merged(), atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "is_split"), [(Dtype.FLOAT32, False), (Dtype.BFLOAT16, False), (Dtype.BFLOAT16, True)]
)
def test_a_policy_resumes_from_its_adapters_bit_for_bit(
    base: Path, dtype: Dtype, is_split: bool, tmp_path: Path
) -> None:
    learner = replace(LEARNER, dtype=dtype, distributed_optimizer=is_split)
    policy = _load(base, learner=learner)
    policy.train_step(update_of(policy))
    policy.save_checkpoint(tmp_path / "checkpoint", {"position": 7})
    uninterrupted = [policy.train_step(update_of(policy, seed=step)) for step in (1, 2)]
    policy.finish_checkpoint()
    fresh = _load(base, learner=learner)
    fresh.offload()
    assert fresh.load_checkpoint(tmp_path / "checkpoint") == {"position": 7}
    for step, expected in zip((1, 2), uninterrupted, strict=True):
        assert fresh.train_step(update_of(fresh, seed=step)) == expected
    assert policies.same_weights(policy, fresh)
    index = json.loads((tmp_path / "checkpoint" / "index.json").read_text())
    kept = {name.partition("/")[2] for name in index if not name.startswith("rng")}
    assert kept and all(".lora_" in name for name in kept)
    other = save(new_policy(replace(TIED, seed=99)), tmp_path)
    for path, lora in ((base, None), (base, SOME), (other, LORA)):
        with pytest.raises(ValueError, match="of another model"):
            _load(path, lora, learner).load_checkpoint(tmp_path / "checkpoint")


def test_targets_that_no_adapter_has_are_refused() -> None:
    unknown = rf"targets\[1\] must be one of {', '.join(LoraTarget)}, got 'qkv_proj'"
    twice = ["q_proj", "q_proj"], "targets must name each matrix once"
    for targets, message in ((["q_proj", "qkv_proj"], unknown), ([], "targets must not be empty"), twice):
        with pytest.raises(ConfigError, match=rf"policy\.lora\.{message}"):
            from_mapping(PolicyConfig, {"model": "m", "lora": {"targets": targets}}, "policy")


def test_matrices_of_experts_and_ranks_above_the_matrixs_own_are_refused(base: Path) -> None:
    mixture = Architecture.from_hf(MIXTURE)
    with pytest.raises(ConfigError, match=r"policy\.lora\.targets must leave out .* got \['gate_proj', 'up_proj', 'd"):
        require_adaptable(mixture, LoraConfig(rank=1))
    require_adaptable(mixture, LoraConfig(rank=1, targets=(LoraTarget.QUERY, LoraTarget.OUTPUT)))
    with pytest.raises(ConfigError, match=r"policy\.lora\.rank must be at most 32, the shorter side of q_proj, got 33"):
        _load(base, LoraConfig(rank=33))


def _require_moved(policy: MegatronPolicy, lora: LoraConfig, before: dict[str, torch.Tensor]) -> None:
    for step in range(2):
        policy.lm_step(random_sequences(seed=step), [3] * 9)
    for name, tensor in policy.weights():
        assert torch.equal(tensor, before[name]) is not _targeted(name, lora), name


def test_the_attention_of_a_mixture_of_experts_has_adapters(tmp_path: Path) -> None:
    qwen3_moe.write_model(tmp_path, seed=0)
    _require_moved(_load(tmp_path, ATTENTION), ATTENTION, load_file(tmp_path / "model.safetensors"))


def test_a_mimos_trunk_has_adapters_and_its_mtp_layer_is_trained_whole() -> None:
    weights = initial_weights(mimo.ARCH, std=0.1, seed=0)
    parallel.initialize(LEARNER.parallel)
    policy = MegatronPolicy(weights.__getitem__, mimo.ARCH, LEARNER, ADAMW, lora=LORA)
    policy.start_mtp(ADAMW)
    _require_moved(policy, LORA, weights)
    assert all(not torch.equal(tensor, weights[name]) for name, tensor in policy.mtp_weights())
