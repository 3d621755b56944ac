"""Configs of the policy and its learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from slipstream.config import EVEN, Checked, NonNegativeInt, PositiveFloat, PositiveInt, Rule, ge, gt, within
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


_AT_MOST_ONE = Rule("must be 0 or 1", (0, 1).__contains__)


@dataclass(frozen=True, kw_only=True)
class ScratchConfig(Checked, path="policy.scratch"):
    """A small Qwen3, or with an MTP layer a small MiMo, and how it is pretrained.

    Deep and narrow by default: its decode is bound by per-layer cost, as a GPU's is by memory bandwidth.
    """

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 24
    num_attention_heads: PositiveInt = 4
    num_query_groups: int = 2
    head_dim: Annotated[int, gt(0), EVEN] = 32
    ffn_hidden_size: PositiveInt = 384
    max_position_embeddings: PositiveInt = 512
    tie_word_embeddings: bool = False
    num_mtp_layers: Annotated[int, _AT_MOST_ONE] = 0  # 1 makes a MiMo, whose MTP layer `draft.method: mtp` drafts with
    init_std: PositiveFloat = 0.04  # about 0.5 / sqrt(hidden_size); 0.02 learns more slowly: docs/log.md
    num_steps: NonNegativeInt = 400
    tokens_per_step: PositiveInt = 4096
    optimizer: OptimizerMethod = OptimizerMethod.MUON  # learns from half the tokens: docs/log.md
    learning_rate: Annotated[float, within("(0, 1]")] = 2e-3
    warmup_steps: int = 20
    seed: int = 0

    def _check(self) -> None:
        self._require(
            self.num_query_groups > 0 and self.num_attention_heads % self.num_query_groups == 0,
            "num_query_groups",
            f"must divide num_attention_heads {self.num_attention_heads}",
        )
        if self.num_mtp_layers:
            rule = f"must be hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads} with MTP"
            whole = self.head_dim * self.num_attention_heads == self.hidden_size
            self._require(whole, "head_dim", rule, "vLLM's MiMo knows no other")
        self._require(
            0 <= self.warmup_steps <= self.num_steps, "warmup_steps", f"must lie in [0, num_steps {self.num_steps}]"
        )


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Checked, path="policy"):
    """Which model is trained: a hub id, a local directory in HF format, or `scratch`."""

    model: Annotated[str, Rule("must name a model", bool, 'a hub id, a path, or "scratch"')]
    scratch: ScratchConfig | None = None

    def _check(self) -> None:
        self._require(
            (self.scratch is not None) == (self.model == SCRATCH),
            "scratch",
            f"must be given exactly when policy.model is {SCRATCH!r}",
            f"policy.model is {self.model!r}",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Checked, path="learner.parallel"):
    """How the learner is spread over ranks; their number is tensor x pipeline x data.

    `expert` deals the experts of a mixture to so many neighbouring data-parallel ranks, which send each other's tokens
    to them; it adds no ranks.
    """

    tensor: Annotated[int, ge(1)] = 1
    pipeline: Annotated[int, ge(1)] = 1
    data: Annotated[int, ge(1)] = 1
    expert: Annotated[int, ge(1)] = 1
    sequence_parallel: bool = False

    def _check(self) -> None:
        rule = f"must divide the {self.data} data-parallel ranks, to which experts are dealt"
        self._require(self.data % self.expert == 0, "expert", rule)
        rule = "must be 1 with tensor parallelism, which is not there for experts"
        self._require(self.tensor == 1 or self.expert == 1, "expert", rule)
        self._require(
            not self.sequence_parallel or self.tensor > 1,
            "sequence_parallel",
            "must be false with tensor 1",
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
class LearnerConfig(Checked, path="learner"):
    """How the learner computes.

    `max_tokens_per_microbatch` bounds tokens, padding counted where there is some: memory grows with it, and on a CPU
    too large a micro-batch falls out of the cache. `num_threads` is for CPU kernels; None leaves torch's own choice.
    `dtype` is the type of weights, activations and Muon's iteration; `auto` is what the machine multiplies fastest.

    With `logprob_chunk_tokens` the logits of that many tokens are held at once, and computed twice; None holds those of
    a micro-batch. `distributed_optimizer` splits the optimizer's state over data-parallel ranks.
    """

    max_tokens_per_microbatch: PositiveInt = 2048
    packing: Packing = Packing.AUTO
    logprob_chunk_tokens: PositiveInt | None = None
    recompute: Recompute = Recompute.NONE
    distributed_optimizer: bool = False
    num_threads: PositiveInt | None = None
    dtype: Dtype = Dtype.FLOAT32
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # Learners kept warm between the stages of one process: a start takes 8 s on a laptop.
    num_kept_idle: NonNegativeInt = 0
    start_timeout_s: PositiveFloat = 600.0  # for all ranks to run and to have found one another
    answer_timeout_s: PositiveFloat = 1800.0  # for anything that all ranks do together: a step, a checkpoint
    # Restarts of all ranks in one run after one was lost; each goes on from the last checkpoint.
    max_restarts: NonNegativeInt = 1
