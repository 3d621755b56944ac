"""The losslessness certificate: what was tested, what was found, how small a bias would have been seen."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.records.steps import ScheduleEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One test of the losslessness certificate; `reject` is the family's corrected verdict."""

    name: str
    num_observations: int
    statistic: float
    p_value: float
    p_value_corrected: float
    reject: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Power:
    """Smallest bias, in total variation a token, that the tests find at this size with the stated power.

    A total variation of 1 says that not even the whole alternative would be seen.
    """

    alternative: str
    detectable_total_variation: float
    detectable_fraction: float  # of the tokens, each drawn from the biased policy


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyRecord:
    """Greedy decoding of both engines on the same prompts."""

    num_responses: int
    num_equal: int
    num_near_ties: int  # first difference between tokens closer than `near_tie_nats`
    largest_gap_nats: float  # of a first difference, under the policy; 0 without one
    near_tie_nats: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateRecord:
    """The losslessness certificate of one policy and draft in one engine."""

    verdict: str  # "lossless", "biased" or "too weak"
    reason: str
    claim: str
    family_level: float
    power: float
    max_detectable_bias: float
    num_speculative_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    num_tokens: int  # drawn by the speculative engine
    num_baseline_tokens: int
    findings: tuple[Finding, ...]
    control: tuple[Finding, ...]  # the autoregressive engine under the same tests; no part of the verdict
    detectable: tuple[Power, ...]
    greedy: GreedyRecord
    pit_histograms: dict[str, tuple[int, ...]]  # by position in the draft window
    policy_fingerprint: str
    draft_fingerprint: str
    versions: dict[str, str]
    elapsed_s: float
    schedule: tuple[ScheduleEntry, ...] = ()  # k by running batch; empty: one k throughout
