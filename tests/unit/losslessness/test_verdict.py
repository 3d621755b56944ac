"""The verdict on engines whose bias is known because it was made here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Trace
from slipstream.grpo.config import KvCache
from slipstream.learner.logprobs import conditionals, processed_logprobs
from slipstream.losslessness import verdict as verdicts
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.sampling import Sample, Subject, draw, lengths_by_position
from slipstream.losslessness.verdict import BIASED, CLAIM, IN_FLIGHT, KEPT, LOSSLESS, QUANTIZED, TOO_WEAK, judged
from slipstream.records.stages import CertificateRecord, GreedyRecord, Power
from slipstream.records.steps import ScheduleEntry
from slipstream.types import Prompt, Quantization
from tests.unit.sampled import trace

Floats = NDArray[np.float64]
Tokens = Sequence[Sequence[int]]
VOCABULARY = 12
END = 0
SAMPLING = SamplingConfig(max_response_tokens=20)
PROMPTS = [Prompt(id=str(i), text="", token_ids=(i + 1, 3), answer="") for i in range(6)]
CONFIG = LosslessnessConfig(
    num_tokens=4000, num_repeats=256, num_greedy_prompts=6, num_replications=10, max_detectable_bias=0.2
)
SMALL = replace(CONFIG, num_tokens=300, num_repeated_prompts=2, num_repeats=64, num_replications=5)
SUBJECT = Subject(num_speculative_tokens=3, policy_fingerprint="p", draft_fingerprint="d", versions={})


def logits_after(prefix: Sequence[int]) -> Floats:
    """The policy: logits that depend on the last two tokens."""
    return _logits_after(*prefix[-2:])


@cache
def _logits_after(*last: int) -> Floats:
    logits = np.random.default_rng([1, *last]).normal(size=VOCABULARY) * 1.5
    logits.setflags(write=False)
    return logits


def settings(sampling: SamplingConfig) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}


class Policy:
    """The exact policy, in closed form."""

    def logits(self, prefix: Sequence[int]) -> Floats:
        return logits_after(prefix)

    def conditionals(
        self, sequences: Tokens, prompt_lengths: Sequence[int], sampling: SamplingConfig, *, seed: int
    ) -> Floats:
        places = [(s, i) for s, start in zip(sequences, prompt_lengths, strict=True) for i in range(start, len(s))]
        logits_NV = torch.tensor(np.stack([self.logits(s[:i]) for s, i in places]))
        labels_N = torch.tensor([s[i] for s, i in places])
        generator = torch.Generator().manual_seed(seed)
        return conditionals(logits_NV, labels_N, **settings(sampling), generator=generator).numpy()

    def next_token_probabilities(self, prefixes: Tokens, sampling: SamplingConfig) -> Floats:
        logits_NV = torch.tensor(np.stack([self.logits(p) for p in prefixes]))
        return processed_logprobs(logits_NV, **settings(sampling)).double().exp().numpy()


class Engine:
    """Rejection sampling with a uniform draft of k tokens, written out; `bias` breaks one rule of it."""

    def __init__(self, k: int = 0, bias: str = "") -> None:
        self.k, self.bias = k, bias

    def trace(self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int) -> list[Trace]:
        random = np.random.default_rng(seed)
        return [self._one(prompt, sampling, random) for prompt in prompts for _ in range(group_size)]

    def _one(self, prompt: Prompt, sampling: SamplingConfig, random: np.random.Generator) -> Trace:
        tokens: list[int] = []
        windows: list[int] = []
        while not tokens or (tokens[-1] != END and len(tokens) < sampling.max_response_tokens):
            drawn = self._window([*prompt.token_ids, *tokens], sampling, random, k=self.k if tokens else 0)
            drawn = drawn[: sampling.max_response_tokens - len(tokens)]
            drawn = drawn[: drawn.index(END) + 1] if END in drawn else drawn
            tokens += drawn
            windows.append(len(drawn))
        return trace(prompt.token_ids, tuple(tokens), tuple(windows))

    def _probabilities(self, prefix: Sequence[int], sampling: SamplingConfig) -> Floats:
        if sampling.temperature == 0:
            return np.eye(VOCABULARY)[int(np.argmax(logits_after(prefix)))]
        breaks: dict[str, Any] = {"temperature": {"temperature": 0.9}, "top_p": {"top_p": 1.0}}
        return _sampled_from(*prefix[-2:], **{**settings(sampling), **breaks.get(self.bias, {})})

    def _window(self, prefix: list[int], sampling: SamplingConfig, random: np.random.Generator, *, k: int) -> list[int]:
        q = np.full(VOCABULARY, 1 / VOCABULARY)
        drawn: list[int] = []
        for position in range(k):
            p = self._probabilities(prefix + drawn, sampling)
            token = int(random.choice(VOCABULARY, p=q))
            always = self.bias == "accepts the first" and position == 0 and sampling.temperature > 0
            if always or random.random() < p[token] / q[token]:
                drawn.append(token)
                continue
            rest = np.maximum(p - q, 0)
            return [*drawn, int(random.choice(VOCABULARY, p=rest / rest.sum()))]
        p = self._probabilities(prefix + drawn, sampling)
        return [*drawn, int(random.choice(VOCABULARY, p=p))]


@cache
def _sampled_from(*last: int, **how: Any) -> Floats:
    logprobs = processed_logprobs(torch.tensor(logits_after(last))[None], **how)
    probabilities = logprobs[0].double().softmax(-1).numpy()
    probabilities.setflags(write=False)
    return probabilities


def sample(
    engine: Engine, sampling: SamplingConfig = SAMPLING, *, seed: int, config: LosslessnessConfig = CONFIG
) -> Sample:
    return draw(engine, PROMPTS, config=config, sampling=sampling, batch=24, seed=seed)


def certificate(
    speculative: Sample, autoregressive: Sample, *, policy: Policy | None = None, **how: Any
) -> CertificateRecord:
    plain: dict[str, Any] = {"config": SMALL, "sampling": SAMPLING, "subject": SUBJECT, "started_s": 0.0}
    return verdicts.certify(speculative, autoregressive, policy or Policy(), **{**plain, **how})


class Refitted(Engine):
    """After its fourth token a response goes on under version 1, whose logits are half of those before."""

    def _probabilities(self, prefix: Sequence[int], sampling: SamplingConfig) -> Floats:
        p = super()._probabilities(prefix, sampling)
        if sampling.temperature == 0 or len(prefix) - 2 < 4:
            return p
        p = np.sqrt(p)
        return p / p.sum()

    def _one(self, prompt: Prompt, sampling: SamplingConfig, random: np.random.Generator) -> Trace:
        drawn = super()._one(prompt, sampling, random)
        return replace(drawn, policy_versions=tuple(int(place >= 4) for place in range(len(drawn.token_ids))))


class Later(Policy):
    def logits(self, prefix: Sequence[int]) -> Floats:
        return super().logits(prefix) / 2


def findings_in_flight(*, of_version: int) -> list[str]:
    """Tests of the conditionals that reject, where those of the first policy are held against this version's tokens."""
    drawn = sample(Refitted(k=3), seed=1)
    earlier = {of_version: judged(drawn.traces, Policy(), sampling=SAMPLING, seed=CONFIG.seed)}
    record = certificate(drawn, sample(Engine(), seed=2), policy=Later(), config=CONFIG, earlier=earlier)
    assert record.claim.endswith("each token is tested against the version that it carries.")
    return [finding.name for finding in record.findings if finding.reject and finding.name.startswith("pit")]


def test_tokens_are_held_against_the_version_that_they_carry_and_with_another_it_is_seen() -> None:
    assert findings_in_flight(of_version=0) == []
    assert "pit, all tokens" in findings_in_flight(of_version=1)


FEW = replace(CONFIG, num_tokens=60, num_repeats=16, num_greedy_prompts=2, max_detectable_bias=0.05)
WITH_TOP_P = replace(SAMPLING, top_p=0.9)


@pytest.mark.parametrize(
    ("bias", "sampling", "config", "expected"),
    [
        ("", SAMPLING, CONFIG, LOSSLESS),
        ("", replace(WITH_TOP_P, temperature=0.7, top_k=8), CONFIG, LOSSLESS),
        ("accepts the first", SAMPLING, CONFIG, BIASED),
        ("temperature", SAMPLING, CONFIG, BIASED),
        ("top_p", WITH_TOP_P, CONFIG, BIASED),  # which it ignores
        ("", SAMPLING, FEW, TOO_WEAK),
    ],
)
def test_exact_engines_are_certified_biases_are_seen_and_too_few_tokens_certify_nothing(
    bias: str, sampling: SamplingConfig, config: LosslessnessConfig, expected: str
) -> None:
    drawn, baseline = (
        sample(engine, sampling, seed=seed, config=config) for seed, engine in enumerate((Engine(3, bias), Engine()), 1)
    )
    assert certificate(drawn, baseline, config=config, sampling=sampling).verdict == expected


@pytest.fixture(scope="module")
def drawn() -> Sample:
    return sample(Engine(k=3), seed=1, config=SMALL)


@pytest.fixture(scope="module")
def baseline() -> Sample:
    return sample(Engine(), seed=2, config=SMALL)


def test_a_certificate_says_what_it_is_about_and_how_much_was_drawn() -> None:
    config = replace(SMALL, num_tokens=500, family_level=0.02, power=0.8, max_detectable_bias=0.9, seed=4)
    sampling = SamplingConfig(temperature=0.9, top_p=0.95, top_k=8, max_response_tokens=20)
    schedule = (ScheduleEntry(batch_from=1, batch_to=8, num_speculative_tokens=3),)
    subject = replace(SUBJECT, versions={"torch": "2"}, schedule=schedule)
    speculative = sample(Engine(k=3), sampling, seed=1, config=config)
    autoregressive = sample(Engine(), sampling, seed=2, config=config)
    how: dict[str, Any] = {"config": config, "sampling": sampling, "subject": subject}
    record = certificate(speculative, autoregressive, **how, started_s=time.perf_counter() - 60.0)

    assert (record.claim, record.family_level, record.power, record.max_detectable_bias) == (CLAIM, 0.02, 0.8, 0.9)
    assert (record.temperature, record.top_p, record.top_k, record.seed) == (0.9, 0.95, 8, 4)
    assert (record.num_speculative_tokens, record.schedule, record.versions) == (3, schedule, {"torch": "2"})
    assert (record.policy_fingerprint, record.draft_fingerprint) == ("p", "d")
    assert (record.num_tokens, record.num_baseline_tokens) == (speculative.num_tokens, autoregressive.num_tokens)
    assert 60.0 < record.elapsed_s < 120.0
    observed = {finding.name: finding.num_observations for finding in record.findings}
    # Two prompts, 64 pairs of each, by one engine or by both.
    assert (observed["first token of repeated prompts"], observed["second token given the first"]) == (128, 128)
    assert observed["autoregressive beside speculative, first pair"] == 256
    assert observed["pit, all tokens"] == speculative.num_tokens
    assert observed["autoregressive beside speculative, pit"] == speculative.num_tokens + autoregressive.num_tokens
    control = {finding.name: finding.num_observations for finding in record.control}
    assert (control["pit, all tokens"], control["first token of repeated prompts"]) == (autoregressive.num_tokens, 128)
    assert not {name for name in control if name.startswith("autoregressive")}
    assert record.lengths_by_position == lengths_by_position(speculative.traces) != {}
    # A window of a token without a draft, then of three and a bonus: every token in one bar of twenty.
    assert list(record.pit_histograms) == ["no draft", "draft position 1", "draft position 2"]
    assert {len(bars) for bars in record.pit_histograms.values()} == {20}
    assert sum(map(sum, record.pit_histograms.values())) == speculative.num_tokens
    assert min(map(sum, zip(*record.pit_histograms.values(), strict=True))) > 0


def test_a_certificate_claims_no_more_than_was_drawn(drawn: Sample, baseline: Sample) -> None:
    later = {7: judged(drawn.traces, Policy(), sampling=SAMPLING, seed=SMALL.seed)}
    for said, earlier, claim in (
        ({"kv_cache": None}, None, CLAIM),
        ({"kv_cache": KvCache.RECOMPUTE}, later, CLAIM + IN_FLIGHT),
        ({"kv_cache": KvCache.KEEP}, later, CLAIM + IN_FLIGHT + KEPT),
        ({"quantization": Quantization.INT8}, None, CLAIM + QUANTIZED.format("int8")),
    ):
        assert certificate(drawn, baseline, subject=replace(SUBJECT, **said), earlier=earlier).claim == claim


def rejected(record: CertificateRecord) -> set[str]:
    return {finding.name for finding in record.findings if finding.reject}


def test_repeated_first_pairs_are_held_against_policy_and_other_engine(drawn: Sample, baseline: Sample) -> None:
    """Of the first prompt all 64 pairs begin with one token; of the second all go on with one after each first."""
    one, other = drawn.repeats
    stuck = tuple(replace(each, token_ids=(5, *(each.token_ids[1:] or (2,)))) for each in one)
    first = certificate(replace(drawn, repeats=(stuck, other)), baseline)
    assert "first token of repeated prompts" in rejected(first)
    assert "autoregressive beside speculative, first pair" in rejected(first)

    drooping = tuple(replace(each, token_ids=(*each.token_ids[:1], *[6] * (len(each.token_ids) - 1))) for each in other)
    second = certificate(replace(drawn, repeats=(one, drooping)), baseline)
    assert "second token given the first" in rejected(second)
    assert "first token of repeated prompts" not in rejected(second)
    assert "autoregressive beside speculative, first pair" in rejected(second)
    assert second.verdict == BIASED
    least = min(finding.p_value for finding in second.findings)
    names = ", ".join(finding.name for finding in second.findings if finding.reject)
    num = len(rejected(second))
    assert second.reason == f"{num} of {len(second.findings)} tests reject ({names}); least p {least:.1e}"


# Under the prompt 1, 3 and the first token 5 the tokens 6 and 7 are so far apart; at temperature 1 their logits say it.
GAP = float(abs(logits_after((1, 3, 5))[6] - logits_after((1, 3, 5))[7]))


def answering_greedily(drawn: Sample, *responses: tuple[int, ...]) -> Sample:
    return replace(drawn, greedy=tuple(trace((1, 3), tokens) for tokens in responses))


@pytest.mark.parametrize(("near_tie_nats", "num_near_ties"), [(GAP * 1.001, 1), (GAP * 0.999, 0)])
def test_greedy_responses_may_part_only_at_tokens_that_are_nearly_tied(
    drawn: Sample, baseline: Sample, near_tie_nats: float, num_near_ties: int
) -> None:
    config = replace(SMALL, near_tie_nats=near_tie_nats, max_detectable_bias=0.99)
    drawn = answering_greedily(drawn, (4, 0), (5, 6, 2), (4, 0))
    baseline = answering_greedily(baseline, (4, 0), (5, 7, 2), (4, 0))
    record = certificate(drawn, baseline, config=config)

    found = record.greedy
    assert (found.num_responses, found.num_equal, found.num_near_ties) == (3, 2, num_near_ties)
    assert (found.largest_gap_nats, found.near_tie_nats) == (pytest.approx(GAP), near_tie_nats)
    assert record.verdict == (LOSSLESS if num_near_ties else BIASED)
    assert num_near_ties or record.reason == (
        "greedy decoding differs from autoregressive in 1 of 3 responses where no two tokens are within "
        f"{near_tie_nats} nats (largest gap {GAP:.2f})"
    )
    exactly = replace(config, near_tie_nats=found.largest_gap_nats)
    assert certificate(drawn, baseline, config=exactly).greedy.num_near_ties == 1


class CertainPolicy(Policy):
    """Gives token 7 no chance at all."""

    def next_token_probabilities(self, prefixes: Tokens, sampling: SamplingConfig) -> Floats:
        probabilities = super().next_token_probabilities(prefixes, sampling)
        probabilities[:, 7] = 0.0
        return probabilities


@pytest.mark.parametrize(
    ("policy", "ours", "theirs", "found"),
    [
        (Policy(), [(5, 6), (4, 0)], [(5, 6), (4, 0)], (2, 0, 0.0)),
        (CertainPolicy(), [(5, 6)], [(5, 7)], (0, 0, 1e9)),
        (Policy(), [(5, 6), (5, 6), (5, 6)], [(5, 6, 2), (5, 6), (5, 7)], (1, 1, 1e9)),
    ],
    ids=["equal ones have no gap", "of no chance", "one ends where the other goes on"],
)
def test_what_no_tie_excuses_never_counts_as_one(
    drawn: Sample, baseline: Sample, policy: Policy, ours: Any, theirs: Any, found: tuple[int, int, float]
) -> None:
    drawn, baseline = answering_greedily(drawn, *ours), answering_greedily(baseline, *theirs)
    greedy = certificate(drawn, baseline, policy=policy, config=replace(SMALL, near_tie_nats=100.0)).greedy
    assert (greedy.num_equal, greedy.num_near_ties, greedy.largest_gap_nats) == found


def test_a_verdict_says_which_bias_would_have_been_seen(drawn: Sample, baseline: Sample) -> None:
    record = certificate(drawn, baseline, config=replace(SMALL, max_detectable_bias=0.99, power=0.8))
    blind = max(record.detectable, key=lambda power: power.detectable_total_variation)
    bias = f"{blind.detectable_total_variation:.3f}"
    assert record.verdict == LOSSLESS
    assert record.reason == (
        f"none of {len(record.findings)} tests rejects; a bias of {bias} in total variation a token would have been "
        "seen in 80% of runs"
    )
    record = certificate(drawn, baseline, config=replace(SMALL, max_detectable_bias=0.01, power=0.8))
    assert record.verdict == TOO_WEAK
    assert record.reason == (
        f"a {blind.alternative} policy would go unseen up to a total variation of {bias}, over "
        "losslessness.max_detectable_bias 0.01: raise losslessness.num_tokens"
    )


def test_a_policy_so_sharp_that_none_is_much_sharper_is_certified_and_says_why() -> None:
    """No number of tokens shows a bias that can hardly exist."""
    unseen = Power(alternative="sharper", detectable_total_variation=0.003, detectable_fraction=1.0)
    seen = Power(alternative="flatter", detectable_total_variation=0.002, detectable_fraction=0.2)
    greedy = GreedyRecord(num_responses=1, num_equal=1, num_near_ties=0, largest_gap_nats=0.0, near_tie_nats=0.25)
    verdict, reason = verdicts._verdict((), (unseen, seen), greedy, SMALL)
    assert verdict == LOSSLESS
    assert "a sharper policy would go unseen, but none is further from this one than 0.003" in reason


class NumberedPolicy(Policy):
    """Says of each token the numbers of its columns."""

    def conditionals(self, sequences: Tokens, prompt_lengths: Any, sampling: SamplingConfig, *, seed: int) -> Floats:
        return np.tile(np.arange(11) / 11, (sum(map(len, sequences)) - sum(prompt_lengths), 1))


def test_each_column_becomes_what_it_is(drawn: Sample) -> None:
    """In the order of `conditionals`: of the token, of a sharper policy, of a flatter one."""
    draws = verdicts._draws(drawn.traces, NumberedPolicy(), SAMPLING, 0, {})
    biases = ((bias.mass_before, bias.probability, bias.total_variation) for bias in (draws.sharper, draws.flatter))
    token = (draws.mass_before, draws.probability, draws.logprob_mean, draws.logprob_variance)
    columns = (*token, draws.largest_probability, *chain(*biases))
    assert [column[0] for column in columns] == [number / 11 for number in range(11)]
    assert all(len(column) == drawn.num_tokens == len(draws.position) for column in columns)


class NotingPolicy(Policy):
    """Notes the seeds that the random part of its answers is drawn from, and what it is asked once and again."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.prefixes: list[tuple[int, ...]] = []

    def conditionals(self, sequences: Tokens, prompt_lengths: Any, sampling: SamplingConfig, *, seed: int) -> Floats:
        self.seeds.append(seed)
        return super().conditionals(sequences, prompt_lengths, sampling, seed=seed)

    def next_token_probabilities(self, prefixes: Tokens, sampling: SamplingConfig) -> Floats:
        self.prefixes += [tuple(prefix) for prefix in prefixes]
        return super().next_token_probabilities(prefixes, sampling)


def test_a_certificate_of_the_same_samples_is_the_same_and_all_that_is_judged_has_seeds_of_its_own(
    drawn: Sample, baseline: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "_JUDGED_AT_ONCE", 10)
    config = replace(SMALL, seed=4)
    policies = NotingPolicy(), NotingPolicy()
    first, second = (certificate(drawn, baseline, policy=policy, config=config) for policy in policies)
    assert replace(first, elapsed_s=0.0) == replace(second, elapsed_s=0.0)
    counts = len(drawn.traces), len(baseline.traces)
    speculative, autoregressive = (range(seed, seed + num, 10) for seed, num in zip((4, 5), counts, strict=True))
    assert policies[0].seeds == [*speculative, *autoregressive]
    assert len(set(policies[0].seeds)) == len(policies[0].seeds) > 2
    # Prompts are shared by both engines, and asked about once.
    assert len(policies[0].prefixes) == len(set(policies[0].prefixes))
    judged(drawn.traces, policies[1], sampling=SAMPLING, seed=config.seed)
    assert policies[1].seeds == [*speculative, *autoregressive, *speculative]
