"""Configs of the policy and its learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.config import require
from slipstream.grpo.config import OptimizerMethod
from slipstream.types import Dtype

SCRATCH = "scratch"
"""`policy.model` of a policy that is trained from random weights instead of loaded."""


class Packing(StrEnum):
    """Whether the sequences of a micro-batch are packed one behind the other, without padding."""

    AUTO = "auto"  # on a GPU in bfloat16, which has a kernel for them
    ALWAYS = "always"
    NEVER = "never"


class Recompute(StrEnum):
    """What of a layer is computed anew for the gradient instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"  # the attention of queries to keys, and the MLP
    FULL = "full"  # the whole layer: its input alone is kept


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """A small Qwen3, or with an MTP layer a small MiMo, and how it is pretrained.

    Deep and narrow by default: its decode is bound by per-layer cost, as a GPU's is by memory bandwidth.
    """

    hidden_size: int = 128
    num_layers: int = 24
    num_attention_heads: int = 4
    num_query_groups: int = 2
    head_dim: int = 32
    ffn_hidden_size: int = 384
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = False
    num_mtp_layers: int = 0  # 1 makes a MiMo, whose MTP layer `draft.method: mtp` drafts with
    rope_theta: float = 10_000.0
    init_std: float = 0.04  # about 0.5 / sqrt(hidden_size); 0.02 learns more slowly: docs/log.md
    num_steps: int = 400
    tokens_per_step: int = 4096
    optimizer: OptimizerMethod = OptimizerMethod.MUON  # learns from half the tokens: docs/log.md
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            *("hidden_size", "num_layers", "num_attention_heads", "head_dim", "ffn_hidden_size"),
            *("max_position_embeddings", "tokens_per_step", "rope_theta"),
        ):
            value: float = getattr(self, name)
            require(value > 0, f"policy.scratch.{name}", "must be > 0", value)
        require(
            self.num_query_groups > 0 and self.num_attention_heads % self.num_query_groups == 0,
            "policy.scratch.num_query_groups",
            f"must divide num_attention_heads {self.num_attention_heads}",
            self.num_query_groups,
        )
        require(self.head_dim % 2 == 0, "policy.scratch.head_dim", "must be even, for RoPE", self.head_dim)
        require(self.num_mtp_layers in (0, 1), "policy.scratch.num_mtp_layers", "must be 0 or 1", self.num_mtp_layers)
        if self.num_mtp_layers:
            rule = f"must be hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads} with MTP"
            whole = self.head_dim * self.num_attention_heads == self.hidden_size
            require(whole, "policy.scratch.head_dim", rule, self.head_dim, "vLLM's MiMo knows no other")
        require(self.init_std > 0, "policy.scratch.init_std", "must be > 0", self.init_std)
        require(self.num_steps >= 0, "policy.scratch.num_steps", "must be >= 0", self.num_steps)
        rate = self.learning_rate
        require(0 < rate <= 1, "policy.scratch.learning_rate", "must lie in (0, 1]", rate)
        require(
            0 <= self.warmup_steps <= self.num_steps,
            "policy.scratch.warmup_steps",
            f"must lie in [0, num_steps {self.num_steps}]",
            self.warmup_steps,
        )


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Which model is trained: a hub id, a local directory in HF format, or `scratch`."""

    model: str
    scratch: ScratchConfig | None = None

    def __post_init__(self) -> None:
        require(bool(self.model), "policy.model", "must name a model", self.model, 'a hub id, a path, or "scratch"')
        require(
            (self.scratch is not None) == (self.model == SCRATCH),
            "policy.scratch",
            f"must be given exactly when policy.model is {SCRATCH!r}",
            self.scratch,
            f"policy.model is {self.model!r}",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the learner is spread over ranks; their number is tensor x pipeline x data.

    `expert` deals the experts of a mixture to so many neighbouring data-parallel ranks, which send each other's tokens
    to them; it adds no ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "expert"):
            value: int = getattr(self, name)
            require(value >= 1, f"learner.parallel.{name}", "must be >= 1", value)
        rule = f"must divide the {self.data} data-parallel ranks, to which experts are dealt"
        require(self.data % self.expert == 0, "learner.parallel.expert", rule, self.expert)
        rule = "must be 1 with tensor parallelism, which is not there for experts"
        require(self.tensor == 1 or self.expert == 1, "learner.parallel.expert", rule, self.expert)
        require(
            not self.sequence_parallel or self.tensor > 1,
            "learner.parallel.sequence_parallel",
            "must be false with tensor 1",
            self.sequence_parallel,
            "it splits activations over the tensor-parallel ranks",
        )

    @property
    def world_size(self) -> int:
        """Number of learner ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def num_neighbours(self) -> int:
        """Ranks that exchange tokens or parts of them in every layer: of a tensor-parallel group, or with experts."""
        return self.tensor * self.expert

    def data_rank(self, rank: int) -> int:
        """Which share of a batch a rank works on: Megatron numbers tensor-parallel ranks first, then data-parallel."""
        return rank // self.tensor % self.data


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How the learner computes.

    `max_tokens_per_microbatch` bounds tokens, padding counted where there is some: memory grows with it, and on a CPU
    too large a micro-batch falls out of the cache. `num_threads` is for CPU kernels; None leaves torch's own choice.
    `dtype` is the type of weights, activations and Muon's iteration; `auto` is what the machine multiplies fastest.

    With `logprob_chunk_tokens` the logits of that many tokens are held at once, and computed twice; None holds those of
    a micro-batch. `distributed_optimizer` splits the optimizer's state over data-parallel ranks.
    """

    max_tokens_per_microbatch: int = 2048
    packing: Packing = Packing.AUTO
    logprob_chunk_tokens: int | None = None
    recompute: Recompute = Recompute.NONE
    distributed_optimizer: bool = False
    num_threads: int | None = None
    dtype: Dtype = Dtype.FLOAT32
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    num_kept_idle: int = 0  # learners kept warm between the stages of one process: a start takes 8 s on a laptop
    start_timeout_s: float = 600.0  # for all ranks to run and to have found one another
    answer_timeout_s: float = 1800.0  # for anything that all ranks do together: a step, a checkpoint
    max_restarts: int = 1  # of all ranks in one run after one was lost; each goes on from the last checkpoint

    def __post_init__(self) -> None:
        bound = self.max_tokens_per_microbatch
        require(bound > 0, "learner.max_tokens_per_microbatch", "must be > 0", bound)
        for name in ("start_timeout_s", "answer_timeout_s"):
            seconds: float = getattr(self, name)
            require(seconds > 0, f"learner.{name}", "must be > 0", seconds)
        require(self.max_restarts >= 0, "learner.max_restarts", "must be >= 0", self.max_restarts)
        chunk = self.logprob_chunk_tokens
        require(chunk is None or chunk > 0, "learner.logprob_chunk_tokens", "must be > 0 or null", chunk)
        kept = self.num_kept_idle
        require(kept >= 0, "learner.num_kept_idle", "must be >= 0", kept)
        threads = self.num_threads
        require(threads is None or threads > 0, "learner.num_threads", "must be > 0 or null", threads)
