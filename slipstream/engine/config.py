"""How rollouts are sampled and how the engine that samples them is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from slipstream.config import Checked, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Rule, within
from slipstream.types import Dtype

_LOWEST_TEMPERATURE = 0.01

Temperature = Annotated[
    float,
    Rule(
        f"must be 0 or >= {_LOWEST_TEMPERATURE}",
        lambda value: value == 0 or value >= _LOWEST_TEMPERATURE,
        f"vLLM samples at {_LOWEST_TEMPERATURE} instead of anything between",
    ),
]
TopP = Annotated[float, within("(0, 1]")]
TopK = Annotated[int, Rule("must be >= 0 (0 means all tokens)", lambda value: value >= 0)]


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Checked, path="sampling"):
    """The distribution that rollouts are drawn from: the policy's conditionals at `temperature`, cut by top-p/top-k.

    `temperature` 0 is greedy decoding. `top_k` 0 means all tokens.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    max_response_tokens: PositiveInt


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked, path="engine"):
    """Settings of the vLLM engine, the same in both arms."""

    max_model_len: PositiveInt
    max_num_seqs: PositiveInt
    dtype: Dtype = Dtype.BFLOAT16
    enforce_eager: bool = False
    kv_cache_gib: PositiveFloat | None = None  # CPU only; a GPU engine takes gpu_memory_utilization
    gpu_memory_utilization: Fraction = 0.6  # colocated with the learner
    tensor_parallel_size: PositiveInt = 1
    num_engines: PositiveInt = 1
    num_threads: PositiveInt = 2  # CPU only
    num_kept_idle: NonNegativeInt = 0  # engines kept warm between the stages of one process: each holds its memory
    start_timeout_s: PositiveFloat = 900.0  # for an engine to load, compile and capture its graphs
    answer_timeout_s: PositiveFloat = 3600.0  # for anything it is asked: a step's generation, a refit
    max_restarts: NonNegativeInt = 3  # of single engines in one run after they were lost; the learner goes on
