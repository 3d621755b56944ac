"""Measurements of the stages around training: data, policy, draft, draft lengths, losslessness."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.records.steps import ScheduleEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One draft length at one running batch: medians over the rounds, with their spread."""

    k: int
    batch: int
    generation_s: float
    generation_p10_s: float
    generation_p90_s: float
    num_repeats: int
    autoregressive_s: float  # seconds of the k=0 runs in the same rounds
    speedup: float  # median over the rounds of k=0's seconds / this k's
    mean_acceptance_length: float  # 1.0 for k=0
    rate_by_position: tuple[float, ...]
    mean_response_tokens: float = 0.0  # of this k's runs; 0: not recorded
    autoregressive_response_tokens: float = 0.0  # of the k=0 runs in the same rounds
    longest_response_tokens: float = 0.0  # of a round, median over this k's, as its seconds; 0: not recorded
    autoregressive_longest_tokens: float = 0.0  # of the k=0 runs in the same rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningPoint:
    """One draft length while `batch_from` to `batch_to` rollouts run: medians over the rounds that reached that batch.

    Only engine steps that computed no prompt are measured.
    """

    k: int
    batch_from: int
    batch_to: int
    num_rounds: int
    num_steps: int
    token_ms: float  # time in which every running rollout gains a token
    tokens_per_step: float  # of a rollout: 1 without a draft
    speedup: float | None  # geometric mean over the rounds of k=0's token_ms / this k's; None: k=0 never came there
    gain: float  # the same with the chosen k in the place of k=0; 1 where neither met the other nor both k=0
    gain_low: float  # of the slowest rounds; 0 of a single round
    is_switched_off: bool = False  # k is 0, in an engine that has a draft and runs its first pass all the same


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPoint:
    """Drafts of one kind at the chosen k, beside those of the other kind in the same rounds."""

    sampling: str  # "probabilistic" or "greedy"
    batch: int
    generation_s: float
    generation_p10_s: float
    generation_p90_s: float
    num_repeats: int
    mean_acceptance_length: float
    gain: float  # median over the rounds of the probabilistic drafts' seconds / this kind's


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningRecord:
    """Measurements of tuning and its choice; `chosen_k` 0 means that no k pays throughout.

    `schedule` gives the k that was fastest at every running batch, or `chosen_k` throughout if it gains nothing.
    """

    chosen_k: int
    reason: str
    points: tuple[SweepPoint, ...]
    schedule: tuple[ScheduleEntry, ...]
    running: tuple[RunningPoint, ...] = ()
    schedule_gain: float = 1.0  # generation time with the chosen k over that with the schedule, as the sweep expects
    sampling: str = "probabilistic"  # of the arm's drafts, as in `draft.sampling`; nothing of drafts that are looked up
    samplings: tuple[SamplingPoint, ...] = ()  # both kinds at the chosen k; empty: the recipe names one
    machine: str = ""  # machine of the timed engines; empty: not recorded
    versions: dict[str, str] = field(default_factory=dict)  # package versions on that machine


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRecord:
    """The policy that the chain starts from."""

    model: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int
    pretrain_steps: int  # 0: the policy was not trained here
    pretrain_loss: float
    pretrain_losses: tuple[float, ...]
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSetRecord:
    """One line of the data manifest. `num_read` = `num_kept` + the sum of the other counts."""

    name: str
    source: str
    num_read: int
    num_kept: int
    num_duplicates: int
    num_conflicting: int
    num_unparseable: int
    num_too_long: int
    num_held_out: int  # dropped because a validation set has the same problem
    num_empty: int = 0  # problem that cannot be asked: blank, null, of another type, or refused by the chat template
    num_left_out: int = 0  # usable, but more than the source's weight admits


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRecord:
    """Draft of a run. `heldout_rate_by_position[i]` is the chance that draft token i is accepted given those before.

    A draft that was not trained here has no losses and no held-out acceptance, and its `init` is "none". A draft that
    looks tokens up has no parameters.
    """

    method: str
    init: str
    num_parameters: int
    num_training_tokens: int = 0
    num_steps: int = 0
    losses: tuple[float, ...] = ()
    heldout_rate_by_position: tuple[float, ...] = ()
    heldout_mean_acceptance_length: float | None = None  # None: not measured
    elapsed_s: float


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

    A fraction of 1 means that the tests would miss even the whole alternative: the total variation is then the largest
    that any sharper policy can have, the mean probability of all tokens but the likeliest, or 1 for a flatter one.
    """

    alternative: str
    detectable_total_variation: float
    detectable_fraction: float  # share of the tokens, each sampled from the biased policy


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
    """Losslessness certificate of one policy and draft in one engine."""

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
    num_tokens: int  # tokens that the speculative engine sampled
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
    lengths_by_position: dict[str, float] = field(default_factory=dict)  # mean acceptance length by place in sequences
    draft_sampling: str = "probabilistic"  # of the drafts, as in `draft.sampling`
