"""What a recipe may say of the policy and its learner."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.learner.config import ParallelConfig, PolicyConfig, ScratchConfig
from tests.unit.refusals import refused, rows


@rows(
    """
policy.scratch.shape.num_query_groups=3
    policy.scratch.shape.num_query_groups must divide num_attention_heads 4, got 3
policy.scratch.num_mtp_layers=1 + policy.scratch.shape.hidden_size=96
    policy.scratch.shape.head_dim must be hidden_size 96 / num_attention_heads 4 with MTP, got 32; vLLM's MiMo knows no
    other
policy.scratch.optimizer.warmup_steps=401
    policy.scratch.optimizer.warmup_steps must lie in [0, num_steps 250], got 401
"""
)
def test_a_scratch_policy_outside_its_bounds_is_refused(given: str, expected: str) -> None:
    assert refused(given) == expected


def test_sizes_are_given_exactly_for_a_policy_that_is_trained_from_scratch(refusal: Callable[..., str]) -> None:
    assert PolicyConfig(model="scratch", scratch=ScratchConfig()).scratch == ScratchConfig()
    assert PolicyConfig(model="Qwen/Qwen3-8B").scratch is None
    assert (
        refusal(PolicyConfig, model="scratch") == "policy.scratch must be given exactly when policy.model is 'scratch',"
        " got None; policy.model is 'scratch'"
    )
    message = refusal(PolicyConfig, model="Qwen/Qwen3-8B", scratch=ScratchConfig())
    assert message.startswith("policy.scratch must be given exactly when policy.model is 'scratch', got ScratchConfig(")
    assert message.endswith("; policy.model is 'Qwen/Qwen3-8B'")


@rows(
    """
policy.rope={factor: 2.0, low_freq_factor: 1.0, type: yarn}
    policy.rope.low_freq_factor must be null with type yarn, got 1.0; leave it out
policy.rope={factor: 2.0, truncate: true, type: linear}
    policy.rope.truncate must be null with type linear, got True; leave it out
policy.rope={factor: 2.0, type: llama3}
    policy.rope.low_freq_factor must be given with type llama3, got None; Llama 3.1 has 1 and 4
policy.rope={factor: 2.0, low_freq_factor: 1.0, type: llama3}
    policy.rope.high_freq_factor must be given with type llama3, got None; Llama 3.1 has 1 and 4
policy.rope={factor: 2.0, high_freq_factor: 4.0, low_freq_factor: 4.0, type: llama3}
    policy.rope.high_freq_factor must be > low_freq_factor 4.0, got 4.0
policy.rope={beta_slow: 32.0, factor: 2.0, type: yarn}
    policy.rope.beta_slow must leave beta_fast > beta_slow, got 32.0
policy.rope={beta_fast: 1.0, factor: 2.0, type: yarn}
    policy.rope.beta_fast must leave beta_fast > beta_slow, got 1.0
policy.rope={factor: 2.0, mscale: 1.0, type: yarn}
    policy.rope.mscale must be given exactly with mscale_all_dim, got 1.0; one alone is not read
policy.rope={factor: 2.0, type: ntk}
    policy.rope.type must be one of linear, llama3, yarn, got 'ntk'
"""
)
def test_a_scaling_of_angles_that_is_not_whole_is_refused(given: str, expected: str) -> None:
    assert refused(given) == expected


@rows(
    """
learner.parallel.data=3 + learner.parallel.expert=2
    learner.parallel.expert must divide the 3 data-parallel ranks, to which experts are dealt, got 2
learner.parallel.tensor=2 + learner.parallel.data=2 + learner.parallel.expert=2
    learner.parallel.expert must be 1 with tensor parallelism, which is not there for experts, got 2
learner.parallel.context=2 + learner.parallel.data=2 + learner.parallel.expert=2
    learner.parallel.expert must be 1 with context parallelism, which keeps every expert on every rank, got 2
learner.parallel.sequence_parallel=true
    learner.parallel.sequence_parallel must be false with tensor 1, got True; it splits activations over the
    tensor-parallel ranks
"""
)
def test_a_split_of_the_learner_outside_its_bounds_is_refused(given: str, expected: str) -> None:
    assert refused(given) == expected


def test_the_learner_has_as_many_ranks_as_its_splits_multiply_to() -> None:
    assert ParallelConfig().world_size == 1
    assert ParallelConfig(tensor=2, pipeline=3, data=5, sequence_parallel=True).world_size == 30
    assert ParallelConfig(tensor=2, context=4, data=3).world_size == 24
    assert ParallelConfig(tensor=2, context=4, pipeline=3, data=3).num_model_ranks == 24
    assert ParallelConfig(pipeline=3, data=4, expert=2).world_size == 12  # experts are dealt to ranks that there are


@pytest.mark.parametrize(("sequence_parallel", "multiple"), [(False, 4), (True, 8)])
def test_a_micro_batch_is_padded_to_what_its_ranks_split_evenly(sequence_parallel: bool, multiple: int) -> None:
    assert ParallelConfig(tensor=2, context=4, sequence_parallel=sequence_parallel).width_multiple == multiple


def test_context_parallel_ranks_lie_between_tensor_and_data_parallel_ones() -> None:
    layout = ParallelConfig(tensor=2, context=2, data=2, pipeline=2)
    assert [layout.data_rank(rank) for rank in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2


def test_tensor_parallel_ranks_come_first_then_data_parallel_ones_then_stages() -> None:
    layout = ParallelConfig(tensor=2, data=3, pipeline=2)
    assert [layout.data_rank(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2] * 2
