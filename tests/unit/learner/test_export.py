"""The weights that leave a policy, and what its ranks hold and answer for: every element once, whatever the layout."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from slipstream.learner.architecture import Architecture
from slipstream.learner.export import held_weights, save_model
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.weights import Shard, shard_from_hf
from slipstream.refit.fingerprint import HeldWeights, differences, held_whole, part_fingerprints, weight_totals
from slipstream.types import Dtype
from tests.unit.learner.policies import LEARNER, SCRATCH, new_policy, same_weights
from tests.unit.learner.test_weights import ARCH, SPARSE, random_hf, random_sparse


def test_a_model_in_several_files_is_the_same_model(tmp_path: Path) -> None:
    policy = new_policy(optimizer=None)
    (tmp_path / "tokenizer").mkdir()
    largest = max(tensor.nbytes for _, tensor in policy.weights())
    config = policy.architecture.to_hf(Dtype.FLOAT32)
    save_model(tmp_path / "model", config, policy.weights(), tmp_path / "tokenizer", max_file_bytes=2 * largest)
    files = sorted(tmp_path.glob("model/*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 2 * largest for file in files)
    loaded = MegatronPolicy.load(tmp_path / "model", learner=LEARNER, optimizer=None)
    assert same_weights(policy, loaded)
    save_model(tmp_path / "one", config, policy.weights(), tmp_path / "tokenizer")
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "one" / "weights.safetensors")
    assert same_weights(policy, MegatronPolicy.load(tmp_path / "one", learner=LEARNER, optimizer=None))
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert {name for name, _ in theirs.named_parameters()} == {name for name, _ in policy.weights()}


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_output_layer_are_those_of_the_checkpoint(tied: bool) -> None:
    policy = new_policy(dataclasses.replace(SCRATCH, tie_word_embeddings=tied), optimizer=None)
    named = dict(policy.weights())
    embeddings, output = policy.vocabulary_weights()
    assert torch.equal(embeddings, named["model.embed_tokens.weight"])
    assert torch.equal(output, named["model.embed_tokens.weight" if tied else "lm_head.weight"])
    assert list(policy.mtp_weights()) == []


def held(arch: Architecture, full: dict[str, torch.Tensor], shard: Shard) -> list[HeldWeights]:
    return list(held_weights(dict(shard_from_hf(full.__getitem__, arch, shard)), arch, shard))


def require_each_element_once(arch: Architecture, full: dict[str, torch.Tensor], shards: list[Shard]) -> None:
    """Fingerprints of all ranks sum to those of the checkpoint, and nobody hashes what another rank does."""
    ranks = [part_fingerprints(held(arch, full, shard)) for shard in shards]
    whole = weight_totals([part_fingerprints(held_whole(name, tensor) for name, tensor in full.items())])
    assert weight_totals(ranks) == whole
    assert sum(map(len, ranks)) == len(set().union(*ranks))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_fingerprints_of_all_ranks_sum_to_those_of_the_checkpoint(tensor: int, pipeline: int, tied: bool) -> None:
    arch = dataclasses.replace(ARCH, tie_word_embeddings=tied)
    sizes = {"tensor_size": tensor, "pipeline_size": pipeline}
    places = itertools.product(range(tensor), range(pipeline))
    shards = [Shard(tensor_rank=rank, pipeline_rank=stage, **sizes) for rank, stage in places]
    require_each_element_once(arch, random_hf(arch), shards)


@pytest.mark.parametrize(("expert", "data"), [(1, 1), (1, 2), (2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_every_element_of_an_expert_is_answered_for_once(expert: int, data: int, pipeline: int) -> None:
    sizes = {"pipeline_size": pipeline, "expert_size": expert}
    places = itertools.product(range(pipeline), range(data))
    shards = [Shard(pipeline_rank=stage, expert_rank=rank % expert, data_rank=rank, **sizes) for stage, rank in places]
    require_each_element_once(SPARSE, random_sparse(), shards)


def test_parts_in_one_parameter_are_told_apart() -> None:
    weights = held(ARCH, random_hf(ARCH), Shard(tensor_rank=1, tensor_size=2))
    cut = {part.name: (part.dim, part.start, part.length) for each in weights for part in each.parts}
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")
    assert [cut[f"model.layers.0.{name}.weight"] for name in names] == [(0, 4, 4), (0, 2, 2), (1, 4, 4), (0, 5, 5)]


@pytest.mark.parametrize("names", [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")])
def test_projections_that_changed_places_are_named(names: tuple[str, str]) -> None:
    full = random_hf(ARCH)
    first, second = (f"model.layers.1.{name}.weight" for name in names)
    swapped = full | {first: full[second], second: full[first]}
    found = [weight_totals([part_fingerprints(held(ARCH, each, Shard()))]) for each in (full, swapped)]
    assert differences(*found) == [first, second]
