"""Configs of the policy and its learner."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from slipstream.config import (
    LARGEST,
    NUMBER,
    Checked,
    Defaults,
    Fix,
    Int,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Switch,
    Text,
    rule,
    section,
)
from slipstream.grpo.config import OptimizerConfig
from slipstream.types import Dtype

SCRATCH = "scratch"
"""`policy.model` of a policy that is trained from random weights instead of loaded."""

MUON_BATCH_ELEMENTS = 2**26
"""Elements of the matrices that Muon orthogonalizes at once, or those of one matrix where it has more."""


class Packing(StrEnum):
    """Rule by which the sequences of a micro-batch are packed one behind the other, without padding."""

    AUTO = "auto"  # on a GPU in bfloat16, which has a kernel for them
    ALWAYS = "always"
    NEVER = "never"


class Recompute(StrEnum):
    """Parts of a layer that are computed anew for the gradient instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"  # the attention of queries to keys, and the MLP
    FULL = "full"  # the whole layer: its input alone is kept


class ShapeConfig(Checked, path="shape"):
    """Sizes of a small Qwen3 that is trained from random weights.

    Deep and narrow by default: its decode is bound by per-layer cost, as a GPU's is by memory bandwidth.
    """

    hidden_size: PositiveInt = 128
    """Width of the residual stream. Set by tests and studies that need another size."""
    num_layers: PositiveInt = 24
    """Transformer layers. Set by tests and studies that need another depth."""
    num_attention_heads: PositiveInt = 4
    """Query heads of a layer. Set it with `hidden_size`."""
    num_query_groups: PositiveInt = 2
    """Key-value heads of a layer, a divisor of `num_attention_heads`. Set it with `num_attention_heads`."""
    head_dim: Annotated[Int, Field(gt=0, multiple_of=2), Fix("RoPE turns pairs of dimensions")] = 32
    """Dimensions of a head. Set it with `hidden_size`."""
    ffn_hidden_size: PositiveInt = 384
    """Width of the feed-forward layers. Set it with `hidden_size`."""
    init_std: PositiveFloat = 0.04
    """Standard deviation of the initial weights, about 0.5 / sqrt(`hidden_size`). Set it with `hidden_size`."""

    def _check(self) -> None:
        rule = f"must divide num_attention_heads {self.num_attention_heads}"
        divides = self.num_attention_heads % self.num_query_groups == 0
        self._require(divides, "num_query_groups", rule)


class ScratchConfig(Checked, path="policy.scratch"):
    """A small Qwen3, or with an MTP layer a small MiMo, and how it is pretrained."""

    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes of the model."""
    max_position_embeddings: PositiveInt = 512
    """Tokens of the longest sequence that the policy knows. Set it with a longer `engine.max_model_len`."""
    tie_word_embeddings: Switch = False
    """One matrix for input and output embeddings. Set by tests of models that tie them."""
    num_mtp_layers: Annotated[Int, Field(ge=0, le=1)] = 0
    """Layers that predict the token after the next; 1 makes a MiMo. Set 1 for `draft.method: mtp`."""
    num_steps: NonNegativeInt = 400
    """Updates of the pretraining; 0 keeps random weights."""
    tokens_per_step: PositiveInt = 4096
    """Tokens of an update."""
    optimizer: Annotated[OptimizerConfig, Defaults(method="muon", learning_rate=2e-3, warmup_steps=20)] = section()
    """Optimizer of the pretraining. Muon learns from half the tokens."""
    seed: Seed = 0
    """Seed of the initial weights and the corpus. Set it for another policy of the same kind."""

    def _check(self) -> None:
        hidden, heads = self.shape.hidden_size, self.shape.num_attention_heads
        if self.num_mtp_layers:
            rule = f"must be hidden_size {hidden} / num_attention_heads {heads} with MTP"
            whole = self.shape.head_dim * heads == hidden
            self._require(whole, "shape.head_dim", rule, "vLLM's MiMo knows no other")
        rule = f"must lie in [0, num_steps {self.num_steps}]"
        self._require(self.optimizer.warmup_steps <= self.num_steps, "optimizer.warmup_steps", rule)


class LoraTarget(StrEnum):
    """Matrix of a layer that can have an adapter, by its name in Hugging Face's models."""

    QUERY = "q_proj"
    KEY = "k_proj"
    VALUE = "v_proj"
    OUTPUT = "o_proj"
    GATE = "gate_proj"
    UP = "up_proj"
    DOWN = "down_proj"


class LoraConfig(Checked, path="policy.lora"):
    """Low-rank adapters (arXiv:2106.09685): a matrix is W + (alpha / rank) B A, and A and B alone are trained."""

    rank: PositiveInt = 16
    """Rows of A and columns of B. Set it higher where the task teaches more."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale alpha / rank. Set it with `rank`."""
    targets: Annotated[
        tuple[LoraTarget, ...],
        Field(min_length=1),
        rule("must name each matrix once", lambda targets: len(set(targets)) == len(targets)),
    ] = tuple(LoraTarget)
    """Matrices of each layer that have an adapter. Set those of the attention for a mixture of experts."""


class RopeType(StrEnum):
    """Rule by which the angles of the rotary embedding are stretched, by its name in transformers and vLLM."""

    LINEAR = "linear"  # divides every frequency by the factor
    LLAMA3 = "llama3"  # divides those of long wavelengths, as Llama 3.1
    YARN = "yarn"  # divides those of few turns, and scales the scores (arXiv:2309.00071)


class RopeConfig(Checked, path="policy.rope"):
    """Scaling of the rotary embedding to more positions than the model was trained on; null leaves the type's default.

    Source: transformers 5, `modeling_rope_utils.py`.
    """

    type: RopeType
    """Rule of the scaling. Set it as the model's authors do."""
    factor: Annotated[float, Field(ge=1, le=LARGEST), NUMBER]
    """Positions with scaling by positions without. Set it by the longest sequence."""
    original_max_position_embeddings: PositiveInt | None = None
    """Positions that the model was trained on; null takes those of its config.json. Set it where they are fewer."""
    low_freq_factor: PositiveFloat | None = None
    """Original positions by the shortest wavelength that `llama3` divides by the whole factor. Set it with `llama3`."""
    high_freq_factor: PositiveFloat | None = None
    """Original positions by the longest wavelength that `llama3` keeps. Set it with `llama3`."""
    beta_fast: PositiveFloat | None = None
    """Turns over the original positions from which `yarn` keeps a frequency; null is 32. Set it to tune YaRN."""
    beta_slow: PositiveFloat | None = None
    """Turns up to which `yarn` divides by the whole factor; null is 1. Set it to tune YaRN."""
    attention_factor: PositiveFloat | None = None
    """Factor of sine and cosine in `yarn`; null is 0.1 ln(`factor`) + 1. Set it to tune YaRN."""
    mscale: PositiveFloat | None = None
    """Weight of ln(`factor`) in the numerator of YaRN's own factor of sine and cosine. Set it as DeepSeek's models."""
    mscale_all_dim: PositiveFloat | None = None
    """The same in the denominator. Set it with `mscale`."""
    truncate: Switch | None = None
    """Whole dimensions as YaRN's bounds; null is true. Set it false for models like gpt-oss."""

    def _check(self) -> None:
        for name in sorted(_ROPE_PARAMETERS - _OWN_ROPE_PARAMETERS[self.type]):
            given = getattr(self, name)
            self._require(given is None, name, f"must be null with type {self.type.value}", "leave it out")
        if self.type is RopeType.LLAMA3:
            low, high = self.low_freq_factor, self.high_freq_factor
            for name, value in (("low_freq_factor", low), ("high_freq_factor", high)):
                self._require(value is not None, name, "must be given with type llama3", "Llama 3.1 has 1 and 4")
            assert low is not None and high is not None
            self._require(low < high, "high_freq_factor", f"must be > low_freq_factor {low}")
        fast, slow = self.beta_fast or 32.0, self.beta_slow or 1.0
        self._require(fast > slow, "beta_fast" if self.beta_fast else "beta_slow", "must leave beta_fast > beta_slow")
        paired = (self.mscale is None) == (self.mscale_all_dim is None)
        self._require(paired, "mscale", "must be given exactly with mscale_all_dim", "one alone is not read")

    def num_positions(self, own: int) -> int:
        """Positions of a model whose config.json has `own` of them without this scaling."""
        return int(self.factor * (self.original_max_position_embeddings or own))


_YARN = frozenset({"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"})
_LLAMA3 = frozenset({"low_freq_factor", "high_freq_factor"})
_OWN_ROPE_PARAMETERS = {RopeType.LINEAR: frozenset[str](), RopeType.LLAMA3: _LLAMA3, RopeType.YARN: _YARN}
_ROPE_PARAMETERS = _YARN | _LLAMA3


class PolicyConfig(Checked, path="policy"):
    """Which model is trained: a hub id, a local directory in HF format, or `scratch`."""

    model: Annotated[Text, Fix('name a hub id, a path, or "scratch"')]
    """Hub id or directory of the model that is trained, or `scratch` for a small one made on the spot."""
    scratch: ScratchConfig | None = None
    """Sizes and pretraining of the small model; null for any other."""
    lora: LoraConfig | None = None
    """Adapters that GRPO trains in place of the model's weights; null trains the weights."""
    rope: RopeConfig | None = None
    """More positions for the model, from scratch too, once it is pretrained; null keeps the model's own."""

    def _check(self) -> None:
        rule, fix = f"must be given exactly when policy.model is {SCRATCH!r}", f"policy.model is {self.model!r}"
        self._require((self.scratch is not None) == (self.model == SCRATCH), "scratch", rule, fix)

    @property
    def scratch_positions(self) -> int:
        """Positions of a policy from scratch, with those that `rope` adds."""
        assert self.scratch is not None
        own = self.scratch.max_position_embeddings
        return own if self.rope is None else self.rope.num_positions(own)


class ParallelConfig(Checked, path="learner.parallel"):
    """Layout of the learner over ranks; their number is tensor x pipeline x context x data."""

    tensor: PositiveInt = 1
    """Ranks that split each matrix."""
    pipeline: PositiveInt = 1
    """Ranks that split the layers. Set it where tensor parallelism would cross nodes."""
    context: PositiveInt = 1
    """Ranks that split the tokens of a micro-batch, and the heads of its attention. Set it where activations of long
    sequences fill memory and weights do not."""
    data: PositiveInt = 1
    """Ranks that split each batch."""
    expert: PositiveInt = 1
    """Neighbouring data-parallel ranks that share out experts. Set it for a mixture of experts; it adds no ranks."""
    sequence_parallel: Switch = False
    """Split of activations between the matrices over the tensor ranks. Set it where activations fill memory."""

    def _check(self) -> None:
        rule = f"must divide the {self.data} data-parallel ranks, to which experts are dealt"
        self._require(self.data % self.expert == 0, "expert", rule)
        rule = "must be 1 with tensor parallelism, which is not there for experts"
        self._require(self.tensor == 1 or self.expert == 1, "expert", rule)
        rule = "must be 1 with context parallelism, which keeps every expert on every rank"
        self._require(self.context == 1 or self.expert == 1, "expert", rule)
        rule, fix = "must be false with tensor 1", "it splits activations over the tensor-parallel ranks"
        self._require(not self.sequence_parallel or self.tensor > 1, "sequence_parallel", rule, fix)

    @property
    def world_size(self) -> int:
        """Number of learner ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def num_model_ranks(self) -> int:
        """Number of ranks that work on the same share of a batch."""
        return self.tensor * self.pipeline * self.context

    @property
    def num_neighbours(self) -> int:
        """Ranks that exchange tokens or parts of them in every layer: those that split one layer, or share experts."""
        return self.tensor * self.context * self.expert

    def data_rank(self, rank: int) -> int:
        """Which share of a batch a rank works on: Megatron numbers tensor, then context, then data-parallel ranks."""
        return rank // (self.tensor * self.context) % self.data

    @property
    def width_multiple(self) -> int:
        """Number that must divide a micro-batch's tokens, because ranks split them evenly."""
        return self.context * (self.tensor if self.sequence_parallel else 1)


class LearnerConfig(Checked, path="learner"):
    """Computation of the learner."""

    max_tokens_per_microbatch: PositiveInt = 2048
    """Tokens of a micro-batch, padding included; memory grows with it."""
    packing: Packing = Packing.AUTO
    """Sequences of a micro-batch one behind the other, without padding. Set by tests and comparisons."""
    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits are held at once; null holds those of all labels of a micro-batch. Set it where logits fill
    memory."""
    recompute: Recompute = Recompute.NONE
    """Parts of a layer computed anew for the gradient. Set it where activations fill memory."""
    distributed_optimizer: Switch = False
    """Split of the optimizer's state over data-parallel ranks. Set it where that state fills memory."""
    num_threads: PositiveInt | None = None
    """Threads of a learner on CPUs; null leaves torch's own choice."""
    dtype: Dtype = Dtype.FLOAT32
    """Type of weights, activations and Muon's iteration; `auto` takes what the machine multiplies fastest."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Ranks of the learner."""
    num_kept_idle: NonNegativeInt = 0
    """Learners kept warm between the stages of one process, each with its memory."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds for all ranks to run and find one another. Set it higher for slow disks or large models."""
    answer_timeout_s: PositiveFloat = 1800.0
    """Seconds for what all ranks do together: a step, a checkpoint. Set it higher for very long steps."""
    max_restarts: NonNegativeInt = 1
    """Restarts of all ranks in one run, each from the last checkpoint. Set it by how often nodes fail."""
