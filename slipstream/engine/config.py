"""How rollouts are sampled and how the engine that samples them is set up."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require
from slipstream.types import Dtype

_LOWEST_TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The distribution that rollouts are drawn from: the policy's conditionals at `temperature`, cut by top-p/top-k.

    `temperature` 0 is greedy decoding. `top_k` 0 means all tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_tokens: int

    def __post_init__(self) -> None:
        check_sampling(
            "sampling",
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_response_tokens=self.max_response_tokens,
        )


def check_sampling(section: str, *, temperature: float, top_p: float, top_k: int, max_response_tokens: int) -> None:
    """Refuse what no engine samples with; `section` of the recipe is what errors name."""
    fix = "vLLM samples at 0.01 instead of anything between" if temperature > 0 else ""
    is_sound = temperature == 0 or temperature >= _LOWEST_TEMPERATURE
    require(is_sound, f"{section}.temperature", f"must be 0 or >= {_LOWEST_TEMPERATURE}", temperature, fix)
    require(0 < top_p <= 1, f"{section}.top_p", "must lie in (0, 1]", top_p)
    require(top_k >= 0, f"{section}.top_k", "must be >= 0 (0 means all tokens)", top_k)
    require(max_response_tokens > 0, f"{section}.max_response_tokens", "must be > 0", max_response_tokens)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the vLLM engine, the same in both arms."""

    max_model_len: int
    max_num_seqs: int
    dtype: Dtype = Dtype.BFLOAT16
    enforce_eager: bool = False
    kv_cache_gib: float | None = None  # CPU only; a GPU engine takes gpu_memory_utilization
    gpu_memory_utilization: float = 0.6  # colocated with the learner
    tensor_parallel_size: int = 1
    num_engines: int = 1
    num_threads: int = 2  # CPU only
    num_kept_idle: int = 0  # engines kept warm between the stages of one process: each holds its memory
    start_timeout_s: float = 900.0  # for an engine to load, compile and capture its graphs
    answer_timeout_s: float = 3600.0  # for anything it is asked: a step's generation, a refit
    max_restarts: int = 3  # of single engines in one run after they were lost; the learner goes on

    def __post_init__(self) -> None:
        require(self.max_model_len > 0, "engine.max_model_len", "must be > 0", self.max_model_len)
        require(self.max_num_seqs > 0, "engine.max_num_seqs", "must be > 0", self.max_num_seqs)
        require(self.tensor_parallel_size > 0, "engine.tensor_parallel_size", "must be > 0", self.tensor_parallel_size)
        require(self.num_engines > 0, "engine.num_engines", "must be > 0", self.num_engines)
        require(self.num_threads > 0, "engine.num_threads", "must be > 0", self.num_threads)
        cache = self.kv_cache_gib
        require(cache is None or cache > 0, "engine.kv_cache_gib", "must be > 0 or null", cache)
        for name in ("start_timeout_s", "answer_timeout_s"):
            seconds: float = getattr(self, name)
            require(seconds > 0, f"engine.{name}", "must be > 0", seconds)
        require(self.max_restarts >= 0, "engine.max_restarts", "must be >= 0", self.max_restarts)
        require(self.num_kept_idle >= 0, "engine.num_kept_idle", "must be >= 0", self.num_kept_idle)
        require(
            0 < self.gpu_memory_utilization < 1,
            "engine.gpu_memory_utilization",
            "must lie in (0, 1)",
            self.gpu_memory_utilization,
        )
