"""What learner ranks hold and answer for: every element of every tensor once, whatever the layout."""

from __future__ import annotations

import dataclasses

import pytest

from slipstream.learner.export import held_weights
from slipstream.learner.weights import Shard, shard_from_hf
from slipstream.refit.fingerprint import differences, held_whole, part_fingerprints, weight_totals
from tests.unit.learner.test_weights import ARCH, random_hf


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_fingerprints_of_all_ranks_sum_to_those_of_the_checkpoint(tensor: int, pipeline: int, tied: bool) -> None:
    arch = dataclasses.replace(ARCH, tie_word_embeddings=tied)
    full = random_hf(arch)
    shards = [
        Shard(tensor_rank=rank, tensor_size=tensor, pipeline_rank=stage, pipeline_size=pipeline)
        for rank in range(tensor)
        for stage in range(pipeline)
    ]
    ranks = [
        part_fingerprints(held_weights(dict(shard_from_hf(full.__getitem__, arch, shard)), arch, shard))
        for shard in shards
    ]
    assert weight_totals(ranks) == weight_totals(
        [part_fingerprints(held_whole(name, tensor) for name, tensor in full.items())]
    )
    assert sum(map(len, ranks)) == len(set().union(*ranks))  # nobody hashes what another rank does


def test_parts_in_one_parameter_are_told_apart() -> None:
    full = random_hf(ARCH)
    second = Shard(tensor_rank=1, tensor_size=2)
    held = {
        part.name: part
        for weights in held_weights(dict(shard_from_hf(full.__getitem__, ARCH, second)), ARCH, second)
        for part in weights.parts
    }
    cut = {
        name.removeprefix("model.layers.0.").removesuffix(".weight"): (part.dim, part.start, part.length)
        for name, part in held.items()
        if "layers.0." in name
    }
    assert cut == {
        "self_attn.q_proj": (0, 4, 4),
        "self_attn.k_proj": (0, 2, 2),
        "self_attn.v_proj": (0, 2, 2),
        "self_attn.o_proj": (1, 4, 4),
        "mlp.gate_proj": (0, 5, 5),
        "mlp.up_proj": (0, 5, 5),
        "mlp.down_proj": (1, 5, 5),
    }
    assert held["lm_head.weight"].start == 4


@pytest.mark.parametrize("names", [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")])
def test_projections_that_changed_places_are_named(names: tuple[str, str]) -> None:
    full = random_hf(ARCH)
    first, second = (f"model.layers.1.{name}.weight" for name in names)
    swapped = full | {first: full[second], second: full[first]}
    found = [
        weight_totals(
            [part_fingerprints(held_weights(dict(shard_from_hf(each.__getitem__, ARCH, Shard())), ARCH, Shard()))]
        )
        for each in (full, swapped)
    ]
    assert differences(*found) == [first, second]
