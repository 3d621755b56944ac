"""A recipe held against its GPUs: its plan, what each GPU has to hold, and what a refit moves; refused if too large."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import require
from slipstream.learner.architecture import Architecture, Experts, Shape, require_divisible, require_even_experts
from slipstream.refit.config import Channel
from slipstream.simulator.cost.hardware import Hardware, load_hardware
from slipstream.simulator.cost.models import ModelShape, load_model
from slipstream.workers.placement.config import Layout, PlacementMode
from slipstream.workers.placement.memory import (
    RUNTIME_RATE,
    WEIGHT_BYTES,
    EngineMemory,
    LearnerMemory,
    engine_memory,
    learner_memory,
    num_parameters,
)
from slipstream.workers.placement.proposer import proposer
from slipstream.workers.placement.recipe_view import Run

_TOKENIZER_SIZE = 64  # of the character tokenizer that a policy from scratch has


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedShape:
    """A model of the hub, whose files need not be at hand: the simulator's data file has its shape."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    tie_word_embeddings: bool = False  # of no dense model in that file

    @classmethod
    def of(cls, model: ModelShape) -> PublishedShape:
        """The shape of a dense model.

        Raises:
            ConfigError: a mixture of experts, whose memory nobody has counted.
        """
        require(model.num_experts == 0, "simulator.model", "must be dense to be planned", model.name)
        return cls(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            head_dim=model.head_dim,
            ffn_hidden_size=model.dense_ffn_hidden_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """What a GPU has to hold. `learner` and `engine` share one where the run is colocated."""

    hardware: Hardware
    learner: LearnerMemory
    engine: EngineMemory
    is_colocated: bool
    takes_turns: bool  # each of the two gives memory back while the other works
    max_microbatch_tokens: int  # the largest micro-batch that would fit
    num_longest_sequences: int  # of `engine.max_model_len` tokens that an engine's cache holds at once
    refit_bytes: float  # into each engine
    channel: Channel

    @property
    def beside_training(self) -> float:
        """What an engine has of the GPU while the learner trains on it."""
        if not self.is_colocated:
            return 0.0
        return self.engine.kept if self.takes_turns else self.engine.total

    @property
    def runtime(self) -> float:
        """What is set aside for everything that no formula counts."""
        return RUNTIME_RATE * self.hardware.memory_bytes


def known_shape(run: Run) -> Shape | None:
    """The policy's shape as far as the recipe knows it; None for a model of the hub that no data file describes."""
    scratch = run.policy.scratch
    if scratch is not None:
        return Architecture.from_scratch(scratch, vocab_size=_TOKENIZER_SIZE, eos_token_id=0)
    path = Path(run.policy.model)
    if (path / "config.json").is_file():
        return Architecture.from_hf(path)
    return None if run.simulator is None else PublishedShape.of(load_model(run.simulator.model))


def require_even(run: Run, shape: Shape) -> None:
    """Refuse layouts that do not divide the policy.

    Raises:
        ConfigError: heads, layers, vocabulary or experts do not divide.

    Source: vLLM 0.32, `config/model.py verify_with_parallel_config` and `model_executor/models/qwen2.py`: query heads
    divide; key-value heads divide, or are copied evenly; every matrix of the feed-forward divides.
    """
    require_divisible(shape, tensor=run.learner.parallel.tensor, pipeline=run.learner.parallel.pipeline)
    require_even_experts(_experts(shape), run.learner.parallel)
    tensor, field = run.engine.tensor_parallel_size, "engine.tensor_parallel_size"
    for name, size in (("query heads", shape.num_attention_heads), ("ffn hidden size", shape.ffn_hidden_size)):
        require(size % tensor == 0, field, f"must divide the policy's {size} {name}", tensor)
    groups = shape.num_query_groups
    rule = f"must divide the policy's {groups} key-value heads, or be a multiple of them"
    require(groups % tensor == 0 or tensor % groups == 0, field, rule, tensor)
    require(tensor == 1 or _experts(shape) is None, field, "must be 1 for a mixture of experts", tensor)


def _experts(shape: Shape) -> Experts | None:
    return shape.experts if isinstance(shape, Architecture) else None


def assess(run: Run) -> Assessment | None:
    """What each GPU has to hold; None without GPUs, or where the recipe names no hardware (`simulator`).

    Raises:
        ConfigError: a layout does not divide the policy, the placement rules out the channel, or a GPU's memory does
            not hold its parts: the message has the field to change; or the policy is a mixture of experts, whose memory
            nobody has counted.
    """
    shape = known_shape(run)
    if shape is not None:
        require_even(run, shape)
    channel = _channel(run.refit.channel, run.layout)
    if shape is None or run.simulator is None or not run.layout.has_gpus:
        return None
    fix = "leave out the section `simulator`: only the layout is checked then"
    require(
        _experts(shape) is None, "policy.model", "must be dense for the memory to be planned", run.policy.model, fix
    )
    hardware = load_hardware(run.simulator.hardware)
    is_colocated = run.layout.placement.mode is PlacementMode.COLOCATED
    takes_turns = run.layout.placement.takes_turns
    engine = engine_memory(
        shape,
        run.engine,
        gpu_bytes=hardware.memory_bytes,
        longest_k=max(run.tuning.candidate_ks),
        proposer=proposer(shape, run.draft),
    )
    learner = learner_memory(shape, run.learner, with_reference=run.grpo.loss.kl_coefficient > 0)
    usable = (1 - RUNTIME_RATE) * hardware.memory_bytes
    beside = engine.kept if takes_turns else engine.total
    found = Assessment(
        hardware=hardware,
        learner=learner,
        engine=engine,
        is_colocated=is_colocated,
        takes_turns=takes_turns,
        max_microbatch_tokens=_largest_microbatch(run, learner, usable - (beside if is_colocated else 0.0)),
        num_longest_sequences=engine.kv_tokens // run.engine.max_model_len,
        refit_bytes=num_parameters(shape) * WEIGHT_BYTES[run.learner.dtype],
        channel=channel,
    )
    _require_cache(run, found, usable)
    if takes_turns:
        _require_generation(run, found, usable)
    _require_fit(run, found, usable)
    return found


def _channel(wanted: Channel, layout: Layout) -> Channel:
    """What `auto` becomes on GPUs; a channel that the placement rules out is refused now, not when it is opened.

    Raises:
        ConfigError: the recipe names it.
    """
    if not layout.has_gpus:
        rule = "must do without CUDA: placement.gpus_per_node is 0"
        require(wanted not in (Channel.NCCL, Channel.IPC), "refit.channel", rule, wanted.value, "set auto")
        return wanted
    is_colocated, num_nodes = layout.placement.mode is PlacementMode.COLOCATED, layout.placement.nodes
    fits = Channel.IPC if is_colocated else Channel.NCCL
    if wanted is Channel.AUTO:
        return fits
    crosses_hosts = num_nodes > 1 and wanted is Channel.SHARED_MEMORY
    require(
        not crosses_hosts, "refit.channel", f"must cross {num_nodes} nodes", wanted.value, f"set auto, or {fits.value}"
    )
    other = Channel.NCCL if is_colocated else Channel.IPC
    rule = "must join two processes on one GPU" if is_colocated else "must join processes on different GPUs"
    require(wanted is not other, "refit.channel", rule, wanted.value, f"set auto, or {fits.value}")
    return wanted


def _largest_microbatch(run: Run, learner: LearnerMemory, room: float) -> int:
    """Tokens of a micro-batch whose activations and logits fill `room` beside what does not grow with them.

    Logits that are taken in chunks do not grow.
    """
    growing = learner.activations + (learner.logits if run.learner.logprob_chunk_tokens is None else 0.0)
    return max(0, int((room - learner.total + growing) * run.learner.max_tokens_per_microbatch / growing))


def _require_cache(run: Run, found: Assessment, usable: float) -> None:
    """An engine that cannot hold one whole sequence does not start, nor one that is larger than a GPU."""
    engine, longest = found.engine, run.engine.max_model_len
    rest = engine.total - engine.kv_cache
    cache_gib = run.engine.kv_cache_gib
    field = "engine.gpu_memory_utilization" if cache_gib is None else "engine.kv_cache_gib"
    value = run.engine.gpu_memory_utilization if cache_gib is None else cache_gib
    rule = f"must leave a {found.hardware.name} {_gb(usable)} for the engine, which takes {_gb(engine.total)}"
    require(engine.total <= usable, field, rule, value, f"{_gb(rest)} of it are no cache")
    wanted = (rest + longest * engine.kv_bytes_per_token) / found.hardware.memory_bytes
    more = f"raise it to {math.ceil(100 * wanted) / 100:.2f}, or " if cache_gib is None and wanted < 1 else ""
    rule = f"must leave a key-value cache of one sequence of engine.max_model_len {longest} tokens"
    fix = f"it holds {engine.kv_tokens}: {more}raise engine.tensor_parallel_size {run.engine.tensor_parallel_size}"
    require(engine.kv_tokens >= longest, field, rule, value, fix)


def _require_generation(run: Run, found: Assessment, usable: float) -> None:
    """Hold an engine with its cache, and what the learner keeps beside it, against the GPU."""
    room, cache_gib = usable - found.learner.kept, run.engine.kv_cache_gib
    rule = f"must leave a {found.hardware.name} room for the learner's weights beside the engine"
    over = f"{_gb(found.engine.total)} and {_gb(found.learner.kept)} are more than the {_gb(usable)} it has to give"
    if cache_gib is None:
        field, value = "engine.gpu_memory_utilization", run.engine.gpu_memory_utilization
        fix = f"{over}: lower it to {max(0.0, int(100 * room / found.hardware.memory_bytes) / 100):.2f}"
    else:
        field, value, fix = "engine.kv_cache_gib", cache_gib, over
    require(found.engine.total <= room, field, rule, value, fix)


def _require_fit(run: Run, found: Assessment, usable: float) -> None:
    """Hold the learner, and what an engine has beside it, against the GPU; the message has the cheapest way out."""
    engine_bytes = found.beside_training
    needed = found.learner.total + engine_bytes
    if needed <= usable:
        return
    beside = f" beside the engine's {_gb(engine_bytes)}" if found.is_colocated else ""
    over = f"the learner needs {_gb(found.learner.total)}{beside}, a {found.hardware.name} has {_gb(usable)} to give"
    longest = run.data.max_prompt_tokens + run.sampling.max_response_tokens
    if found.max_microbatch_tokens >= longest:
        rule = f"must be at most {found.max_microbatch_tokens} to fit"
        require(False, "learner.max_tokens_per_microbatch", rule, run.learner.max_tokens_per_microbatch, over)
    room = (usable - found.learner.total) / found.hardware.memory_bytes
    least = found.engine.total - found.engine.kv_cache + run.engine.max_model_len * found.engine.kv_bytes_per_token
    # In turn the cache goes anyway: what is left beside the engine's rest is less than that rest and any cache.
    if room * found.hardware.memory_bytes >= least and run.engine.kv_cache_gib is None:
        rule = f"must be at most {int(room * 100) / 100:.2f} to fit"
        require(False, "engine.gpu_memory_utilization", rule, run.engine.gpu_memory_utilization, over)
    rule = "must be larger to fit"
    require(False, "learner.parallel.tensor", rule, run.learner.parallel.tensor, over)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
