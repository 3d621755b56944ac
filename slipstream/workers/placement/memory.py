"""Memory of one GPU by part, from the model's shape: what the learner and an engine hold at their peak.

Estimates, not measurements: every formula counts the tensors that the code named in its docstring keeps, and
`RUNTIME_RATE` leaves room for what no formula counts. Legend: `h` hidden size, `f` feed-forward width, `A` query
heads x head dim, `K` key-value heads x head dim, `V` vocabulary, `b` bytes of a weight, `t` tensor-parallel ranks,
`p` pipeline stages. All sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from slipstream.engine.config import EngineConfig
from slipstream.learner.architecture import Shape
from slipstream.learner.config import LearnerConfig, Recompute
from slipstream.types import Dtype

RUNTIME_RATE = 0.05
"""Share of a GPU for CUDA contexts, NCCL's buffers and fragmentation. Assumed: nothing of it was measured here."""

WEIGHT_BYTES = {Dtype.BFLOAT16: 2, Dtype.FLOAT32: 4, Dtype.AUTO: 4}
"""Of one weight; `auto` may turn out as either, and is counted as the larger."""

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerMemory:
    """Of the rank that holds most."""

    weights: float
    gradients: float
    optimizer: float
    reference: float  # frozen weights for the KL, if the loss has one
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def kept(self) -> float:
        """What a learner keeps on the GPU that gives memory back while engines generate: weights."""
        return self.weights + self.reference

    @property
    def hosted(self) -> float:
        """What of it waits in the host's memory meanwhile; gradients are zeros afterwards."""
        return self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Of one worker of an engine; the key-value cache takes what the others leave of the engine's share."""

    weights: float
    draft: float
    activations: float
    kv_cache: float
    kv_bytes_per_token: float

    @property
    def total(self) -> float:
        """What the engine takes of the GPU."""
        return self.weights + self.draft + self.activations + self.kv_cache

    @property
    def kept(self) -> float:
        """What an engine keeps that gives its cache back while the learner trains.

        Source: vLLM 0.32, `v1/worker/gpu_worker.py`: the cache alone has the tag that is discarded.
        """
        return self.total - self.kv_cache

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that the cache holds."""
        return max(0, int(self.kv_cache / self.kv_bytes_per_token))


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposer:
    """What an engine holds to propose tokens: parameters, and layers whose keys and values are cached."""

    parameters: float
    num_layers: int
    num_query_groups: int
    head_dim: int


NOTHING_PROPOSED = Proposer(parameters=0.0, num_layers=0, num_query_groups=0, head_dim=0)
"""Of no draft, and of one that is looked up on the host."""


def learner_memory(shape: Shape, learner: LearnerConfig, *, with_reference: bool) -> LearnerMemory:
    """The learner's peak, in the backward pass of its largest micro-batch, on the first or the last stage.

    Source: `learner/optimizer.py`: gradients accumulate in float32 (`grad_reduce_in_fp32`), AdamW keeps two float32
    moments and, beside weights in bfloat16, float32 masters (`Float16OptimizerWithFloat16Params`); a distributed
    optimizer splits moments and masters. Muon keeps one moment of a matrix; two are counted.
    """
    ends = {0, learner.parallel.pipeline - 1}
    stages = [_stage_memory(shape, learner, stage, with_reference) for stage in ends]
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(shape: Shape, learner: LearnerConfig, stage: int, with_reference: bool) -> LearnerMemory:
    parameters, width = stage_parameters(shape, learner, stage), WEIGHT_BYTES[learner.dtype]
    masters = _FLOAT32 if learner.dtype is Dtype.BFLOAT16 else 0
    where, tokens = learner.parallel, learner.max_tokens_per_microbatch
    in_flight = where.pipeline - stage  # micro-batches whose backward pass is still to come
    layers = shape.num_layers // where.pipeline
    is_last = stage == where.pipeline - 1
    shards = where.data if learner.distributed_optimizer else 1
    return LearnerMemory(
        weights=parameters * width,
        gradients=parameters * _FLOAT32,
        optimizer=parameters * (2 * _FLOAT32 + masters) / shards,
        reference=parameters * width if with_reference else 0.0,
        activations=tokens
        * (
            in_flight * layers * activation_bytes(shape, learner, learner.recompute)
            + recomputed_bytes(shape, learner, learner.recompute)
        ),
        logits=min(tokens, learner.logprob_chunk_tokens or tokens) * logit_bytes(shape, learner) if is_last else 0.0,
    )


def stage_parameters(shape: Shape, learner: LearnerConfig, stage: int) -> float:
    """Parameters on one rank of a pipeline stage.

    Source: `learner/weights.py mappings`: matrices are split over t ranks, norms are on each; the first stage holds the
    embedding, the last one the final norm and the output layer, a copy of the embedding where the two are tied.
    """
    where = learner.parallel
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    matrices = shape.hidden_size * (2 * heads + 2 * groups + 3 * shape.ffn_hidden_size)
    layer = matrices / where.tensor + 2 * shape.hidden_size + 2 * shape.head_dim
    table = shape.vocab_size * shape.hidden_size / where.tensor
    first, last = stage == 0, stage == where.pipeline - 1
    has_own_head = last and not (first and shape.tie_word_embeddings)
    ends = table * (first + has_own_head) + (shape.hidden_size if last else 0)
    return shape.num_layers // where.pipeline * layer + ends


def activation_bytes(shape: Shape, learner: LearnerConfig, recompute: Recompute = Recompute.NONE) -> float:
    """What one layer keeps of one token for the backward pass: b (4h / s + (4f + 4A + 3K) / t).

    `s` is t with sequence parallelism, else 1. Both norms keep their input and the two projections behind them their
    own: 4h, on every rank without sequence parallelism. Attention keeps queries and keys before and after their norms,
    values, its output and a copy in another order: 4A + 3K. The gated unit keeps gate and up, SiLU of the gate, and
    the product: 4f. Recomputed selectively, the feed-forward keeps its input alone and attention no output of its own:
    3A + 3K are left. Recomputed whole, a layer keeps its input: h.

    Source: `learner/layers.py`, counted there; the terms are those of arXiv 2205.05198, section 4, with flash attention
    and without dropout.
    """
    where, width = learner.parallel, WEIGHT_BYTES[learner.dtype]
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    hidden = shape.hidden_size / (where.tensor if where.sequence_parallel else 1)
    match recompute:
        case Recompute.FULL:
            return width * hidden
        case Recompute.SELECTIVE:
            return width * (4 * hidden + (3 * heads + 3 * groups) / where.tensor)
        case Recompute.NONE:
            split = 4 * shape.ffn_hidden_size + 4 * heads + 3 * groups
            return width * (4 * hidden + split / where.tensor)


def recomputed_bytes(shape: Shape, learner: LearnerConfig, recompute: Recompute) -> float:
    """What the one layer that is being recomputed holds of one token, beside what it had kept."""
    return activation_bytes(shape, learner) - activation_bytes(shape, learner, recompute)


def logit_bytes(shape: Shape, learner: LearnerConfig) -> float:
    """What the logits of one token take at the peak: (b + 12) V / t.

    The logits themselves, and three float32 arrays of their size: the softmax that the loss keeps, its gradient, and
    that before the temperature.

    Source: `learner/megatron.py _logprobs`.
    """
    return (WEIGHT_BYTES[learner.dtype] + 3 * _FLOAT32) * shape.vocab_size / learner.parallel.tensor


def engine_memory(
    shape: Shape, engine: EngineConfig, *, gpu_bytes: float, longest_k: int, proposer: Proposer
) -> EngineMemory:
    """One worker's share: `gpu_memory_utilization` of the GPU, or the named cache beside what it needs.

    Args:
        longest_k: draft tokens of a request; without any there is no draft.
        proposer: the draft; its weights are split over the engine's ranks as the policy's are.

    Source: vLLM 0.32, `v1/worker/gpu_worker.py determine_available_memory`: the cache is what the share leaves after
    weights and the peak of a profiling pass.
    """
    width, tensor = WEIGHT_BYTES[engine.dtype], engine.tensor_parallel_size
    weights = num_parameters(shape) * width / tensor
    held = proposer if longest_k else NOTHING_PROPOSED
    draft = held.parameters * width / tensor
    activations = _engine_activations(shape, engine, longest_k)
    if engine.kv_cache_gib is None:
        cache = engine.gpu_memory_utilization * gpu_bytes - weights - draft - activations
    else:
        cache = engine.kv_cache_gib * 2**30
    cached = sum(each.num_layers * max(1.0, each.num_query_groups / tensor) * each.head_dim for each in (shape, held))
    per_token = 2 * cached * width  # keys and values
    return EngineMemory(
        weights=weights, draft=draft, activations=activations, kv_cache=cache, kv_bytes_per_token=per_token
    )


def _engine_activations(shape: Shape, engine: EngineConfig, longest_k: int) -> float:
    """Of one pass over the most tokens that vLLM batches, or of the sampler over every request's k + 1 rows.

    Source: vLLM 0.32, `engine/arg_utils.py get_batch_defaults`: 16,384 tokens offline on GPUs from 70 GiB on. A layer
    holds residual and input (2h), gate and up (2f / t) and their product (f / t); the sampler three float32 arrays of
    [rows, vocabulary], on every worker.
    """
    width, tensor = WEIGHT_BYTES[engine.dtype], engine.tensor_parallel_size
    layer = 16_384 * width * (2 * shape.hidden_size + 3 * shape.ffn_hidden_size / tensor)
    sampler = engine.max_num_seqs * (longest_k + 1) * shape.vocab_size * 3 * _FLOAT32
    return max(layer, sampler)


def num_parameters(shape: Shape) -> float:
    """Parameters of the whole policy."""
    return stage_parameters(shape, LearnerConfig(), 0)


def draft_parameters(shape: Shape) -> float:
    """Parameters of the EAGLE-3 draft as it is saved: without the embedding, which is the policy's.

    Source: `drafts/eagle3.py`: three hidden states fused into one (3h x h), one layer whose attention reads twice the
    width, an output layer over the whole vocabulary; norms left out.
    """
    hidden = shape.hidden_size
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    layer = 2 * hidden * (heads + 2 * groups) + heads * hidden + 3 * hidden * shape.ffn_hidden_size
    return 3 * hidden * hidden + layer + hidden * shape.vocab_size
