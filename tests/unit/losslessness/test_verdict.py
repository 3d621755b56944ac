"""The verdict on engines whose bias is known because it was made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.sampling import Sample, Subject, draw
from slipstream.losslessness.verdict import BIASED, LOSSLESS, TOO_WEAK, certify, judged
from slipstream.policy.conditionals import conditionals, processed_logprobs
from slipstream.rollout.config import SamplingConfig
from slipstream.rollout.engine import Trace
from slipstream.types import Prompt, VersionSpan

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

    def logits(self, prefix: Sequence[int]) -> NDArray[np.float64]:
        return logits_after(prefix)

    def conditionals(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], sampling: SamplingConfig, *, seed: int
    ) -> NDArray[np.float64]:
        places = [(s, i) for s, start in zip(sequences, prompt_lengths, strict=True) for i in range(start, len(s))]
        logits_NV = torch.tensor(np.stack([self.logits(s[:i]) for s, i in places]))
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
        logits_NV = torch.tensor(np.stack([self.logits(p) for p in prefixes]))
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


class Refitted(Engine):
    """After its fourth token a response goes on under version 1, whose logits are half of those before."""

    def _probabilities(self, prefix: Sequence[int], sampling: SamplingConfig) -> NDArray[np.float64]:
        p = super()._probabilities(prefix, sampling)
        if sampling.temperature == 0 or len(prefix) - 2 < 4:
            return p
        p = np.sqrt(p)
        return p / p.sum()

    def _one(self, prompt: Prompt, sampling: SamplingConfig, random: np.random.Generator) -> Trace:
        trace = super()._one(prompt, sampling, random)
        spans = [(0, min(4, len(trace.token_ids))), (1, len(trace.token_ids) - 4)]
        return replace(
            trace,
            versions=tuple(
                VersionSpan(policy_version=version, draft_version=0, num_tokens=num)
                for version, num in spans
                if num > 0
            ),
        )


class Later(Policy):
    """Version 1 of the policy."""

    def logits(self, prefix: Sequence[int]) -> NDArray[np.float64]:
        return super().logits(prefix) / 2


def findings_in_flight(*, of_version: int) -> list[str]:
    """Tests of the conditionals that reject, where those of the first policy are held against this version's tokens."""
    drawn = sample(Refitted(k=3), seed=1)
    record = certify(
        drawn,
        sample(Engine(), seed=2),
        Later(),
        config=CONFIG,
        sampling=SAMPLING,
        subject=SUBJECT,
        started_s=0.0,
        earlier={of_version: judged(drawn.traces, Policy(), sampling=SAMPLING, config=CONFIG)},
    )
    assert record.claim.endswith("each token is tested against the version that it carries.")
    return [finding.name for finding in record.findings if finding.reject and finding.name.startswith("pit")]


def test_tokens_of_two_versions_are_each_held_against_their_own() -> None:
    assert findings_in_flight(of_version=0) == []


def test_tokens_held_against_another_version_than_they_carry_are_seen() -> None:
    assert "pit, all tokens" in findings_in_flight(of_version=1)


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
