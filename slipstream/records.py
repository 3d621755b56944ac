"""What each stage of the chain measured: plain, frozen records that tasks hand on as JSON and the report reads.

Seconds are wall time. Rates and fractions lie in [0, 1]. Nothing projected is ever put into these records.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config import from_mapping
from slipstream.types import Arm, ArmLoop, LoopMode, StageTimes, arm_name

R = TypeVar("R")
_READABLE = 0o644

NUM_WARMUP_STEPS = 1
"""First steps of an arm that pay for first allocations and cold caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceStats:
    """Acceptance over some span of generation, from counter deltas (never from cumulative counters).

    `num_accepted_tokens` leaves the bonus token out; `mean_acceptance_length` = 1 + accepted / drafts counts it.
    `accepted_by_position[i]` is how often the draft's token i (from 0) was accepted, and `rate_by_position[i]` that
    over the drafts that had a token i: where drafts differ in length, fewer have the later ones.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    mean_acceptance_length: float
    acceptance_rate: float
    rate_by_position: tuple[float, ...]
    drafted_by_position: tuple[int, ...] = ()  # drafts that had a token i; empty: not counted, all were of one length


@dataclass(frozen=True, kw_only=True, slots=True)
class AutopilotStep:
    """What the autopilot of speculation had a step do, and what that cost."""

    speculates: bool
    is_probe: bool  # one step of the other way, to measure it
    token_ms: float  # generation time over the generated tokens
    has_switched: bool = False  # to what this step does, from what those before it did


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitCheck:
    """What was compared after a refit: tensors of policy and draft, 0 where no full check was due."""

    num_tensors: int
    elapsed_s: float
    probe_difference: float | None = None  # nats a token; only of an engine that hides the policy's tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """How far the engine's logprobs are from the learner's, over all response tokens of a step."""

    k1: float  # mean(rollout - trainer), an estimate of KL(rollout || trainer)
    k3: float  # mean(r - 1 - log r) with r = trainer / rollout probability: another one, never negative, less noisy
    mean: float  # absolute difference of a token's two logprobs
    largest: float
    outside_fraction: float  # of tokens whose r lies outside the recipe's band


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStats:
    """What the updates of a step did."""

    loss: float
    grad_norm: float  # before clipping
    kl: float  # to the reference policy, per token; 0 without one
    clip_fraction: float  # of tokens whose gradient the clip cut off
    num_tokens: int  # response tokens
    learning_rate: float
    entropy: float | None = None  # of the policy at the sampling temperature, nats a token; None: not recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftDecision:
    """Whether a step trains the draft, and the inequality behind it: `saved_s` above `cost_s`."""

    trains: bool
    reason: str
    length: float  # recent mean acceptance length
    reference_length: float  # that this draft is known to reach
    saved_s: float  # of generation, expected over the next steps if the draft reaches it again
    cost_s: float | None  # of the training of one step; None: not measured yet


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftUpdate:
    """Training of the draft beside the policy, in one step."""

    loss: float  # mean over its updates, of the sum over the TTT passes
    num_updates: int
    elapsed_s: float  # part of the stage `train`


@dataclass(frozen=True, kw_only=True, slots=True)
class LagStats:
    """The tokens of a step that lag behind the trained policy by one same number of versions, and their correction.

    Ratios are trained policy / policy that sampled, of a token, before any cap.
    """

    lag: int  # 0: sampled by the version that is trained
    num_tokens: int
    ratio_mean: float
    ratio_max: float
    clipped_fraction: float  # of tokens whose weight the cap or the band changed
    effective_sample_size: float  # (sum w)^2 / sum w^2 over the tokens, as a share of them; w after the correction


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What went on beside the training of one step of an asynchronous loop.

    The exposed part of generation, in which training waited for rollouts, is the step's `times.generation_s`.
    """

    generation_s: float  # that the engines worked between the ends of the step before and of this one
    hidden_s: float  # of it, while the learner was at work
    engine_idle_fraction: float  # of the step
    learner_idle_fraction: float
    score_s: float  # rewards, on their own thread
    exposed_score_s: float  # of it, while training waited for them and for nothing else
    publish_s: float  # that new weights took: learner and engines, with the comparison of what arrived
    exposed_publish_s: float  # what training waited for it: `times.prepare_s` is the same
    num_restarted: int = 0  # rollouts that were started anew, for they had grown too old
    num_regenerated: int = 0  # rollouts that were lost with a process, and made again


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One GRPO step of one arm."""

    step: int  # from 0
    times: StageTimes
    reward_mean: float
    num_rollouts: int
    num_response_tokens: int
    num_truncated: int  # rollouts that ran into max_response_tokens
    num_reward_timeouts: int
    num_reward_crashes: int
    num_zero_signal_groups: int  # groups whose rewards are all equal: they teach nothing
    train: TrainStats
    mismatch: Mismatch
    acceptance: AcceptanceStats | None  # None in the autoregressive arm
    policy_version: int  # that generated the rollouts
    draft_version: int | None  # that proposed tokens for them
    refit: RefitCheck
    num_engine_restarts: int = 0  # engines lost and replaced; `times` holds what that took
    engine_idle_fraction: float = 0.0  # of the engines' time during generation; 0 for a single engine
    has_logprob_pass: bool = True  # False: the stage was left out, for the training pass gives the same logprobs
    draft_decision: DraftDecision | None = None  # None: the recipe does not train the draft during RL
    draft_update: DraftUpdate | None = None  # None: the draft stayed as it was
    autopilot: AutopilotStep | None = None  # None: it is off
    overlap: Overlap | None = None  # None: generation and training took turns
    lags: tuple[LagStats, ...] = ()  # the youngest tokens first; empty: all of the trained version, uncorrected
    longest_response_tokens: int = 0  # 0: not recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleEntry:
    """Use `num_speculative_tokens` while the running batch lies in [batch_from, batch_to]: vLLM's form."""

    batch_from: int
    batch_to: int
    num_speculative_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRecord:
    """One arm of GRPO training."""

    arm: Arm
    num_speculative_tokens: int  # 0 in the autoregressive arm; the largest of the schedule
    steps: tuple[StepRecord, ...]
    schedule: tuple[ScheduleEntry, ...] = ()  # k by running batch; empty: one k throughout
    machine: str = ""  # of the engines that were timed; empty: not recorded
    versions: dict[str, str] = field(default_factory=dict)  # where they were
    loop: str = LoopMode.SYNCHRONOUS.value
    max_off_policy_steps: int = 0

    @property
    def name(self) -> str:
        """What its task, its policy and its results are called."""
        is_synchronous = self.loop == LoopMode.SYNCHRONOUS.value
        return arm_name(self.arm, ArmLoop.SYNCHRONOUS if is_synchronous else ArmLoop.ASYNCHRONOUS)

    @property
    def timed_steps(self) -> tuple[StepRecord, ...]:
        """The steps whose times count: all but the warm-up, unless there is nothing else."""
        return self.steps[NUM_WARMUP_STEPS:] or self.steps


def by_loop(arms: Iterable[ArmRecord]) -> tuple[tuple[ArmRecord, ...], tuple[ArmRecord, ...]]:
    """The synchronous arms, and those of an asynchronous loop."""
    records = tuple(arms)
    asynchronous = tuple(arm for arm in records if arm.name != arm.arm.value)
    return tuple(arm for arm in records if arm not in asynchronous), asynchronous


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One draft length at one running batch: medians over the rounds, with their spread."""

    k: int
    batch: int
    generation_s: float
    generation_p10_s: float
    generation_p90_s: float
    num_repeats: int
    autoregressive_s: float  # of the k=0 runs in the same rounds
    speedup: float  # median over the rounds of k=0's seconds / this k's
    mean_acceptance_length: float  # 1.0 for k=0
    rate_by_position: tuple[float, ...]
    mean_response_tokens: float = 0.0  # of this k's runs; 0: not recorded
    autoregressive_response_tokens: float = 0.0  # of the k=0 runs in the same rounds
    longest_response_tokens: float = 0.0  # of a round, median over this k's, as its seconds; 0: not recorded
    autoregressive_longest_tokens: float = 0.0  # of the k=0 runs in the same rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningPoint:
    """One draft length while `batch_from` to `batch_to` rollouts run: medians over the rounds that came there.

    Measured on the engine's steps that computed no prompt.
    """

    k: int
    batch_from: int
    batch_to: int
    num_rounds: int
    num_steps: int
    token_ms: float  # for every running rollout to gain a token
    tokens_per_step: float  # of a rollout: 1 without a draft
    speedup: float | None  # geometric mean over the rounds of k=0's token_ms / this k's; None: k=0 never came there
    gain: float  # the same with the chosen k in the place of k=0; 1 where neither met the other nor both k=0
    gain_low: float  # lower end of its one-sided 99 % interval; 0 of a single round


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningRecord:
    """What tuning measured and chose; `chosen_k` 0 means that speculation lost.

    `schedule` says for every running batch which k was fastest there: `chosen_k`, unless others clearly were and the
    whole gains by them.
    """

    chosen_k: int
    reason: str
    points: tuple[SweepPoint, ...]
    schedule: tuple[ScheduleEntry, ...]
    running: tuple[RunningPoint, ...] = ()
    schedule_gain: float = 1.0  # generation time with the chosen k over that with the schedule, by these times
    machine: str = ""  # of the engines that were timed; empty: not recorded
    versions: dict[str, str] = field(default_factory=dict)  # where they were


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """Accuracy of one policy on a set of problems, `k` samples a problem."""

    policy: str  # "start", or the name of an arm
    num_problems: int
    k: int
    avg_at_k: float  # expected pass@1
    maj_at_k: float
    ci95: tuple[float, ...]  # (low, high) of avg_at_k, bootstrap over problems
    truncated_fraction: float
    num_timeouts: int
    prompt_hash: str
    correct_by_problem: tuple[int, ...]  # of k


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRecord:
    """The policy that the chain starts from."""

    model: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int
    pretrain_steps: int  # 0: taken as it is
    pretrain_loss: float
    pretrain_losses: tuple[float, ...]
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSetRecord:
    """One line of the data manifest. `num_read` = `num_kept` + the sum of the others."""

    name: str
    source: str
    num_read: int
    num_kept: int
    num_duplicates: int
    num_conflicting: int
    num_unparseable: int
    num_too_long: int
    num_held_out: int  # dropped because a validation set has the same problem


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRecord:
    """The draft. `heldout_rate_by_position[i]`: chance that draft token i is accepted given those before.

    One that was not trained here has no losses and no held-out acceptance, and `init` is "none"; one that is looked up
    has no parameters.
    """

    method: str
    init: str
    num_parameters: int
    num_training_tokens: int
    num_steps: int
    losses: tuple[float, ...]
    heldout_rate_by_position: tuple[float, ...]
    heldout_mean_acceptance_length: float | None  # None: not measured
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


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsRecord:
    """What `dtype: auto` of a recipe became on the machine that runs it, and why."""

    dtype: str
    reason: str
    float32_ms: float  # of one matrix product
    bfloat16_ms: float
    capabilities: tuple[str, ...]  # what torch, oneDNN and the processor say that they can do


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRecord:
    """On what a run ran, in the words of the simulator's data files (`configs/sim/`)."""

    model: str
    hardware: str
    precision: str  # of the engine
    learner_precision: str
    num_gpus: int
    gpus_per_engine: int
    max_response_tokens: int
    generation_gpus: int = 0  # of nodes of their own; 0: engines and learner share all GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftFinding:
    """One result beside the band of earlier executions."""

    name: str  # of the result
    value: float
    num_executions: int  # earlier ones that have it
    band: tuple[float, float] | None  # None: too few
    verdict: str  # within, above, below, or too few to say


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRecord:
    """An execution's results against those of the executions before it."""

    summary: str  # in a sentence; why nothing was compared, if nothing was
    executions: tuple[str, ...] = ()  # that it was compared with, the newest first
    false_alarm_rate: float = 0.0  # of a whole execution in which nothing drifted
    findings: tuple[DriftFinding, ...] = ()

    @property
    def outside(self) -> tuple[DriftFinding, ...]:
        """Results that lie outside their band."""
        return tuple(finding for finding in self.findings if finding.verdict in ("above", "below"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that the report of one workflow execution reads."""

    recipe: str
    workload: str
    execution: str
    tracking_uri: str
    versions: dict[str, str]
    machine: str
    policy: PolicyRecord
    data: tuple[DataSetRecord, ...]
    draft: DraftRecord
    tuning: TuningRecord
    arms: tuple[ArmRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    certificate: CertificateRecord
    numerics: NumericsRecord | None = None  # None: the recipe names its types
    layout: LayoutRecord | None = None  # None: the recipe names none, and the run is not projected from itself
    asynchronous: tuple[ArmRecord, ...] = ()  # the same arms in the recipe's asynchronous loop; empty: it has none


def write_record(record: Any, path: Path) -> Path:
    """Write `record` as JSON, atomically: readers see the old file or the new one, never a part."""
    assert is_dataclass(record)
    write_atomic(path, json.dumps(asdict(record), indent=1, allow_nan=False).encode())  # type: ignore[arg-type]
    return path


def read_record(cls: type[R], path: Path) -> R:
    """Read what `write_record` wrote.

    Raises:
        ConfigError: the file holds other fields than `cls`.
    """
    return from_mapping(cls, json.loads(path.read_text()), path.name)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to disk and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_READABLE)  # mkstemp's files are private; others look at a report too
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
