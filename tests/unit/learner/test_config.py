"""What a recipe may say of the policy and its learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.learner.config import LearnerConfig, ParallelConfig, PolicyConfig, ScratchConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 0}, "policy.scratch.hidden_size must be > 0, got 0"),
        ({"num_layers": 0}, "policy.scratch.num_layers must be > 0, got 0"),
        ({"ffn_hidden_size": 0}, "policy.scratch.ffn_hidden_size must be > 0, got 0"),
        ({"max_position_embeddings": 0}, "policy.scratch.max_position_embeddings must be > 0, got 0"),
        ({"tokens_per_step": 0}, "policy.scratch.tokens_per_step must be > 0, got 0"),
        ({"num_query_groups": 3}, "policy.scratch.num_query_groups must divide num_attention_heads 4, got 3"),
        ({"num_query_groups": 0}, "policy.scratch.num_query_groups must divide num_attention_heads 4, got 0"),
        ({"head_dim": 33}, "policy.scratch.head_dim must be even, for RoPE, got 33"),
        ({"num_mtp_layers": 2}, "policy.scratch.num_mtp_layers must be 0 or 1, got 2"),
        (
            {"num_mtp_layers": 1, "hidden_size": 96},
            "policy.scratch.head_dim must be hidden_size 96 / num_attention_heads 4 with MTP, got 32; "
            "vLLM's MiMo knows no other",
        ),
        ({"init_std": 0.0}, "policy.scratch.init_std must be > 0, got 0.0"),
        ({"num_steps": -1, "warmup_steps": 0}, "policy.scratch.num_steps must be >= 0, got -1"),
        ({"learning_rate": 0.0}, "policy.scratch.learning_rate must lie in (0, 1], got 0.0"),
        ({"warmup_steps": -1}, "policy.scratch.warmup_steps must lie in [0, num_steps 400], got -1"),
        ({"warmup_steps": 401}, "policy.scratch.warmup_steps must lie in [0, num_steps 400], got 401"),
    ],
)
def test_a_scratch_policy_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(ScratchConfig, **values) == message


def test_a_scratch_policy_on_its_bounds_is_taken() -> None:
    config = ScratchConfig(
        hidden_size=1,
        num_layers=1,
        ffn_hidden_size=1,
        max_position_embeddings=1,
        tokens_per_step=1,
        num_attention_heads=1,
        num_query_groups=1,
        head_dim=2,
        init_std=0.5,
        learning_rate=0.5,
        num_steps=0,
        warmup_steps=0,
    )
    assert config.num_steps == 0
    assert ScratchConfig(head_dim=6, warmup_steps=400).warmup_steps == 400
    assert ScratchConfig(num_mtp_layers=1, hidden_size=24, num_attention_heads=4, head_dim=6).num_mtp_layers == 1


def test_a_policy_needs_a_name(refusal: Callable[..., str]) -> None:
    message = "policy.model must name a model, got ''; a hub id, a path, or \"scratch\""
    assert refusal(PolicyConfig, model="") == message


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor": 0}, "learner.parallel.tensor must be >= 1, got 0"),
        ({"pipeline": 0}, "learner.parallel.pipeline must be >= 1, got 0"),
        ({"data": 0}, "learner.parallel.data must be >= 1, got 0"),
        ({"expert": 0}, "learner.parallel.expert must be >= 1, got 0"),
        (
            {"data": 3, "expert": 2},
            "learner.parallel.expert must divide the 3 data-parallel ranks, to which experts are dealt, got 2",
        ),
        (
            {"tensor": 2, "data": 2, "expert": 2},
            "learner.parallel.expert must be 1 with tensor parallelism, which is not there for experts, got 2",
        ),
        (
            {"sequence_parallel": True},
            "learner.parallel.sequence_parallel must be false with tensor 1, got True; "
            "it splits activations over the tensor-parallel ranks",
        ),
    ],
)
def test_a_split_of_the_learner_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(ParallelConfig, **values) == message


def test_the_learner_has_as_many_ranks_as_its_splits_multiply_to() -> None:
    assert ParallelConfig().world_size == 1
    assert ParallelConfig(tensor=2, pipeline=3, data=5, sequence_parallel=True).world_size == 30
    assert ParallelConfig(pipeline=3, data=4, expert=2).world_size == 12  # experts are dealt to ranks that there are


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens_per_microbatch": 0}, "learner.max_tokens_per_microbatch must be > 0, got 0"),
        ({"start_timeout_s": 0.0}, "learner.start_timeout_s must be > 0, got 0.0"),
        ({"answer_timeout_s": 0.0}, "learner.answer_timeout_s must be > 0, got 0.0"),
        ({"max_restarts": -1}, "learner.max_restarts must be >= 0, got -1"),
        ({"num_threads": 0}, "learner.num_threads must be > 0 or null, got 0"),
        ({"num_kept_idle": -1}, "learner.num_kept_idle must be >= 0, got -1"),
    ],
)
def test_a_learner_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(LearnerConfig, **values) == message


def test_a_learner_on_its_bounds_is_taken() -> None:
    assert LearnerConfig(max_tokens_per_microbatch=1, num_threads=1, max_restarts=0).num_threads == 1
    assert LearnerConfig(num_threads=None).num_threads is None


def test_tensor_parallel_ranks_come_first_then_data_parallel_ones_then_stages() -> None:
    layout = ParallelConfig(tensor=2, data=3, pipeline=2)
    assert [layout.data_rank(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2] * 2


def test_half_a_second_is_a_deadline_and_one_token_a_chunk() -> None:
    learner = LearnerConfig(start_timeout_s=0.5, answer_timeout_s=0.5, logprob_chunk_tokens=1)
    assert (learner.start_timeout_s, learner.answer_timeout_s, learner.logprob_chunk_tokens) == (0.5, 0.5, 1)


def test_a_chunk_of_no_tokens_is_refused(refusal: Callable[..., str]) -> None:
    message = refusal(LearnerConfig, logprob_chunk_tokens=0)
    assert message == "learner.logprob_chunk_tokens must be > 0 or null, got 0"
