"""What a recipe may say of sampling and of the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from slipstream.engine.config import EngineConfig, SamplingConfig

Sampling = partial(SamplingConfig, max_response_tokens=1)
Engine = partial(EngineConfig, max_model_len=1, max_num_seqs=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"temperature": -0.1},
            "sampling.temperature must be 0 or >= 0.01, got -0.1; vLLM samples at 0.01 instead of anything between",
        ),
        (
            {"temperature": 0.009},
            "sampling.temperature must be 0 or >= 0.01, got 0.009; vLLM samples at 0.01 instead of anything between",
        ),
        ({"top_p": 0.0}, "sampling.top_p must lie in (0, 1], got 0.0"),
        ({"top_p": 1.5}, "sampling.top_p must lie in (0, 1], got 1.5"),
        ({"top_k": -1}, "sampling.top_k must be >= 0 (0 means all tokens), got -1"),
        ({"max_response_tokens": 0}, "sampling.max_response_tokens must be > 0, got 0"),
    ],
)
def test_sampling_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(Sampling, **values) == message


def test_sampling_on_its_bounds_is_taken() -> None:
    config = Sampling(temperature=0.0, top_p=1.0, top_k=0)
    assert (config.temperature, config.top_p, config.top_k, config.max_response_tokens) == (0.0, 1.0, 0, 1)
    assert Sampling(top_p=0.5).top_p == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 0}, "engine.max_model_len must be > 0, got 0"),
        ({"max_num_seqs": 0}, "engine.max_num_seqs must be > 0, got 0"),
        ({"tensor_parallel_size": 0}, "engine.tensor_parallel_size must be > 0, got 0"),
        ({"num_engines": 0}, "engine.num_engines must be > 0, got 0"),
        ({"num_kept_idle": -1}, "engine.num_kept_idle must be >= 0, got -1"),
        ({"start_timeout_s": 0.0}, "engine.start_timeout_s must be > 0, got 0.0"),
        ({"answer_timeout_s": 0.0}, "engine.answer_timeout_s must be > 0, got 0.0"),
        ({"max_restarts": -1}, "engine.max_restarts must be >= 0, got -1"),
        ({"gpu_memory_utilization": 0.0}, "engine.gpu_memory_utilization must lie in (0, 1), got 0.0"),
        ({"gpu_memory_utilization": 1.0}, "engine.gpu_memory_utilization must lie in (0, 1), got 1.0"),
    ],
)
def test_an_engine_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(Engine, **values) == message


def test_an_engine_on_its_bounds_is_taken() -> None:
    config = Engine(tensor_parallel_size=1, num_engines=1, num_kept_idle=0, gpu_memory_utilization=0.5, max_restarts=0)
    assert (config.max_model_len, config.max_num_seqs) == (1, 1)


def test_half_a_second_is_a_deadline() -> None:
    engine = EngineConfig(max_model_len=8, max_num_seqs=1, start_timeout_s=0.5, answer_timeout_s=0.5)
    assert (engine.start_timeout_s, engine.answer_timeout_s) == (0.5, 0.5)
