"""The losslessness certificate: a verdict on two engines' samples from the exact policy that the learner computes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Trace
from slipstream.grpo.config import KvCache
from slipstream.logs import progress
from slipstream.losslessness import hypothesis_tests
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.hypothesis_tests import Bias, Draws, Floats, Tests
from slipstream.losslessness.sampling import Sample, Subject, lengths_by_position, positions
from slipstream.records.stages import CertificateRecord, Finding, GreedyRecord, Power
from slipstream.types import Quantization

CLAIM = (
    "Tokens sampled by the speculative engine follow the policy's own conditional distributions "
    "at the run's temperature, top-p and top-k."
)
IN_FLIGHT = " New weights entered while they were sampled: each token is tested against the version that it carries."
KEPT = (
    " The run keeps the caches of running sequences when new weights enter, which biases their later tokens. These "
    "were drawn with recomputed caches, and do not show that bias."
)
QUANTIZED = (
    " The policy is the one that the engines hold, with weights and inputs of its matrices in {}: how far it is from "
    "the policy that learns is no part of the verdict, and is the mismatch of the run's steps."
)
LOSSLESS, BIASED, TOO_WEAK = "lossless", "biased", "too weak"
_PIT_BINS = 20
_JUDGED_AT_ONCE = 128  # responses between two lines of progress
_LARGEST_GAP = 1e9  # nats, recorded where the policy gives one of the two tokens no probability


class ExactPolicy(Protocol):
    """Policy with exact probabilities, as the learner computes them."""

    def conditionals(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], sampling: SamplingConfig, *, seed: int
    ) -> Floats:
        """Compute `slipstream.learner.logprobs.COLUMNS` for every response token, [tokens, columns]."""
        ...

    def next_token_probabilities(self, prefixes: Sequence[Sequence[int]], sampling: SamplingConfig) -> Floats:
        """Compute the distribution that is sampled after each prefix, [prefixes, vocabulary]."""
        ...


def certify(
    sample: Sample,
    baseline: Sample,
    policy: ExactPolicy,
    *,
    config: LosslessnessConfig,
    sampling: SamplingConfig,
    subject: Subject,
    started_s: float,
    earlier: Mapping[int, Floats] | None = None,
) -> CertificateRecord:
    """Judge the speculative engine's sample against the policy and against the autoregressive engine's.

    Args:
        started_s: `time.perf_counter()` at the start of sampling.
        earlier: `judged` of earlier policy versions on the sample's long responses, by version; tokens of any other
            version are compared with `policy`.
    """
    draws = _draws(sample.traces, policy, sampling, config.seed, earlier or {})
    control = _draws(baseline.traces, policy, sampling, config.seed + 1, {})
    exact = _next_tokens(policy, sampling)
    found = {
        **hypothesis_tests.conditional_tests(draws, seed=config.seed),
        **_count_tests(sample, exact),
        **hypothesis_tests.two_sample_tests(control, draws, seed=config.seed),
        **_pair_comparison(baseline, sample),
    }
    controlled = {**hypothesis_tests.conditional_tests(control, seed=config.seed), **_count_tests(baseline, exact)}
    findings = hypothesis_tests.family(found, level=config.family_level)
    detectable = hypothesis_tests.detectable_bias(draws, num_tests=len(findings), config=config)
    greedy = _greedy(sample.greedy, baseline.greedy, policy, config.near_tie_nats)
    verdict, reason = _verdict(findings, detectable, greedy, config)
    return CertificateRecord(
        verdict=verdict,
        reason=reason,
        claim=_claim(subject, in_flight=bool(earlier)),
        family_level=config.family_level,
        power=config.power,
        max_detectable_bias=config.max_detectable_bias,
        num_speculative_tokens=subject.num_speculative_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=config.seed,
        num_tokens=sample.num_tokens,
        num_baseline_tokens=baseline.num_tokens,
        findings=findings,
        control=hypothesis_tests.family(controlled, level=config.family_level),
        detectable=detectable,
        greedy=greedy,
        pit_histograms=_histograms(draws, config.seed),
        policy_fingerprint=subject.policy_fingerprint,
        draft_fingerprint=subject.draft_fingerprint,
        versions=dict(subject.versions),
        schedule=subject.schedule,
        draft_sampling=subject.draft_sampling,
        lengths_by_position=lengths_by_position(sample.traces),
        elapsed_s=time.perf_counter() - started_s,
    )


def _claim(subject: Subject, *, in_flight: bool) -> str:
    """Say what the certificate shows of its subject."""
    quantized = "" if subject.quantization is Quantization.NONE else QUANTIZED.format(subject.quantization)
    kept = KEPT if subject.kv_cache is KvCache.KEEP else ""
    return CLAIM + (IN_FLIGHT if in_flight else "") + kept + quantized


def judged(traces: Sequence[Trace], policy: ExactPolicy, *, sampling: SamplingConfig, seed: int) -> Floats:
    """Compute the columns of `ExactPolicy.conditionals` for the responses of `traces`, [tokens, columns]."""
    parts = []
    with progress("certify_losslessness", total=len(traces), unit="response") as done:
        for first in range(0, len(traces), _JUDGED_AT_ONCE):
            some = traces[first : first + _JUDGED_AT_ONCE]
            sequences = [trace.prompt_token_ids + trace.token_ids for trace in some]
            lengths = [len(trace.prompt_token_ids) for trace in some]
            parts.append(policy.conditionals(sequences, lengths, sampling, seed=seed + first))
            done.advance(len(some))
    return np.concatenate(parts)


def _draws(
    traces: Sequence[Trace], policy: ExactPolicy, sampling: SamplingConfig, seed: int, earlier: Mapping[int, Floats]
) -> Draws:
    by_token = judged(traces, policy, sampling=sampling, seed=seed)
    versions = np.asarray([version for trace in traces for version in trace.policy_versions], dtype=np.int64)
    for version, said in earlier.items():
        by_token = np.where((versions == version)[:, None], said, by_token)
    columns = by_token.T
    place = np.asarray([position for trace in traces for position in positions(trace)], dtype=np.int64)
    assert len(place) == columns.shape[1], "a window length for every token"
    return Draws(*columns[:5], position=place, sharper=Bias(*columns[5:8]), flatter=Bias(*columns[8:]))


NextTokens = Callable[[Sequence[tuple[int, ...]]], list[Floats]]
"""Function from prefixes to the distribution [V] of the next token after each."""


def _next_tokens(policy: ExactPolicy, sampling: SamplingConfig) -> NextTokens:
    """Return the policy's exact next-token distributions as a function that computes each prefix once."""
    known: dict[tuple[int, ...], Floats] = {}

    def after(prefixes: Sequence[tuple[int, ...]]) -> list[Floats]:
        if new := [prefix for prefix in prefixes if prefix not in known]:
            known.update(zip(new, policy.next_token_probabilities(new, sampling), strict=True))
        return [known[prefix] for prefix in prefixes]

    return after


def _count_tests(sample: Sample, exact: NextTokens) -> Tests:
    firsts, pairs = [], []
    for traces in sample.repeats:
        prompt = traces[0].prompt_token_ids
        (first_V,) = exact([prompt])
        counts_V = np.bincount([trace.token_ids[0] for trace in traces], minlength=len(first_V))
        firsts.append(hypothesis_tests.count_test(counts_V, first_V))
        followed = sorted({trace.token_ids[0] for trace in traces if len(trace.token_ids) == 2})
        for token, second_V in zip(followed, exact([(*prompt, token) for token in followed]), strict=True):
            drawn = [trace.token_ids[1] for trace in traces if trace.token_ids[0] == token]
            pairs.append(hypothesis_tests.count_test(np.bincount(drawn, minlength=len(second_V)), second_V))
    num = sum(map(len, sample.repeats))
    return {
        "first token of repeated prompts": (num, *hypothesis_tests.summed_chi_square(firsts)),
        "second token given the first": (num, *hypothesis_tests.summed_chi_square(pairs)),
    }


def _pair_comparison(first: Sample, second: Sample) -> Tests:
    parts = []
    for traces in zip(first.repeats, second.repeats, strict=True):
        counted = [Counter(trace.token_ids for trace in side) for side in traces]
        cells = sorted(counted[0].keys() | counted[1].keys())
        counts = [np.asarray([side[cell] for cell in cells], dtype=np.int64) for side in counted]
        parts.append(hypothesis_tests.homogeneity_test(*counts))
    num = sum(map(len, (*first.repeats, *second.repeats)))
    return {"autoregressive beside speculative, first pair": (num, *hypothesis_tests.summed_chi_square(parts))}


def _greedy(
    speculative: Sequence[Trace], autoregressive: Sequence[Trace], policy: ExactPolicy, near_tie_nats: float
) -> GreedyRecord:
    gaps, prefixes, choices = [], [], []
    for one, other in zip(speculative, autoregressive, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b), None)
        if at is not None:
            prefixes.append(one.prompt_token_ids + one.token_ids[:at])
            choices.append([one.token_ids[at], other.token_ids[at]])
        elif len(one.token_ids) != len(other.token_ids):  # no near tie explains a different length
            gaps.append(_LARGEST_GAP)
    plain = SamplingConfig(temperature=1.0, max_response_tokens=1)
    found = policy.next_token_probabilities(prefixes, plain) if prefixes else ()
    for probabilities_V, choice in zip(found, choices, strict=True):
        pair = probabilities_V[choice]
        gaps.append(_LARGEST_GAP if pair.min() <= 0 else float(abs(np.log(pair[0] / pair[1]))))
    return GreedyRecord(
        num_responses=len(speculative),
        num_equal=len(speculative) - len(gaps),
        num_near_ties=sum(gap <= near_tie_nats for gap in gaps),
        largest_gap_nats=max(gaps, default=0.0),
        near_tie_nats=near_tie_nats,
    )


def _verdict(
    findings: Sequence[Finding], detectable: Sequence[Power], greedy: GreedyRecord, config: LosslessnessConfig
) -> tuple[str, str]:
    rejected = [finding for finding in findings if finding.reject]
    if rejected:
        worst = min(rejected, key=lambda finding: finding.p_value_corrected)
        names = ", ".join(finding.name for finding in rejected)
        return BIASED, f"{len(rejected)} of {len(findings)} tests reject ({names}); least p {worst.p_value:.1e}"
    unexplained = greedy.num_responses - greedy.num_equal - greedy.num_near_ties
    if unexplained:
        return BIASED, (
            f"greedy decoding differs from autoregressive in {unexplained} of {greedy.num_responses} responses where "
            f"no two tokens are within {greedy.near_tie_nats} nats (largest gap {greedy.largest_gap_nats:.2f})"
        )
    blind = max(detectable, key=lambda power: power.detectable_total_variation)
    if blind.detectable_total_variation > config.max_detectable_bias:
        return TOO_WEAK, (
            f"a {blind.alternative} policy would go unseen up to a total variation of "
            f"{blind.detectable_total_variation:.3f}, over losslessness.max_detectable_bias "
            f"{config.max_detectable_bias}: raise losslessness.num_tokens"
        )
    if blind.detectable_fraction == 1.0:
        return LOSSLESS, (
            f"none of {len(findings)} tests rejects; a {blind.alternative} policy would go unseen, but none is further "
            f"from this one than {blind.detectable_total_variation:.3f} in total variation a token"
        )
    return LOSSLESS, (
        f"none of {len(findings)} tests rejects; a bias of {blind.detectable_total_variation:.3f} in total variation "
        f"a token would have been seen in {config.power:.0%} of runs"
    )


def _histograms(draws: Draws, seed: int) -> dict[str, tuple[int, ...]]:
    u = hypothesis_tests.uniforms(draws.mass_before, draws.probability, seed)
    edges = np.linspace(0.0, 1.0, _PIT_BINS + 1)
    masks = hypothesis_tests.window_positions(draws.position)
    return {name: tuple(np.histogram(u[mask], edges)[0].tolist()) for name, mask in masks.items()}
