"""What a recipe may say of the policy and its learner."""

from __future__ import annotations

from collections.abc import Callable

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
def test_sizes_angles_and_splits_outside_their_bounds_are_refused(given: str, expected: str) -> None:
    assert refused(given) == expected


def test_sizes_are_given_exactly_for_a_policy_that_is_trained_from_scratch(refusal: Callable[..., str]) -> None:
    assert PolicyConfig(model="scratch", scratch=ScratchConfig()).scratch == ScratchConfig()
    assert PolicyConfig(model="Qwen/Qwen3-8B").scratch is None
    rule = "policy.scratch must be given exactly when policy.model is 'scratch', got "
    assert refusal(PolicyConfig, model="scratch") == f"{rule}None; policy.model is 'scratch'"
    message = refusal(PolicyConfig, model="Qwen/Qwen3-8B", scratch=ScratchConfig())
    assert message.startswith(f"{rule}ScratchConfig(") and message.endswith("; policy.model is 'Qwen/Qwen3-8B'")


def test_the_learner_has_as_many_ranks_as_its_splits_multiply_to() -> None:
    assert ParallelConfig().world_size == 1
    assert ParallelConfig(tensor=2, pipeline=3, data=5, sequence_parallel=True).world_size == 30
    assert ParallelConfig(tensor=2, context=4, data=3).world_size == 24
    assert ParallelConfig(tensor=2, context=4, pipeline=3, data=3).num_model_ranks == 24
    assert ParallelConfig(pipeline=3, data=4, expert=2).world_size == 12  # experts are dealt to ranks that there are


def test_a_micro_batch_is_padded_to_what_its_ranks_split_evenly() -> None:
    assert ParallelConfig(tensor=2, context=4).width_multiple == 4
    assert ParallelConfig(tensor=2, context=4, sequence_parallel=True).width_multiple == 8


def test_tensor_parallel_ranks_come_first_then_context_and_data_parallel_ones_then_stages() -> None:
    for layout, ranks in (
        (ParallelConfig(tensor=2, data=3, pipeline=2), [0, 0, 1, 1, 2, 2] * 2),
        (ParallelConfig(tensor=2, context=2, data=2, pipeline=2), [0, 0, 0, 0, 1, 1, 1, 1] * 2),
    ):
        assert [layout.data_rank(rank) for rank in range(layout.world_size)] == ranks
