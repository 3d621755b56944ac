"""Samples that the certificate takes from one engine: long responses, repeated first pairs and greedy responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import Protocol

from slipstream.config import require
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Trace
from slipstream.grpo.config import KvCache
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.records.steps import ScheduleEntry
from slipstream.types import Prompt, Quantization

_FIRST_RANGE = 64  # positions of the first range of `lengths_by_position`


class TracingEngine(Protocol):
    """Engine whose responses record which tokens each iteration emitted."""

    def trace(self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int) -> list[Trace]:
        """Generate a group of responses to each prompt, with the window lengths of `Trace`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Responses of one engine."""

    traces: tuple[Trace, ...]
    repeats: tuple[tuple[Trace, ...], ...]  # responses of at most two tokens, by repeated prompt
    greedy: tuple[Trace, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of `traces`."""
        return sum(len(trace.token_ids) for trace in self.traces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Policy, draft and versions that a certificate names."""

    num_speculative_tokens: int
    policy_fingerprint: str
    draft_fingerprint: str
    versions: Mapping[str, str]
    schedule: tuple[ScheduleEntry, ...] = ()  # k by running batch
    draft_sampling: str = "probabilistic"  # as in `CertificateRecord`
    kv_cache: KvCache | None = None  # None: the run does not refit engines in flight
    quantization: Quantization = Quantization.NONE


def draw(
    engine: TracingEngine,
    prompts: Sequence[Prompt],
    *,
    config: LosslessnessConfig,
    sampling: SamplingConfig,
    batch: int,
    seed: int,
    across: Callable[..., list[Trace]] | None = None,
    on_drawn: Callable[[int], None] = lambda num_tokens: None,
) -> Sample:
    """Sample the responses that the certificate needs from one engine, or from several that are alike.

    Engines sample whole batches, because a token may depend on what runs beside it. Of these the sample takes the
    responses to the first prompts, each as a whole, until they have `num_tokens`; a learner judges no others.

    Args:
        batch: number of responses at a time, as in training, because the best draft length depends on it.
        seed: seed of the repeated pairs; batch i of the long responses takes `seed + 1 + i`.
        across: replacement of `engine.trace` for the long responses, which refits the engine while it generates them.
        on_drawn: callback with the number of tokens of each batch.
    """
    require(len(prompts) > 0, "losslessness", "must have prompts", len(prompts))
    traces: list[Trace] = []
    num_tokens = 0
    for call in range(config.num_tokens):  # every call yields at least one token
        chosen = [prompts[(call * batch + i) % len(prompts)] for i in range(batch)]
        before = num_tokens
        for each in (across or engine.trace)(chosen, sampling=sampling, group_size=1, seed=seed + 1 + call):
            if num_tokens < config.num_tokens:
                traces.append(each)
                num_tokens += len(each.token_ids)
        on_drawn(num_tokens - before)
        if num_tokens >= config.num_tokens:
            break
    n, repeated = config.num_repeats, prompts[: config.num_repeated_prompts]
    pairs = engine.trace(repeated, sampling=replace(sampling, max_response_tokens=2), group_size=n, seed=seed)
    greedily = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    greedy = engine.trace(prompts[: config.num_greedy_prompts], sampling=greedily, group_size=1, seed=seed)
    return Sample(
        traces=tuple(traces),
        repeats=tuple(tuple(pairs[i * n : (i + 1) * n]) for i in range(len(repeated))),
        greedy=tuple(greedy),
    )


def positions(trace: Trace) -> list[int]:
    """List the position of every token in its draft window: 0 for tokens of the prefill, else from 1."""
    first, *later = trace.window_lengths
    return [0] * first + [position for length in later for position in range(1, length + 1)]


def lengths_by_position(traces: Sequence[Trace]) -> dict[str, float]:
    """Compute the mean acceptance length by where in the sequence, prompt included, a draft window begins.

    A rollout's first window has no draft, and its end may cut the last one: both are left out.

    Returns:
        Lengths by range of positions: `0-63`, `64-127`, `128-255` and so on.
    """
    found: dict[int, list[int]] = {}
    for trace in traces:
        begins = accumulate(trace.window_lengths, initial=len(trace.prompt_token_ids))
        for begin, length in list(zip(begins, trace.window_lengths, strict=False))[1:-1]:
            found.setdefault(max(begin, _FIRST_RANGE // 2).bit_length(), []).append(length)
    ends = {bits: 1 << bits for bits in sorted(found)}
    return {f"{end // 2 if end > _FIRST_RANGE else 0}-{end - 1}": fmean(found[bits]) for bits, end in ends.items()}
