"""Stage 9 of `slipstream gpu-check`: time and memory at the shapes of Qwen3-8B, with fewer layers and random weights.

Learner and draft are measured in a process of their own, so that their memory is free when the engine starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.catalog import Precision, load_hardware, section_names
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.length import constant
from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import SamplingConfig
from slipstream.gpu_check.check_stages import Setting, Skipped, apart, gpu_bytes, sequences_update
from slipstream.gpu_check.learner_stages import draft_learner, random_sequences
from slipstream.grpo.config import OptimizerConfig
from slipstream.learner.config import LearnerConfig, ScratchConfig, ShapeConfig
from slipstream.refit.channel import open_channel, send
from slipstream.refit.config import RefitConfig
from slipstream.refit.fingerprint import ALL
from slipstream.types import Prompt

_K = 3
_MOST_LAYERS, _FEWEST_LAYERS = 12, 4
# Training state and activations at 10,240 tokens: 18 bytes a parameter, 170 kB a token.
_FIXED_BYTES, _LAYER_BYTES = 27e9, 5.4e9
_NUM_REPEATS = 3  # of an update; the shortest counts, as other load only adds time
_SPARE = 0.85  # of the free memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Shapes and amounts of the measurement."""

    shape: ShapeConfig
    vocab_size: int = 151936
    draft_vocab_size: int = 32000
    sequence_tokens: int = 2048
    num_sequences: int = 5  # of a micro-batch
    response_tokens: int = 256
    batches: tuple[int, ...] = (16, 64)  # sequences that an engine runs at once
    draft_tokens: int = 8192

    @property
    def scratch(self) -> ScratchConfig:
        """Policy of this size."""
        return ScratchConfig(shape=self.shape, max_position_embeddings=2 * self.sequence_tokens)

    @property
    def flops(self) -> float:
        """Floating-point operations of a micro-batch: 6 a matrix element and token, and causal attention."""
        heads = self.shape.num_attention_heads * self.shape.head_dim
        groups = self.shape.num_query_groups * self.shape.head_dim
        layer = self.shape.hidden_size * (2 * heads + 2 * groups + 3 * self.shape.ffn_hidden_size)
        elements = self.shape.num_layers * layer + self.vocab_size * self.shape.hidden_size
        tokens = self.num_sequences * self.sequence_tokens
        return 6 * tokens * (elements + self.shape.num_layers * self.sequence_tokens * heads)


_TINY = Size(
    shape=ShapeConfig(
        hidden_size=64, num_layers=4, num_attention_heads=2, num_query_groups=1, head_dim=32, ffn_hidden_size=128
    ),
    vocab_size=512,
    draft_vocab_size=128,
    sequence_tokens=64,
    num_sequences=4,
    response_tokens=16,
    batches=(2, 4),
    draft_tokens=128,
)


def throughput(at: Setting) -> None:
    """Micro-batch, optimizer, fingerprints, draft update, decoding with and without drafts, and refit."""
    size = _TINY if at.is_dry else _size(gpu_bytes()[0])
    at.figures["num_layers"] = size.shape.num_layers
    policy, draft = at.work / "policy", at.work / "draft"
    work = partial(_learner_figures, size, at.learner(), policy, draft, is_dry=at.is_dry)
    at.figures.update(apart(at, work))
    _engine_figures(at, size, policy, draft)


def _size(free_bytes: float) -> Size:
    """As many layers of Qwen3-8B as a GPU can train, at least four."""
    num_layers = min(_MOST_LAYERS, int((_SPARE * free_bytes - _FIXED_BYTES) / _LAYER_BYTES))
    if num_layers < _FEWEST_LAYERS:
        needed = (_FIXED_BYTES + _FEWEST_LAYERS * _LAYER_BYTES) / _SPARE
        raise Skipped(f"needs {needed / 1e9:.0f} GB of free GPU memory, got {free_bytes / 1e9:.0f}")
    shape = ShapeConfig(
        hidden_size=4096,
        num_layers=num_layers,
        num_attention_heads=32,
        num_query_groups=8,
        head_dim=128,
        ffn_hidden_size=12288,
        init_std=0.02,
    )
    return Size(shape=shape)


def _learner_figures(size: Size, config: LearnerConfig, policy: Path, draft: Path, *, is_dry: bool) -> dict[str, Any]:
    """Measure learner and draft trainer, and write policy and draft for the engine."""
    from slipstream.data.tokenizer import write_tokenizer
    from slipstream.workers.learner_process import LearnerProcess

    tokens = size.num_sequences * size.sequence_tokens
    config = replace(config, max_tokens_per_microbatch=tokens, logprob_chunk_tokens=1024)
    process = LearnerProcess(config)
    num_parameters = process.create(size.scratch, size.vocab_size, 1, OptimizerConfig(learning_rate=1e-6))
    write_tokenizer(policy.with_name("tokenizer"), max_length=size.sequence_tokens)
    process.save_hf(policy, policy.with_name("tokenizer"))
    update, three = (
        sequences_update(random_sequences(num, size.sequence_tokens, size.vocab_size), vocab_size=size.vocab_size)
        for num in (size.num_sequences, 3 * size.num_sequences)
    )
    process.train_step(update)  # allocates, and tunes kernels
    one_s, three_s = (
        min(_seconds(partial(process.train_step, each)) for _ in range(_NUM_REPEATS)) for each in (update, three)
    )
    microbatch_s = (three_s - one_s) / 2
    forward_s = _seconds(partial(process.logprobs, update.batch, 1.0))
    figures: dict[str, Any] = {
        "parameters": num_parameters,
        "microbatch_tokens": tokens,
        "microbatch_ms": 1e3 * microbatch_s,
        "forward_ms": 1e3 * forward_s,
        "optimizer_ms": 1e3 * (one_s - microbatch_s),
        "learner_tflops_per_s": size.flops / microbatch_s / 1e12,
        "fingerprints_s": _seconds(partial(process.weight_fingerprints, {}, ALL)),
    }
    if not is_dry:
        figures |= _gpu_figures(size, config, figures["learner_tflops_per_s"])
    process.release()
    return figures | _draft_figures(size, config, policy, draft)


def _gpu_figures(size: Size, config: LearnerConfig, tflops_per_s: float) -> dict[str, float]:
    """Utilization of a known GPU, and memory beside the estimate of `slipstream check`."""
    import torch

    from slipstream.learner.architecture import Architecture
    from slipstream.workers.placement.memory import learner_memory

    shape = Architecture.from_scratch(size.scratch, vocab_size=size.vocab_size, eos_token_id=1)
    figures = {
        "learner_gb": torch.cuda.max_memory_allocated() / 1e9,
        "estimated_learner_gb": sum(learner_memory(shape, config, has_reference=False).values()) / 1e9,
    }
    name = torch.cuda.get_device_name(0).lower()
    for hardware in section_names("hardware"):
        if hardware in name:
            figures["learner_mfu"] = 1e12 * tflops_per_s / load_hardware(hardware).flops_per_s[Precision.BFLOAT16]
    return figures


def _draft_figures(size: Size, config: LearnerConfig, policy: Path, draft: Path) -> dict[str, Any]:
    reader = replace(DraftConfig().eagle3, vocab_size=size.draft_vocab_size, tokens_per_row=size.sequence_tokens)
    num = size.draft_tokens // size.sequence_tokens
    chats = random_sequences(num, size.sequence_tokens, size.vocab_size)
    process = draft_learner(policy, config, DraftConfig(eagle3=reader), chats, range(size.draft_vocab_size))
    process.draft_step(range(num), 1.0)
    step_s = _seconds(partial(process.draft_step, range(num), 1.0))
    process.save_draft(draft)
    return {"draft_step_tokens": size.draft_tokens, "draft_step_s": step_s}


def _engine_figures(at: Setting, size: Size, policy: Path, draft: Path) -> None:
    longest, most = 64 + size.response_tokens, max(size.batches)
    config = replace(at.engine(), max_model_len=longest, max_num_seqs=most, gpu_memory_utilization=0.5)
    told = speculative_config(DraftConfig(), draft, _K, schedule=constant(_K))
    starting = at.start_engine(policy, config=config, speculative_config=told)
    start_s = time.perf_counter()
    with starting as engines:
        at.figures["engine_start_s"] = time.perf_counter() - start_s
        for k in (0, _K):
            engines.draft_by(constant(k))
            for batch in size.batches:
                at.figures[f"tokens_per_s_{batch}_sequences_k{k}"] = _tokens_per_s(engines, size, batch)
        with at.start_learner() as learner:
            learner.load(policy, None)
            num_bytes = learner.weight_bytes()
            with open_channel(RefitConfig(), learner, engines) as channel:
                times = [_seconds(partial(send, channel, version)) for version in (1, 2, 3, 4)]
            at.figures["refit_s"] = median(times[1:])
            at.figures["refit_gb_per_s"] = num_bytes / median(times[1:]) / 1e9


def _tokens_per_s(engines: Any, size: Size, batch: int) -> float:
    """Time the second of two generations, as the first captures and compiles what is left."""
    prompts = [Prompt(id=str(i), text="", token_ids=(2, *range(10 + i, 40 + i)), answer="") for i in range(batch)]
    sampling = SamplingConfig(temperature=1.0, max_response_tokens=size.response_tokens)
    engines.generate(prompts, sampling=sampling, group_size=1, seed=1)
    found = engines.generate(prompts, sampling=sampling, group_size=1, seed=1)
    num = sum(len(rollout.token_ids) for group in found.groups for rollout in group.rollouts)
    return num / found.generation_s


def _seconds(work: Callable[[], object]) -> float:
    """Time `work` and what it started on a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s
