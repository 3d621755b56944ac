"""The certificate's statistics, on samplers whose bias is known because it was made here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream import losslessness
from slipstream.certify import BIASED, LOSSLESS, TOO_WEAK, Sample, Subject, certify, draw, positions
from slipstream.losslessness import LosslessnessConfig
from slipstream.policy.conditionals import conditionals, processed_logprobs
from slipstream.rollout.config import SamplingConfig
from slipstream.rollout.engine import Trace
from slipstream.types import Prompt

VOCABULARY = 12
END = 0
SAMPLING = SamplingConfig(max_response_tokens=20)
PROMPTS = [Prompt(id=str(i), text="", token_ids=(i + 1, 3), answer="") for i in range(6)]
CONFIG = LosslessnessConfig(
    num_tokens=4000, num_repeats=256, num_greedy_prompts=6, num_replications=10, max_detectable_bias=0.2
)
SUBJECT = Subject(num_speculative_tokens=3, policy_fingerprint="p", draft_fingerprint="d", versions={})


def logits_after(prefix: Sequence[int]) -> NDArray[np.float64]:
    """The policy: logits that depend on the last two tokens."""
    return np.random.default_rng([1, *prefix[-2:]]).normal(size=VOCABULARY) * 1.5


class Policy:
    """The exact policy, in closed form."""

    def conditionals(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], sampling: SamplingConfig, *, seed: int
    ) -> NDArray[np.float64]:
        places = [(s, i) for s, start in zip(sequences, prompt_lengths, strict=True) for i in range(start, len(s))]
        logits_NV = torch.tensor(np.stack([logits_after(s[:i]) for s, i in places]))
        labels_N = torch.tensor([s[i] for s, i in places])
        return conditionals(
            logits_NV,
            labels_N,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            generator=torch.Generator().manual_seed(seed),
        ).numpy()

    def next_token_probabilities(
        self, prefixes: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> NDArray[np.float64]:
        logits_NV = torch.tensor(np.stack([logits_after(p) for p in prefixes]))
        logprobs = processed_logprobs(
            logits_NV, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
        )
        return logprobs.double().exp().numpy()


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
        return Trace(
            prompt_token_ids=prompt.token_ids,
            token_ids=tuple(tokens),
            window_lengths=tuple(windows),
            policy_version=0,
            draft_version=0,
        )

    def _probabilities(self, prefix: Sequence[int], sampling: SamplingConfig) -> NDArray[np.float64]:
        if sampling.temperature == 0:
            return np.eye(VOCABULARY)[int(np.argmax(logits_after(prefix)))]
        temperature = 0.9 if self.bias == "temperature" else sampling.temperature
        top_p = 1.0 if self.bias == "top_p" else sampling.top_p
        logits = torch.tensor(logits_after(prefix))[None]
        logprobs = processed_logprobs(logits, temperature=temperature, top_p=top_p, top_k=sampling.top_k)
        return logprobs[0].double().softmax(-1).numpy()

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


def sample(
    engine: Engine, sampling: SamplingConfig = SAMPLING, *, seed: int, config: LosslessnessConfig = CONFIG
) -> Sample:
    return draw(engine, PROMPTS, config=config, sampling=sampling, batch=24, seed=seed)


def verdict(engine: Engine, sampling: SamplingConfig = SAMPLING, config: LosslessnessConfig = CONFIG) -> str:
    record = certify(
        sample(engine, sampling, seed=1, config=config),
        sample(Engine(), sampling, seed=2, config=config),
        Policy(),
        config=config,
        sampling=sampling,
        subject=SUBJECT,
        started_s=0.0,
    )
    return record.verdict


def test_an_exact_speculative_engine_is_certified() -> None:
    assert verdict(Engine(k=3)) == LOSSLESS


def test_an_exact_engine_at_another_temperature_with_top_p_and_top_k_is_certified() -> None:
    assert verdict(Engine(k=3), SamplingConfig(temperature=0.7, top_p=0.9, top_k=8, max_response_tokens=20)) == LOSSLESS


def test_accepting_the_first_draft_token_always_is_seen() -> None:
    assert verdict(Engine(k=3, bias="accepts the first")) == BIASED


def test_sampling_at_another_temperature_is_seen() -> None:
    assert verdict(Engine(k=3, bias="temperature")) == BIASED


def test_ignoring_top_p_is_seen() -> None:
    assert verdict(Engine(k=3, bias="top_p"), SamplingConfig(top_p=0.9, max_response_tokens=20)) == BIASED


def test_too_few_tokens_certify_nothing() -> None:
    few = LosslessnessConfig(
        num_tokens=60, num_repeats=16, num_greedy_prompts=2, num_replications=10, max_detectable_bias=0.05
    )

    assert verdict(Engine(k=3), config=few) == TOO_WEAK


def test_positions_count_from_one_in_each_window_after_the_prefill() -> None:
    trace = Trace(
        prompt_token_ids=(1,), token_ids=(5, 6, 7, 8, 9), window_lengths=(1, 3, 1), policy_version=0, draft_version=0
    )

    assert positions(trace) == [0, 1, 2, 3, 1]


def test_an_exact_engine_fails_about_as_often_as_the_family_level_says() -> None:
    """400 families at a level of 10 %: 40 expected at most, and a broken test fails nearly all."""
    random = np.random.default_rng(0)
    rejected = 0
    for _ in range(400):
        draws = exact_draws(600, random)
        found = losslessness.conditional_tests(draws, seed=int(random.integers(2**31)))
        rejected += any(finding.reject for finding in losslessness.family(found, level=0.1))

    assert rejected <= 60


def test_more_tokens_find_smaller_biases() -> None:
    random = np.random.default_rng(3)
    small, large = (
        losslessness.detectable_bias(exact_draws(n, random), num_tests=5, config=CONFIG) for n in (500, 8000)
    )

    for few, many in zip(small, large, strict=True):
        assert few.alternative == many.alternative
        assert many.detectable_total_variation < 0.6 * few.detectable_total_variation


def exact_draws(num: int, random: np.random.Generator) -> losslessness.Draws:
    """Draws from their own conditionals, at four positions."""
    logits_NV = torch.tensor(random.normal(size=(num, VOCABULARY)) * 1.5)
    labels = torch.tensor([random.choice(VOCABULARY, p=p) for p in logits_NV.softmax(-1).numpy()])
    generator = torch.Generator().manual_seed(int(random.integers(2**31)))
    c = conditionals(logits_NV, labels, temperature=1.0, top_p=1.0, top_k=0, generator=generator).numpy().T
    return losslessness.Draws(
        mass_before=c[0],
        probability=c[1],
        logprob_mean=c[2],
        logprob_variance=c[3],
        position=random.integers(0, 4, size=num),
        sharper=losslessness.Bias(mass_before=c[4], probability=c[5], total_variation=c[6]),
        flatter=losslessness.Bias(mass_before=c[7], probability=c[8], total_variation=c[9]),
    )


def test_conditionals_of_three_tokens_by_hand() -> None:
    """p = (0.5, 0.3, 0.2); token 1 has 0.5 before it."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    generator = torch.Generator().manual_seed(0)

    row = conditionals(logits, torch.tensor([1]), temperature=1.0, top_p=1.0, top_k=0, generator=generator)[0]

    mean = 0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)
    variance = 0.5 * np.log(0.5) ** 2 + 0.3 * np.log(0.3) ** 2 + 0.2 * np.log(0.2) ** 2 - mean**2
    squares = np.array([0.25, 0.09, 0.04]) / 0.38
    assert row[:4].tolist() == pytest.approx([0.5, 0.3, mean, variance], abs=1e-6)
    assert float(row[6]) == pytest.approx(0.5 * np.abs(squares - [0.5, 0.3, 0.2]).sum(), abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_holds_it_and_top_k_the_k_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()

    nucleus = processed_logprobs(logits, temperature=1.0, top_p=0.6, top_k=0).exp()[0]
    first = processed_logprobs(logits, temperature=1.0, top_p=1.0, top_k=1).exp()[0]

    assert nucleus.tolist() == pytest.approx([0.625, 0.375, 0.0], abs=1e-6)
    assert first.tolist() == [1.0, 0.0, 0.0]


def test_a_token_that_cannot_be_drawn_has_no_place() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    generator = torch.Generator().manual_seed(0)

    row = conditionals(logits, torch.tensor([2]), temperature=1.0, top_p=0.6, top_k=0, generator=generator)[0]

    assert np.isnan(float(row[0]))
    assert float(row[1]) == 0.0


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.02, 0.04 times 3, 2, 1 are 0.03, 0.04, 0.04."""
    assert losslessness.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])


def test_chi_square_of_counts_by_hand() -> None:
    """Expected 50, 50: (60 - 50)^2 / 50 + (40 - 50)^2 / 50 = 4."""
    assert losslessness.count_test(np.array([60, 40]), np.array([0.5, 0.5])) == (pytest.approx(4.0), 1)


def test_rare_cells_are_pooled() -> None:
    """Expected 94, 3, 3: the last two make one cell of 6."""
    statistic, dof = losslessness.count_test(np.array([94, 6, 0]), np.array([0.94, 0.03, 0.03]))

    assert (statistic, dof) == (pytest.approx(0.0), 1)


def test_two_equal_samples_are_homogeneous() -> None:
    assert losslessness.homogeneity_test(np.array([30, 70]), np.array([30, 70])) == (pytest.approx(0.0), 1)
    statistic, _ = losslessness.homogeneity_test(np.array([60, 40]), np.array([40, 60]))
    assert statistic == pytest.approx(8.0)
