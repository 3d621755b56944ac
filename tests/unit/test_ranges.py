"""Ranges of a recipe's fields: the rule as its error states it, values beside the bounds, and values on them."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from pydantic import TypeAdapter

from slipstream.config import LARGEST, Checked, _parts, rule
from slipstream.data.config import DataConfig
from slipstream.data.synthetic import SyntheticConfig
from slipstream.drafts.config import (
    DFlashConfig,
    DraftConfig,
    Eagle3Config,
    HistoryConfig,
    NgramConfig,
    OnlineConfig,
    PretrainConfig,
    SuffixConfig,
)
from slipstream.drafts.length import TuningConfig
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.evaluation import EvaluationConfig
from slipstream.grpo.config import DynamicSamplingConfig, GrpoConfig, LossConfig, OptimizerConfig
from slipstream.grpo.loop_config import LoopConfig
from slipstream.learner.config import (
    LearnerConfig,
    ParallelConfig,
    PolicyConfig,
    RopeConfig,
    RopeType,
    ScratchConfig,
    ShapeConfig,
)
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.refit.config import RefitConfig
from slipstream.rewards.config import OverlongConfig, RewardConfig
from slipstream.tracking.config import DriftConfig, TrackingConfig
from slipstream.types import LoopMode
from slipstream.workers.placement.config import PlacementConfig

Optimizer = partial(OptimizerConfig, learning_rate=1e-4)
SECTIONS: dict[str, partial[Any]] = {
    "data": partial(DataConfig, max_prompt_tokens=1),
    "data.synthetic": partial(SyntheticConfig, num_conflicting=0, num_leaked=0),
    "draft": partial(DraftConfig),
    "draft.dflash": partial(DFlashConfig),
    "draft.eagle3": partial(Eagle3Config),
    "draft.ngram": partial(NgramConfig, prompt_lookup_max=5),
    "draft.online": partial(OnlineConfig),
    "draft.pretrain": partial(PretrainConfig),
    "draft.suffix": partial(SuffixConfig),
    "draft.history": partial(HistoryConfig, match_max=5),
    "engine": partial(EngineConfig, max_model_len=1, max_num_seqs=1),
    "evaluation": partial(EvaluationConfig, sampling=SamplingConfig(max_response_tokens=1), num_samples_per_problem=1),
    "grpo": partial(GrpoConfig, num_steps=1, prompts_per_step=1, group_size=2, optimizer=Optimizer()),
    "grpo.dynamic_sampling": partial(DynamicSamplingConfig),
    "grpo.loss": partial(LossConfig, truncated_importance_sampling=2.0),
    "learner": partial(LearnerConfig),
    "learner.parallel": partial(ParallelConfig),
    "loop": partial(LoopConfig, mode=LoopMode.ONE_STEP_OFF),
    "losslessness": partial(LosslessnessConfig),
    "optimizer": Optimizer,
    "placement": partial(PlacementConfig),
    "policy": partial(PolicyConfig, model="a/b"),
    "policy.rope": partial(RopeConfig, type=RopeType.YARN, factor=2.0),
    "policy.scratch": partial(ScratchConfig, optimizer=Optimizer()),
    "refit": partial(RefitConfig),
    "reward": partial(RewardConfig),
    "reward.overlong": partial(OverlongConfig, buffer_tokens=4),
    "sampling": partial(SamplingConfig, max_response_tokens=1),
    "shape": partial(ShapeConfig, num_query_groups=1),
    "tracking": partial(TrackingConfig),
    "tracking.drift": partial(DriftConfig),
    "tuning": partial(TuningConfig),
}
LARGER_SETS = "; larger sets come from files"
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "minLength"}
SAMPLED = "; vLLM samples at 0.01 instead of anything between"
Row = tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, str]]


def bounds(low: tuple[str, Any, Any], high: tuple[str, Any, Any], fields: dict[str, str]) -> tuple[Row, Row]:
    """Rows of an interval: each bound's rule, a value beside it, and one on it."""
    (low_rule, below, lowest), (high_rule, above, highest) = low, high
    return (low_rule, (below,), (lowest,), fields), (high_rule, (above,), (highest,), fields)


ROWS: list[Row] = [
    (
        "must be >= 1",
        (0, -1),
        (1,),
        {
            "data": "max_prompt_tokens",
            "draft.dflash": "num_layers tokens_per_row loss_chunk_tokens",
            "draft.eagle3": "tokens_per_row loss_chunk_tokens",
            "draft.online": "updates horizon_steps",
            "draft.pretrain": "num_prompts samples_per_prompt num_heldout_prompts tokens_per_step ttt_steps "
            "checkpoint_every_steps",
            "engine": "max_model_len max_num_seqs tensor_parallel_size num_engines num_threads",
            "evaluation": "num_samples_per_problem",
            "learner": "max_tokens_per_microbatch",
            "losslessness": "num_tokens num_repeated_prompts num_repeats num_greedy_prompts num_replications",
            "policy.scratch": "max_position_embeddings tokens_per_step",
            "reward": "num_workers",
            "sampling": "max_response_tokens",
            "shape": "hidden_size num_layers num_attention_heads ffn_hidden_size",
        },
    ),
    (
        "must be > 0",
        (0.0, -0.5),
        (0.5,),
        {
            "draft.suffix": "max_spec_factor",
            "engine": "start_timeout_s answer_timeout_s",
            "grpo.loss": "clip_high",
            "learner": "start_timeout_s answer_timeout_s",
            "optimizer": "clip_grad",
            "placement": "start_timeout_s",
            "shape": "init_std",
            "refit": "bucket_mib timeout_s",
            "reward": "timeout_s",
            "reward.overlong": "penalty",
            "tracking": "replay_every_s",
        },
    ),
    (
        "must be >= 1 or null",
        (0, -1),
        (1, None),
        {
            "data": "num_validation_problems",
            "evaluation": "every_steps",
            "learner": "num_threads",
            "policy.rope": "original_max_position_embeddings",
        },
    ),
    ("must be >= 1 or null", (0,), (1, None), {"learner": "logprob_chunk_tokens"}),
    ("must be > 0 or null", (0.0,), (0.5, None), {"engine": "kv_cache_gib"}),
    ("must be > 0 or null", (0.0,), (0.5,), {"grpo.loss": "truncated_importance_sampling"}),
    (
        "must be > 0 or null",
        (0.0,),
        (4.5,),
        {"policy.rope": "low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim"},
    ),
    ("must be >= 1", (0.99,), (1.0,), {"policy.rope": "factor"}),
    ("must be >= 1, got 0; null takes draft.pretrain.ttt_steps", (0,), (1, None), {"draft.online": "ttt_steps"}),
    (
        "must be >= 1, got 0; null takes draft.pretrain.tokens_per_step",
        (0,),
        (1, None),
        {"draft.online": "tokens_per_update"},
    ),
    (
        "must be >= 1, got 0; null keeps the whole vocabulary",
        (0,),
        (1, None),
        {"draft.eagle3": "vocab_size", "draft.dflash": "vocab_size"},
    ),
    (
        "must be >= 1, got 0; null takes sampling.max_response_tokens",
        (0,),
        (1, None),
        {"tuning": "max_response_tokens"},
    ),
    *bounds(
        ("must be > 0, got 0.0; null takes engine.gpu_memory_utilization", 0.0, 1e-9),
        ("must be < 1, got 1.0; null takes engine.gpu_memory_utilization", 1.0, 1.0 - 1e-9),
        {"tuning": "gpu_memory_utilization"},
    ),
    (
        "must be >= 0",
        (-1,),
        (0,),
        {
            "data.synthetic": "num_conflicting num_leaked",
            "draft.suffix": "max_cached_requests",
            "engine": "num_kept_idle max_restarts",
            "grpo.dynamic_sampling": "max_extra_batches",
            "learner": "num_kept_idle max_restarts",
            "loop": "max_off_policy_steps",
            "optimizer": "warmup_steps",
            "placement": "gpus_per_node",
            "policy.scratch": "num_steps",
            "reward.overlong": "buffer_tokens",
        },
    ),
    (
        "must be >= 0",
        (-0.1,),
        (0.0,),
        {
            "draft.pretrain": "states_cache_gib",
            "grpo.loss": "kl_coefficient",
            "losslessness": "near_tie_nats",
            "tracking": "close_wait_s",
        },
    ),
    ("must be >= 0, got -1; 0 means all tokens", (-1,), (0,), {"sampling": "top_k"}),
    (
        "must be >= 1",
        (0,),
        (1,),
        {
            "draft.history": "match_min max_tokens",
            "draft.ngram": "prompt_lookup_min",
            "draft.suffix": "max_tree_depth",
            "grpo": "num_steps prompts_per_step updates_per_step checkpoint_every_steps",
            "learner.parallel": "tensor pipeline context data expert",
            "placement": "nodes",
            "refit": "check_every_steps",
            "tuning": "num_repeats",
        },
    ),
    (
        "must be >= 0",
        (-1,),
        (2**63 - 1,),
        dict.fromkeys(("data", "draft", "grpo", "losslessness", "policy.scratch"), "seed"),
    ),
    ("must be >= 0", (-1,), (0,), {"placement": "generation_nodes training_nodes"}),
    ("must be >= 0", (-1,), (1,), {"draft.pretrain": "num_steps"}),
    ("must be >= 1", (0,), (5,), {"draft.ngram": "prompt_lookup_max", "draft.history": "match_max"}),
    ("must be >= 1", (0,), (1,), {"shape": "num_query_groups"}),
    ("must be >= 2", (1,), (2,), {"tuning": "max_live_engines"}),
    ("must be >= 2", (1,), (2,), {"data.synthetic": "min_terms"}),
    (
        "must be >= 2, got 1; advantages are centred on the group's mean, and one rollout has no baseline",
        (1,),
        (2,),
        {"grpo": "group_size"},
    ),
    ("must be >= 5", (4,), (5,), {"tracking.drift": "num_executions"}),
    ("must be >= 0.5", (0.4,), (0.5,), {"reward": "worker_memory_gib"}),
    *bounds(
        ("must be > 0", 0.0, 1e-9),
        ("must be < 1", 1.0, 1.0 - 1e-9),
        {
            "engine": "gpu_memory_utilization",
            "grpo.loss": "clip_low",
            "losslessness": "family_level power max_detectable_bias",
        },
    ),
    *bounds(
        ("must be > 0", 0.0, 1e-9),
        ("must be <= 1", 1.1, 1.0),
        {
            "draft.pretrain": "ttt_step_loss_decay",
            "optimizer": "learning_rate",
            "sampling": "top_p",
        },
    ),
    *bounds(
        ("must be >= 0", -0.1, 0.0),
        ("must be <= 1", 1.1, 1.0),
        {
            "data.synthetic": "one_digit_rate subtraction_rate noise_rate careless_rate general_rate",
            "draft.suffix": "min_token_prob",
            "optimizer": "weight_decay",
            "reward": "max_failed_fraction",
        },
    ),
    *bounds(("must be > 0", 0.0, 0.5), ("must be <= 2", 2.1, 2.0), {"data.synthetic": "terms_decay"}),
    *bounds(("must be >= 10", 9, 10), ("must be <= 99", 100, 99), {"data.synthetic": "max_term"}),
    *bounds(
        (f"must be >= 1, got 0{LARGER_SETS}", 0, 1),
        (f"must be <= 1000000, got 1000001{LARGER_SETS}", 1_000_001, 1_000_000),
        {"data.synthetic": "num_train_problems num_copies num_draft_rows num_validation_problems"},
    ),
    *bounds(("must be >= 2", 1, 3), ("must be <= 999", 1000, 999), {"data.synthetic": "max_terms"}),
    (f"must be 0 or >= 0.01, got 0.009{SAMPLED}", (0.009,), (0.0, 0.01), {"sampling": "temperature"}),
    (f"must be >= 0, got -0.1{SAMPLED}", (-0.1,), (0.0, 0.01), {"sampling": "temperature"}),
    (
        "must be a multiple of 2, got 33; RoPE turns pairs of dimensions",
        (33,),
        (2,),
        {"shape": "head_dim"},
    ),
    (
        "must be > 0, got 0; RoPE turns pairs of dimensions",
        (0,),
        (6,),
        {"shape": "head_dim"},
    ),
    *bounds(("must be >= 0", -1, 0), ("must be <= 1", 2, 1), {"policy.scratch": "num_mtp_layers"}),
    ("must be two numbers in [0, 1)", ((0.9,), (0.9, 1.0), (-0.1, 0.9)), ((0.0, 0.5),), {"optimizer": "betas"}),
    (
        "must be two ratios around 1",
        ((0.5,), (-0.1, 2.0), (1.0, 2.0), (0.5, 1.0)),
        ((0.0, 2.0), None),
        {"grpo.loss": "mask_band"},
    ),
    ("must not be empty", ("",), ("a",), {"data": "system", "reward": "function"}),
    ("must not be empty", ((),), (), {"data": "train draft_in_domain draft_general validation"}),
    ("must hold {problem} exactly once", ("solve", "{problem} {problem}"), ("Q: {problem}",), {"data": "instruction"}),
    ("must rise from 1, without repeats", ((), (0, 2), (2, 1), (2, 2)), ((1,), (4, 16)), {"tuning": "batch_sizes"}),
    ("must not be empty, got ''; name a hub id, a path, or \"scratch\"", ("",), ("a/b",), {"policy": "model"}),
]
# A configuration that fits the value: rules of several fields are tested where the fields are.
ALONG: dict[str, dict[str, Any]] = {
    "data.synthetic.max_terms": {"min_terms": 3},
    "data.synthetic.num_validation_problems": {"num_leaked": 0},
    "policy.scratch.num_mtp_layers": {},
    "policy.rope.low_freq_factor": {"type": "llama3", "high_freq_factor": 5.0},
    "policy.rope.high_freq_factor": {"type": "llama3", "low_freq_factor": 1.0},
    "policy.rope.mscale": {"mscale_all_dim": 1.0},
    "policy.rope.mscale_all_dim": {"mscale": 1.0},
}


def cases(which: int) -> Iterator[Any]:
    for row in ROWS:
        for section, names in row[3].items():
            for name in names.split():
                yield from (pytest.param(section, name, row[0], v, id=f"{section}.{name}={v}") for v in row[which])


@pytest.mark.parametrize(("section", "name", "rule", "value"), cases(1))
def test_a_value_beside_the_range_is_refused(
    refusal: Callable[..., str], section: str, name: str, rule: str, value: Any
) -> None:
    message = refusal(SECTIONS[section], **{name: value})
    got = "" if ", got" in rule else f", got {value!r}"
    assert message == f"{section}.{name} {rule}{got}"


@pytest.mark.parametrize(("section", "name", "rule", "value"), cases(2))
def test_a_value_on_the_bounds_is_taken(section: str, name: str, rule: str, value: Any) -> None:
    assert getattr(SECTIONS[section](**{name: value, **ALONG.get(f"{section}.{name}", {})}), name) == value


def test_every_range_has_a_row() -> None:
    found = {f"{section}.{name}" for *_, fields in ROWS for section, names in fields.items() for name in names.split()}
    assert found == {
        f"{section}.{name}" for section, config in SECTIONS.items() for name in ruled(typing.cast(type, config.func))
    }


def ruled(config: type) -> Iterator[str]:
    """Names of the fields that have a range or a rule; those of a mapping's values are tested where they are read."""
    assert issubclass(config, Checked)
    hints = typing.get_type_hints(config, include_extras=True)
    for name, schema in TypeAdapter(config).json_schema()["properties"].items():
        bounds = {
            (key, value) for part in (schema, *schema.get("anyOf", ())) for key, value in part.items() if key in BOUNDS
        }
        is_mapping = schema.get("type") == "object"
        if bounds - {("maximum", LARGEST)} or (
            not is_mapping and any(isinstance(part, rule) for part in _parts(hints[name]))
        ):
            yield name
