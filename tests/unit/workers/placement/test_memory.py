"""Bytes of a GPU by part, worked by hand, and the figures that a reading of the code had found for the 8B model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.config import EngineConfig
from slipstream.learner.architecture import Architecture
from slipstream.learner.config import LearnerConfig, ParallelConfig, Recompute, ScratchConfig
from slipstream.simulator.cost.models import load_model
from slipstream.types import Dtype
from slipstream.workers.placement import memory
from slipstream.workers.placement.assessment import PublishedShape


@dataclass(frozen=True)
class Tiny:
    """h 4, A 4, K 2, f 6, V 8, two layers."""

    vocab_size: int = 8
    hidden_size: int = 4
    num_layers: int = 2
    num_attention_heads: int = 2
    num_query_groups: int = 1
    head_dim: int = 2
    ffn_hidden_size: int = 6
    tie_word_embeddings: bool = False


# A layer: matrices 4 x (2*4 + 2*2 + 3*6) = 120, norms 2*4 + 2*2 = 12; tables 8*4 = 32 each; final norm 4.
LAYER, TABLE, NORM = 132, 32, 4


EAGLE3 = memory.Proposer(parameters=memory.draft_parameters(Tiny()), num_layers=1, num_query_groups=1, head_dim=2)


def _learner(**parallel: int | bool) -> LearnerConfig:
    return LearnerConfig(
        max_tokens_per_microbatch=10,
        dtype=Dtype.BFLOAT16,
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
    )


def test_parameters_of_a_stage() -> None:
    assert memory.stage_parameters(Tiny(), _learner(), 0) == 2 * LAYER + 2 * TABLE + NORM
    assert memory.stage_parameters(Tiny(), _learner(pipeline=2), 0) == LAYER + TABLE
    assert memory.stage_parameters(Tiny(), _learner(pipeline=2), 1) == LAYER + TABLE + NORM
    assert memory.stage_parameters(Tiny(), _learner(tensor=2), 0) == 2 * (60 + 12) + TABLE + NORM
    tied = Tiny(tie_word_embeddings=True)
    assert memory.stage_parameters(tied, _learner(), 0) == 2 * LAYER + TABLE + NORM
    assert memory.stage_parameters(tied, _learner(pipeline=2), 1) == LAYER + TABLE + NORM  # a copy


def test_all_parameters_are_those_of_the_architecture() -> None:
    scratch = ScratchConfig()
    arch = Architecture.from_scratch(scratch, vocab_size=64, eos_token_id=3)
    assert memory.num_parameters(arch) == arch.num_parameters()


def test_activations_and_logits_of_a_token() -> None:
    # b (4h + 4f + 4A + 3K) = 2 (16 + 24 + 16 + 6), (b + 12) V = 14 * 8
    assert memory.activation_bytes(Tiny(), _learner()) == 124
    assert memory.activation_bytes(Tiny(), _learner(tensor=2)) == 2 * (16 + 46 / 2)
    assert memory.activation_bytes(Tiny(), _learner(tensor=2, sequence_parallel=True)) == 62
    assert memory.logit_bytes(Tiny(), _learner()) == 112
    assert memory.logit_bytes(Tiny(), _learner(tensor=2)) == 56


def test_a_learner_in_bfloat16_keeps_masters_and_two_moments() -> None:
    found = memory.learner_memory(Tiny(), _learner(), with_reference=True)
    parameters = 332
    assert (found.weights, found.gradients, found.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    assert (found.reference, found.activations, found.logits) == (2 * parameters, 10 * 2 * 124, 10 * 112)
    assert found.total == 20 * parameters + 2480 + 1120


def test_a_learner_in_float32_is_its_own_master() -> None:
    learner = LearnerConfig(max_tokens_per_microbatch=10, dtype=Dtype.FLOAT32)
    found = memory.learner_memory(Tiny(), learner, with_reference=False)
    assert (found.weights, found.gradients, found.optimizer, found.reference) == (4 * 332, 4 * 332, 8 * 332, 0)
    assert found.logits == 10 * (4 + 12) * 8


def test_the_fuller_stage_counts() -> None:
    # First stage: two micro-batches in flight, 2 * 10 * 124 = 2480; last: one, 1240, and logits 1120.
    found = memory.learner_memory(Tiny(), _learner(pipeline=2), with_reference=False)
    assert (found.activations, found.logits) == (2480, 0)
    wide = Tiny(vocab_size=80)
    assert memory.learner_memory(wide, _learner(pipeline=2), with_reference=False).logits == 11200


def test_recomputing_keeps_less_and_works_on_one_layer_at_a_time() -> None:
    # Full: b h = 8, and the layer in hand 124 in all; selective: b (4h + 3A + 3K) = 2 (16 + 12 + 6) = 68.
    for recompute, kept in ((Recompute.FULL, 8), (Recompute.SELECTIVE, 68), (Recompute.NONE, 124)):
        learner = replace(_learner(), recompute=recompute)
        found = memory.learner_memory(Tiny(), learner, with_reference=False)
        assert found.activations == 10 * (2 * kept + 124 - kept)


def test_chunked_logits_and_a_split_optimizer() -> None:
    learner = replace(_learner(data=4), logprob_chunk_tokens=3, distributed_optimizer=True)
    found = memory.learner_memory(Tiny(), learner, with_reference=False)
    assert (found.logits, found.optimizer) == (3 * 112, 3 * 332)
    wide = replace(_learner(), logprob_chunk_tokens=30)
    assert memory.learner_memory(Tiny(), wide, with_reference=False).logits == 10 * 112


def test_the_terms_that_are_split_over_ranks_shrink_with_them() -> None:
    # Selectively 2 (16 + (12 + 6) / 2); the engine's draft 464 / 2, a layer 16,384 x 2 (8 + 18 / 2).
    assert memory.activation_bytes(Tiny(), _learner(tensor=2), Recompute.SELECTIVE) == 50
    found = memory.engine_memory(Tiny(), _engine(tensor_parallel_size=2), gpu_bytes=4e6, longest_k=1, proposer=EAGLE3)
    assert (found.draft, found.activations) == (232, 16_384 * 2 * 17)
    assert found.kv_bytes_per_token == 24  # the draft's layer counts from the first draft token on


def _engine(**values: float | int | None) -> EngineConfig:
    return EngineConfig(max_model_len=100, max_num_seqs=2, **values)  # type: ignore[arg-type]


def test_an_engines_cache_takes_what_is_left_of_its_share() -> None:
    found = memory.engine_memory(
        Tiny(), _engine(gpu_memory_utilization=0.5), gpu_bytes=4e6, longest_k=3, proposer=EAGLE3
    )
    # Draft: 3 * 16 + 2*4*(4+4) + 4*4 + 3*4*6 + 4*8 = 48 + 64 + 16 + 72 + 32
    assert (found.weights, found.draft) == (664, 464)
    assert found.activations == 16_384 * 2 * (8 + 18)  # the sampler's 2 * 4 * 8 * 12 is less
    assert found.total == 2e6
    assert found.kv_bytes_per_token == 2 * 3 * 2 * 2  # keys and values, two layers and the draft's, K, bytes
    assert found.kv_tokens == int((2e6 - 664 - 464 - 851_968) / 24)


def test_a_named_cache_is_taken_as_it_is_and_without_a_draft_there_is_none() -> None:
    found = memory.engine_memory(Tiny(), _engine(kv_cache_gib=1.0), gpu_bytes=4e6, longest_k=0, proposer=EAGLE3)
    assert (found.draft, found.kv_cache, found.kv_bytes_per_token) == (0, 2**30, 16)
    split = memory.engine_memory(Tiny(), _engine(tensor_parallel_size=2), gpu_bytes=4e6, longest_k=0, proposer=EAGLE3)
    assert (split.weights, split.kv_bytes_per_token) == (332, 16)  # one key-value head is copied


def test_the_8b_model_needs_what_its_code_was_read_to_need() -> None:
    shape = PublishedShape.of(load_model("qwen3-8b"))
    learner = LearnerConfig(
        max_tokens_per_microbatch=16_384, dtype=Dtype.BFLOAT16, parallel=ParallelConfig(tensor=4, data=8)
    )
    found = memory.learner_memory(shape, learner, with_reference=False)
    # 8.19e9 parameters; 18 bytes each over 4 ranks; 66 KB a token and layer; (2 + 12) x 151,936 / 4 bytes a token.
    assert memory.num_parameters(shape) == pytest.approx(8.19e9, rel=1e-3)
    assert found.weights + found.gradients + found.optimizer == pytest.approx(37e9, rel=0.01)
    assert memory.activation_bytes(shape, learner) == 67_072
    assert found.activations == pytest.approx(40e9, rel=0.02)
    assert found.logits == pytest.approx(9e9, rel=0.04)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.booleans())
def test_more_ranks_never_need_more_each(tensor: int, pipeline: int, is_sequence_parallel: bool) -> None:
    shape = PublishedShape.of(load_model("qwen3-8b"))

    def total(tensor: int, pipeline: int) -> float:
        sequence = is_sequence_parallel and tensor > 1
        parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, sequence_parallel=sequence)
        learner = LearnerConfig(max_tokens_per_microbatch=4096, dtype=Dtype.BFLOAT16, parallel=parallel)
        return memory.learner_memory(shape, learner, with_reference=False).total

    assert total(2 * tensor, pipeline) < total(tensor, pipeline)
    assert total(tensor, 2 * pipeline) <= total(tensor, pipeline)
