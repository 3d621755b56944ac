"""Configs of sampling and of the engine that samples."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from slipstream.config import (
    LARGEST,
    NUMBER,
    Checked,
    Fix,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rate,
    Switch,
    rule,
)
from slipstream.refit.config import WeightFormat
from slipstream.types import Dtype, Quantization

_LOWEST_TEMPERATURE = 0.01
_INT8, _INT8_ON_CPUS, _FP8 = 127, 64, 448  # largest magnitudes in 8 bits

Temperature = Annotated[
    float,
    Field(ge=0, le=LARGEST),
    rule(
        f"must be 0 or >= {_LOWEST_TEMPERATURE}",
        lambda value: value == 0 or value >= _LOWEST_TEMPERATURE,
        **{"not": {"exclusiveMinimum": 0, "exclusiveMaximum": _LOWEST_TEMPERATURE}},
    ),
    NUMBER,
    Fix(f"vLLM samples at {_LOWEST_TEMPERATURE} instead of anything between"),
]
TopK = Annotated[NonNegativeInt, Fix("0 means all tokens")]


class SamplingConfig(Checked, path="sampling"):
    """The distribution that responses are sampled from: the policy's conditionals, cut by top-p and top-k.

    Training needs the whole distribution, for its log-probabilities know no cut, and a temperature above 0, for greedy
    rollouts of a group are all equal.
    """

    temperature: Temperature = 1.0
    """Temperature of responses; 0 is greedy decoding."""
    top_p: Rate = 1.0
    """Probability mass that responses are sampled from; 1 means all."""
    top_k: TopK = 0
    """Tokens that responses are sampled from; 0 means all."""
    max_response_tokens: PositiveInt
    """Tokens after which a response is cut off."""


class Backend(StrEnum):
    """Engines that sample rollouts."""

    VLLM = "vllm"
    SGLANG = "sglang"  # experimental: on CPUs, without speculation; docs/sglang.md says what was seen


class EngineConfig(Checked, path="engine"):
    """Settings of the engine, the same in both arms."""

    backend: Backend = Backend.VLLM
    """Engine that samples. Set sglang, an experiment, to train the autoregressive arm on SGLang on CPUs."""
    max_model_len: PositiveInt
    """Tokens of the longest sequence: prompt, response and the drafts in flight."""
    max_num_seqs: PositiveInt
    """Sequences that one engine runs at once; others queue."""
    dtype: Dtype = Dtype.BFLOAT16
    """Type of weights and activations; `auto` takes the one that the machine multiplies faster."""
    quantization: Quantization = Quantization.NONE
    """Weights and inputs of the layers' matrices in 8 bits: `int8`, or on GPUs `fp8`. Set it where generation is bound
    by these matrices; the policy that samples then differs from the one that learns, which the loss must correct."""
    enforce_eager: Switch = False
    """Run without compiled and captured graphs: an engine starts sooner and decodes more slowly."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory of the KV cache of an engine on CPUs, in GiB; null on GPUs, which take `gpu_memory_utilization`."""
    gpu_memory_utilization: Fraction = 0.6
    """Share of a GPU's memory that an engine takes, weights and KV cache together."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that one engine is split over."""
    num_engines: PositiveInt = 1
    """Engines that share the prompts of a step."""
    num_threads: PositiveInt = 2
    """Threads of an engine on CPUs."""
    num_kept_idle: NonNegativeInt = 0
    """Engines kept warm between the stages of one process, each with its memory."""
    start_timeout_s: PositiveFloat = 900.0
    """Seconds for an engine to load, compile and capture its graphs. Set it higher for slow disks or large models."""
    answer_timeout_s: PositiveFloat = 3600.0
    """Seconds for an engine to answer: a step's generation, a refit. Set it higher for very long responses."""
    max_restarts: NonNegativeInt = 3
    """Lost engines replaced until the learner restarts; 0 ends the run at the first. Set it by how often nodes fail."""

    def _check(self) -> None:
        is_served = self.quantization is not Quantization.FP8 or self.kv_cache_gib is None
        rule = "must be none or int8 with engines on CPUs (engine.kv_cache_gib)"
        self._require(is_served, "quantization", rule, "vLLM multiplies 8-bit floats on GPUs alone")

    @property
    def weight_format(self) -> WeightFormat | None:
        """Format of the quantized weights; None where nothing is quantized.

        A processor with AVX2 and without VNNI adds two products of 8 bits in 16: beside inputs of 127, weights beyond
        64 would overflow without an error. All CPUs compute with the same weights, so all keep to 64.
        """
        if self.quantization is Quantization.NONE:
            return None
        num_ranks = self.tensor_parallel_size
        if self.quantization is Quantization.FP8:
            return WeightFormat(dtype="float8_e4m3fn", largest=_FP8, largest_input=_FP8, num_ranks=num_ranks)
        largest = _INT8 if self.kv_cache_gib is None else _INT8_ON_CPUS
        return WeightFormat(dtype="int8", largest=largest, largest_input=_INT8, num_ranks=num_ranks)
