"""Estimate of the memory of one GPU by part, from which `slipstream check` prints a table and warnings.

Every formula counts the tensors that the code named in its docstring keeps. `RUNTIME_RATE` leaves room for all other
memory. No figure was measured on a GPU. A recipe is therefore refused only for memory that no batch size changes:
weights, gradients and optimizer state.

Legend: `h` hidden size, `f` feed-forward width, `A` query heads x head dim, `K` key-value heads x head dim, `V`
vocabulary, `b` bytes of a weight, `t` tensor-parallel ranks. All sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.catalog import Hardware, ModelShape, SimulatorConfig, load_hardware, load_model
from slipstream.config import require
from slipstream.drafts.config import DraftConfig, DraftOnline
from slipstream.drafts.methods import DraftMethod
from slipstream.engine.config import EngineConfig
from slipstream.grpo.config import OptimizerMethod
from slipstream.learner.architecture import Architecture, Shape, require_divisible
from slipstream.learner.config import (
    MUON_BATCH_ELEMENTS,
    LearnerConfig,
    LoraConfig,
    LoraTarget,
    ParallelConfig,
    PolicyConfig,
    Recompute,
    ScratchConfig,
)
from slipstream.refit.config import Channel
from slipstream.types import Dtype, Quantization
from slipstream.workers.placement.config import Layout, PlacementMode
from slipstream.workers.placement.plan import table

RUNTIME_RATE = 0.05
"""Assumed share of a GPU for CUDA contexts, NCCL's buffers and fragmentation; not measured."""

WEIGHT_BYTES = {Dtype.BFLOAT16: 2, Dtype.FLOAT32: 4, Dtype.AUTO: 4}
"""Bytes of one weight; `auto` may resolve to either type and counts as the larger."""

_FLOAT32 = 4
_TOKENIZER_SIZE = 64  # vocabulary of the character tokenizer of a policy from scratch
_KEPT = ("weights", "base weights", "reference", "online draft", "refit")  # parts that an offloaded learner keeps
_BENEATH = ("orthogonalization", "draft activations")  # counted beyond the activations, which have made room for them
_CACHE = "KV cache"  # freed while an engine sleeps
_STATES = ("weights", "base weights", "gradients", "optimizer", "reference")


def known_shape(policy: PolicyConfig, simulator: SimulatorConfig | None) -> Architecture | ModelShape | None:
    """Look up the policy's shape; None for a model of the hub without a data file."""
    if policy.scratch is not None:
        own = Architecture.from_scratch(policy.scratch, vocab_size=_TOKENIZER_SIZE, eos_token_id=0)
        return own.extended(policy.rope)
    path = Path(policy.model)
    if (path / "config.json").is_file():
        return Architecture.from_hf(path).extended(policy.rope)
    published = None if simulator is None else load_model(simulator.model)
    if published is None or published.num_experts or published.name.lower() not in policy.model.lower():
        return None
    return published


def require_even(shape: Architecture | ModelShape, parallel: ParallelConfig, *, engine_tensor: int) -> None:
    """Refuse layouts that do not divide the policy's matrices evenly, or split what an MTP layer reads.

    Source: vLLM 0.32, `config/model.py verify_with_parallel_config` and `model_executor/models/qwen2.py`: the layout
    divides query heads and every matrix of the feed-forward, and divides key-value heads or copies them evenly.
    """
    experts = shape.experts if isinstance(shape, Architecture) else None
    require_divisible(shape, parallel)
    tensor, field = engine_tensor, "engine.tensor_parallel_size"
    for name, size in (("query heads", shape.num_attention_heads), ("ffn hidden size", shape.ffn_hidden_size)):
        require(size % tensor == 0, field, f"must divide the policy's {size} {name}", tensor)
    groups = shape.num_query_groups
    rule = f"must divide the policy's {groups} key-value heads, or be a multiple of them"
    require(groups % tensor == 0 or tensor % groups == 0, field, rule, tensor)
    require(tensor == 1 or experts is None, field, "must be 1 for a mixture of experts", tensor)


def resolved_channel(wanted: Channel, layout: Layout) -> Channel:
    """Resolve `auto` on GPUs, and refuse a channel that the placement rules out before any process starts."""
    if not layout.has_gpus:
        return wanted
    is_colocated, num_nodes = layout.placement.mode is PlacementMode.COLOCATED, layout.placement.nodes
    fits, other = (Channel.IPC, Channel.NCCL) if is_colocated else (Channel.NCCL, Channel.IPC)
    if wanted is Channel.AUTO:
        return fits
    fix, crosses_hosts = f"set auto, or {fits.value}", num_nodes > 1 and wanted is Channel.SHARED_MEMORY
    require(not crosses_hosts, "refit.channel", f"must cross {num_nodes} nodes", wanted.value, fix)
    rule = "must join two processes on one GPU" if is_colocated else "must join processes on different GPUs"
    require(wanted is not other, "refit.channel", rule, wanted.value, fix)
    return wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes by part for the learner's fullest rank and for an engine's worker, which share a GPU if colocated."""

    hardware: Hardware
    layout: Layout
    learner: dict[str, float]
    engine: dict[str, float]
    kv_bytes_per_token: float
    max_model_len: int
    microbatch_tokens: int  # from the recipe
    growing: float  # bytes that grow with the micro-batch: activations, and logits that are not computed in chunks
    refit_bytes: float  # sent to each engine
    uncounted: str = ""  # warning about a part that the estimate leaves out

    @property
    def kinds(self) -> dict[str, dict[str, float]]:
        """Parts that share a GPU at one time, by the GPU's role or by the phase of the step."""
        if self.layout.placement.mode is not PlacementMode.COLOCATED:
            return {"training GPU": self.learner, "generation GPU": self.engine}
        if not self.layout.placement.takes_turns:
            return {"GPU": {**self.learner, **self.engine}}
        sleeping = {part: size for part, size in self.engine.items() if part != _CACHE}
        return {
            "generating": {**{part: self.learner[part] for part in _KEPT if part in self.learner}, **self.engine},
            "training": {**self.learner, **sleeping},
        }

    @property
    def usable(self) -> float:
        """Bytes of a GPU that the parts may take: all but the runtime's share."""
        return (1 - RUNTIME_RATE) * self.hardware.memory_bytes

    @property
    def max_microbatch_tokens(self) -> int:
        """Tokens of the longest micro-batch that fits."""
        training = next(held for held in self.kinds.values() if "gradients" in held)
        room, beneath = self.usable - sum(training.values()), sum(training.get(part, 0.0) for part in _BENEATH)
        longest = int((room + beneath + self.growing) * self.microbatch_tokens / self.growing)
        return 0 if beneath and room < 0 else max(0, longest)  # beside what is beneath a shorter one leaves as much

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that an engine's KV cache holds."""
        return max(0, int(self.engine[_CACHE] / self.kv_bytes_per_token))

    def require_states(self) -> None:
        """Refuse weights, gradients and optimizer state that are larger than the GPU, whatever batch and cache."""
        layout, has = self.layout, self.hardware.memory_bytes
        limit = f"a {self.hardware.name} has {_gb(has)} GB"
        weights = self.engine["engine weights"]
        rule = f"must split the engine's weights further: {_gb(weights)} GB, {limit}"
        fix = "raise it, and lower engine.num_engines with it"
        require(weights <= has, "engine.tensor_parallel_size", rule, layout.engine_tensor, fix)
        beside = weights if layout.placement.mode is PlacementMode.COLOCATED else 0.0
        states = sum(self.learner.get(part, 0.0) for part in _STATES)
        words = f" beside the engine's weights of {_gb(beside)} GB" if beside else ""
        rule = f"must split the learner further: weights, gradients and optimizer take {_gb(states)} GB{words}, {limit}"
        fix = "raise it or pipeline, or set learner.distributed_optimizer"
        require(states + beside <= has, "learner.parallel.tensor", rule, layout.parallel.tensor, fix)

    def warnings(self) -> Iterator[str]:
        """Describe each way in which the run may run out of memory by this estimate."""
        for kind, held in self.kinds.items():
            needed = sum(held.values())
            if needed > self.usable:
                longest = self.max_microbatch_tokens
                is_larger = "gradients" in held and longest > 0
                lower = [f"learner.max_tokens_per_microbatch to {longest}"] if is_larger else []
                lower += ["engine.gpu_memory_utilization or engine.kv_cache_gib"] if _CACHE in held else []
                fix = f"lower {', or '.join(lower)}, or split further" if lower else "split further"
                yield f"{kind}: {_gb(needed)} GB are more than the {_gb(self.usable)} GB to give: {fix}"
        if self.uncounted:
            yield self.uncounted
        if self.kv_tokens < self.max_model_len:
            yield (
                f"an engine's cache holds {self.kv_tokens:,} tokens, less than one sequence of engine.max_model_len "
                f"{self.max_model_len:,}: raise engine.gpu_memory_utilization or engine.tensor_parallel_size"
            )


def estimate(  # noqa: PLR0913  # one parameter for each section of the recipe that decides memory
    shape: Shape,
    hardware: str,
    *,
    learner: LearnerConfig,
    engine: EngineConfig,
    draft: DraftConfig,
    layout: Layout,
    longest_k: int,
    has_reference: bool,
    method: OptimizerMethod = OptimizerMethod.ADAMW,
    lora: LoraConfig | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a GPU named in configs/sim/hardware.yaml.

    A refit over IPC moves whole tensors. The learner holds its bucket and the largest tensor twice: the gathered parts
    and their sum. The engine holds copies of a bucket's tensors, and the layer that it loads them into.

    Args:
        longest_k: longest draft of a request in tokens; 0 without a draft.
        has_reference: True if the loss has a KL to frozen weights.
    """
    found = load_hardware(hardware)
    held = learner_memory(shape, learner, has_reference=has_reference, method=method, lora=lora)
    learns = longest_k > 0 and draft.online.when is not DraftOnline.OFF
    if learns and draft.method is DraftMethod.EAGLE3:
        held |= online_draft_memory(shape, draft, freed=held["activations"] + held["logits"])
    worker, per_token = engine_memory(shape, engine, gpu_bytes=found.memory_bytes, longest_k=longest_k, draft=draft)
    if layout.placement.mode is PlacementMode.COLOCATED:
        largest = shape.vocab_size * shape.hidden_size * WEIGHT_BYTES[learner.dtype]
        held["refit"], worker["engine refit"] = 3 * largest, 2 * largest
    chunked, tensor = learner.logprob_chunk_tokens is not None, layout.engine_tensor
    is_unknown = draft.method is DraftMethod.DRAFT_MODEL and _draft_model(shape, draft) is None
    return MemoryEstimate(
        hardware=found,
        layout=layout,
        learner=held,
        engine=worker,
        kv_bytes_per_token=per_token,
        max_model_len=engine.max_model_len,
        microbatch_tokens=learner.max_tokens_per_microbatch,
        growing=held["activations"] + (0.0 if chunked else held["logits"]),
        refit_bytes=_served_bytes(shape, engine, WEIGHT_BYTES[learner.dtype]) + learns * worker["draft"] * tensor,
        uncounted=f"draft.model {draft.model} is not at hand: its memory is not counted" if is_unknown else "",
    )


def learner_memory(
    shape: Shape,
    learner: LearnerConfig,
    *,
    has_reference: bool,
    method: OptimizerMethod = OptimizerMethod.ADAMW,
    lora: LoraConfig | None = None,
) -> dict[str, float]:
    """Estimate the learner's peak: the backward pass of its largest micro-batch, on the first or the last stage.

    Source: `learner/optimizer.py`. Gradients accumulate in float32 (`grad_reduce_in_fp32`). AdamW keeps two float32
    moments and, beside bfloat16 weights, float32 masters (`Float16OptimizerWithFloat16Params`). A distributed optimizer
    splits moments and masters. Muon keeps one moment of each layer's matrices, and its step holds `muon_bytes`, for
    which the activations have made room. Adapters (`learner/lora.py`) are trained in place of the weights, and keep a
    copy of the matrices below them, which is the reference too.
    """
    width, where = WEIGHT_BYTES[learner.dtype], learner.parallel
    tokens = learner.max_tokens_per_microbatch / where.context  # of a micro-batch on one rank
    masters = _FLOAT32 if learner.dtype is Dtype.BFLOAT16 else 0
    shards = where.data * where.context if learner.distributed_optimizer else 1
    kept, whole = activation_bytes(shape, learner, learner.recompute), activation_bytes(shape, learner)

    def of_stage(stage: int) -> dict[str, float]:
        parameters, is_last = stage_parameters(shape, learner, stage), stage == where.pipeline - 1
        # Micro-batches in flight on the stage, times its layers; the layer that is recomputed comes on top.
        num_layers = shape.num_layers // where.pipeline
        layers = (where.pipeline - stage) * num_layers
        counted = min(tokens, learner.logprob_chunk_tokens or tokens) if is_last else 0
        trained, below, has_copy = parameters, 0.0, has_reference
        if lora is not None:
            factors, matrices = (num_layers * each for each in adapter_sizes(shape, learner, lora))
            parameters, trained, below, has_copy = parameters + factors, factors, matrices, False
        is_muon = method is OptimizerMethod.MUON
        by_muon = num_layers * sum(_matrix_sizes(shape)) / where.tensor if is_muon else 0.0
        moments = 2 * trained - by_muon
        activations, logits = tokens * (layers * kept + whole - kept), counted * logit_bytes(shape, learner)
        more = muon_bytes(shape, learner) - activations - logits if is_muon else 0.0
        return {
            "weights": parameters * width,
            **({"base weights": below * width} if below else {}),
            "gradients": trained * _FLOAT32,
            "optimizer": (moments * _FLOAT32 + trained * masters) / shards,
            **({"reference": parameters * width} if has_copy else {}),
            "activations": activations,
            "logits": logits,
            **({"orthogonalization": more} if more > 0 else {}),
        }

    return max((of_stage(stage) for stage in {0, where.pipeline - 1}), key=lambda parts: sum(parts.values()))


def muon_bytes(shape: Shape, learner: LearnerConfig) -> float:
    """Count the bytes of Muon's step beside its state: (4 / t + 5b) for each element that it orthogonalizes at once.

    The terms are the momentum of this rank's parts in float32, and in the learner's type the gathered matrices, the
    iteration's input and output, and two products, which are as large where a matrix is square. Under a distributed
    optimizer the momentum is gathered into the buffer of the gradients, which are no longer needed.

    Source: `learner/optimizer.py BatchedMuon`.
    """
    num_layers = shape.num_layers // learner.parallel.pipeline
    at_once = max(min(num_layers, max(1, MUON_BATCH_ELEMENTS // each)) * each for each in _matrix_sizes(shape))
    return at_once * (_FLOAT32 / learner.parallel.tensor + 5 * WEIGHT_BYTES[learner.dtype])


def _matrix_sizes(shape: Shape) -> list[int]:
    """Count the elements of a layer's matrices: fused queries, keys and values; output; fused gate and up; down."""
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    rows = heads + 2 * groups, heads, 2 * shape.ffn_hidden_size, shape.ffn_hidden_size
    return [shape.hidden_size * each for each in rows]


def online_draft_memory(shape: Shape, draft: DraftConfig, *, freed: float) -> dict[str, float]:
    """Estimate what an EAGLE-3 draft that learns beside the policy holds on every rank, all of it in float32.

    Kept all the time: trained weights, the policy's embedding and output layer, and where the draft's vocabulary is cut
    a copy of the output layer's rows. Beside the trained weights come gradients and two moments, which an offloaded
    learner frees. An update holds the activations of all passes over one row, and the logits of one chunk: those of the
    policy, and for each pass logits, softmax and gradient.

    Args:
        freed: bytes of the policy's activations, which are free while the draft learns.

    Source: `drafts/trainer.py DraftTrainer`, `drafts/passes.py head_inputs`. The scores of attention are left out.
    """
    trained, _ = draft_sizes(shape, draft, 1)
    cut = draft.eagle3.vocab_size
    hidden, known = shape.hidden_size, cut or shape.vocab_size
    copies = hidden * (2 * shape.vocab_size + (cut or 0))
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    passes = draft.online_passes
    layer = 6 * hidden + 2 * heads + 2 * groups + 4 * shape.ffn_hidden_size
    rows, chunk = min(draft.eagle3.tokens_per_row, draft.online_tokens), draft.eagle3.loss_chunk_tokens
    more = _FLOAT32 * (rows * (4 * hidden + passes * layer) + chunk * (1 + 3 * passes) * known) - freed
    return {
        "online draft": (trained + copies) * _FLOAT32,
        "draft training": 3 * trained * _FLOAT32,
        **({"draft activations": more} if more > 0 else {}),
    }


def stage_parameters(shape: Shape, learner: LearnerConfig, stage: int) -> float:
    """Count the parameters on one rank of a pipeline stage.

    Source: `learner/weights.py mappings`. Matrices are split over t ranks, and every rank holds all norms. The first
    stage holds the embedding. The last stage holds the final norm and the output layer, which is a copy of the
    embedding where the two are tied.
    """
    where = learner.parallel
    layer = sum(_matrix_sizes(shape)) / where.tensor + 2 * shape.hidden_size + 2 * shape.head_dim
    first, last = stage == 0, stage == where.pipeline - 1
    has_own_head = last and not (first and shape.tie_word_embeddings)
    ends = shape.vocab_size * shape.hidden_size / where.tensor * (first + has_own_head)
    return shape.num_layers // where.pipeline * layer + ends + (shape.hidden_size if last else 0)


def adapter_sizes(shape: Shape, learner: LearnerConfig, lora: LoraConfig) -> tuple[float, float]:
    """Count the elements of one layer's adapters and of the matrices below them, on one rank.

    A matrix of R rows and C columns has r (R + C). Split by rows it has r (R / t + C) on a rank, split by columns
    r (R + C / t).
    """
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    hidden, ffn, ranks = shape.hidden_size, shape.ffn_hidden_size, learner.parallel.tensor
    inner = {LoraTarget.QUERY: heads, LoraTarget.OUTPUT: heads, LoraTarget.KEY: groups, LoraTarget.VALUE: groups}
    sides = [inner.get(target, ffn) for target in lora.targets]  # the split side; the other is the hidden size
    return sum(lora.rank * (side / ranks + hidden) for side in sides), sum(side * hidden / ranks for side in sides)


def activation_bytes(shape: Shape, learner: LearnerConfig, recompute: Recompute = Recompute.NONE) -> float:
    """Count the bytes that one layer keeps of one token for the backward pass: b (4h / s + (4f + 4A + 3K) / t).

    `s` is t with sequence parallelism, else 1. Both norms and the two projections behind the norms keep their input:
    4h, on every rank without sequence parallelism. Attention keeps queries and keys before and after their norms,
    values, its output and a copy in another order: 4A + 3K. The gated unit keeps gate and up, SiLU of the gate, and
    the product: 4f. With selective recomputation the feed-forward keeps its input alone, and attention keeps no output:
    3A + 3K are left. With full recomputation a layer keeps its input: h. A gated unit that is compiled (bfloat16 on a
    GPU) keeps no SiLU, f less, which is left in as room.

    Source: the tensors of `learner/layers.py`; the terms of arXiv 2205.05198, section 4, with flash attention and
    without dropout.
    """
    where, width = learner.parallel, WEIGHT_BYTES[learner.dtype]
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    hidden = shape.hidden_size / (where.tensor if where.sequence_parallel else 1)
    split = {
        Recompute.SELECTIVE: 3 * heads + 3 * groups,
        Recompute.NONE: 4 * shape.ffn_hidden_size + 4 * heads + 3 * groups,
    }
    return width * (hidden if recompute is Recompute.FULL else 4 * hidden + split[recompute] / where.tensor)


def logit_bytes(shape: Shape, learner: LearnerConfig) -> float:
    """Count the bytes of one token's logits at the peak: at most (b + 12) V / t.

    The terms are the product, and in float32 the logits, their exponentials and the gradient.

    Source: `learner/logprobs.py _ChunkedLogprobs`.
    """
    return (WEIGHT_BYTES[learner.dtype] + 3 * _FLOAT32) * shape.vocab_size / learner.parallel.tensor


def engine_memory(
    shape: Shape, engine: EngineConfig, *, gpu_bytes: float, longest_k: int, draft: DraftConfig
) -> tuple[dict[str, float], float]:
    """Estimate one worker's parts and the bytes of a cached token; the cache takes the rest of the worker's share.

    The weights of policy and draft are split over the engine's ranks. Activations are the larger of two peaks. One is
    a pass over the most tokens that vLLM batches: residual and input, 2h, and gate, up and product, 3f / t. The other
    is the sampler over every request's k + 1 rows: three float32 arrays of [rows, V] on every worker.

    Source: vLLM 0.32, `v1/worker/gpu_worker.py determine_available_memory` (the cache takes the share without weights
    and the peak of a profiling pass; a sleeping engine frees the cache alone) and `engine/arg_utils.py
    get_batch_defaults` (16,384 tokens offline on GPUs from 70 GiB on).
    """
    width, tensor = WEIGHT_BYTES[engine.dtype], engine.tensor_parallel_size
    parameters, draft_elements = draft_sizes(shape, draft, tensor) if longest_k else (0.0, 0.0)
    layer = 16_384 * width * (2 * shape.hidden_size + 3 * shape.ffn_hidden_size / tensor)
    sampler = engine.max_num_seqs * (longest_k + 1) * shape.vocab_size * 3 * _FLOAT32
    parts = {
        "engine weights": _served_bytes(shape, engine, width) / tensor,
        "draft": parameters * width / tensor,
        "engine activations": max(layer, sampler),
    }
    share = engine.gpu_memory_utilization * gpu_bytes - sum(parts.values())
    parts[_CACHE] = share if engine.kv_cache_gib is None else engine.kv_cache_gib * 2**30
    return parts, 2 * (_cached_elements(shape, shape.num_layers, tensor) + draft_elements) * width  # keys and values


def _served_bytes(shape: Shape, engine: EngineConfig, width: int) -> float:
    """Count the policy's bytes in engines: `width` an element, but one in a dense layer's matrices if quantized."""
    saved = 0.0 if engine.quantization is Quantization.NONE else width - 1.0
    return num_parameters(shape) * width - shape.num_layers * sum(_matrix_sizes(shape)) * saved


def draft_sizes(shape: Shape, config: DraftConfig, tensor: int) -> tuple[float, float]:
    """Count the draft's parameters, and the elements of its keys that a worker caches a token; zeros without weights.

    An EAGLE-3 draft counts without the embedding, which is the policy's; an MTP layer counts like an EAGLE-3 draft. The
    layers of a DFlash draft read once the width.

    Source: `drafts/eagle3.py`: a fusion of three hidden states into one (3h x h), a layer whose attention reads twice
    the width, and an output layer over the draft's vocabulary; norms are left out.
    """
    match config.method:
        case DraftMethod.EAGLE3 | DraftMethod.DFLASH | DraftMethod.MTP:
            hidden = shape.hidden_size
            heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
            inputs, num_layers = (1, config.dflash.num_layers) if config.method is DraftMethod.DFLASH else (2, 1)
            layer = inputs * hidden * (heads + 2 * groups) + heads * hidden + 3 * hidden * shape.ffn_hidden_size
            known = None if config.method is DraftMethod.MTP else config.reader.vocab_size
            parameters = 3 * hidden * hidden + num_layers * layer + hidden * (known or shape.vocab_size)
            return parameters, _cached_elements(shape, num_layers, tensor)
        case DraftMethod.DRAFT_MODEL:
            if (small := _draft_model(shape, config)) is None:
                return 0.0, 0.0
            return num_parameters(small), _cached_elements(small, small.num_layers, tensor)
        case DraftMethod.NGRAM | DraftMethod.SUFFIX | DraftMethod.HISTORY:  # looked up on the host
            return 0.0, 0.0


def _draft_model(shape: Shape, config: DraftConfig) -> Shape | None:
    """Look up the shape of a draft model; None for a model of the hub whose files are not on this host."""
    if config.model is None:
        scratch = ScratchConfig(shape=config.draft_model.shape)
        return Architecture.from_scratch(scratch, vocab_size=shape.vocab_size, eos_token_id=0)
    file = Path(config.model) / "config.json"
    if not file.is_file():
        return None
    given = json.loads(file.read_text())
    heads = given["num_attention_heads"]
    return ModelShape(
        name="draft",
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        num_layers=given["num_hidden_layers"],
        num_attention_heads=heads,
        num_query_groups=given.get("num_key_value_heads", heads),
        head_dim=given.get("head_dim") or given["hidden_size"] // heads,
        ffn_hidden_size=given["intermediate_size"],
        tie_word_embeddings=given.get("tie_word_embeddings", False),
        draft_ffn_hidden_size=0,
        draft_vocab_size=0,
        source="",
        draft_source="",
    )


def _cached_elements(shape: Shape, num_layers: int, tensor: int) -> float:
    """Count the elements of the keys that one worker caches a token; too few key-value heads are copied."""
    return num_layers * max(1.0, shape.num_query_groups / tensor) * shape.head_dim


def num_parameters(shape: Shape) -> float:
    """Count the parameters of the whole policy."""
    return stage_parameters(shape, LearnerConfig(), 0)


def memory_text(found: MemoryEstimate, channel: Channel) -> str:
    """Format the memory by part in GB a GPU, with the longest micro-batch, cached tokens and refit size."""
    kinds, layout = found.kinds, found.layout
    runtime = RUNTIME_RATE * found.hardware.memory_bytes
    rows = [["part", *(f"{kind}, GB" for kind in kinds)]]
    for part in {**found.learner, **found.engine}:
        rows.append([part, *(_gb(held[part]) if part in held else "-" for held in kinds.values())])
    rows.append(["runtime (assumed)", *(_gb(runtime) for _ in kinds)])
    rows.append(["together", *(_gb(sum(held.values()) + runtime) for held in kinds.values())])
    rows.append([f"{found.hardware.name} has", *(_gb(found.hardware.memory_bytes) for _ in kinds)])
    lines = [
        f"longest micro-batch that fits: {found.max_microbatch_tokens:,} tokens",
        f"an engine's cache holds {found.kv_tokens:,} tokens of context, "
        f"{found.kv_tokens // found.max_model_len} of the longest sequences",
        f"a refit moves {_gb(found.refit_bytes)} GB into each of {layout.num_engines} engines, "
        f"{_gb(found.refit_bytes * layout.num_engines)} GB in all, by {channel.value}",
    ]
    if layout.placement.takes_turns:
        hosted = found.learner["optimizer"] + 2 / 3 * found.learner.get("draft training", 0.0)  # a draft's moments
        lines.append(
            f"while engines generate, {_gb(hosted)} GB of each GPU's optimizer wait in host memory: "
            f"{_gb(hosted * layout.placement.gpus_per_node)} GB a node"
        )
    return "\n".join([table(rows), "", *lines])


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
