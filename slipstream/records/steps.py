"""Measurements of an arm's steps with the evaluations between them, and of the arm as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from slipstream.types import Arm, ArmLoop, LoopMode, StageTimes, arm_name

NUM_WARMUP_STEPS = 1
"""First steps of an arm, at least, that pay for first allocations and cold caches."""

_MAX_WARMUP_STEPS = 3
_NUM_COMPARED_STEPS = 12  # steps after the longest warm-up, with which warm-up steps are compared


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceStats:
    """Acceptance over some span of generation, from counter deltas (never from cumulative counters).

    `num_accepted_tokens` leaves the bonus token out; `mean_acceptance_length` = 1 + accepted / drafts counts it.
    `accepted_by_position[i]` is the number of times that the draft's token i (from 0) was accepted, and
    `rate_by_position[i]` this number over the drafts that had a token i: where drafts differ in length, fewer have the
    later tokens.
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
    """Decision of the autopilot of speculation for one step, and its cost."""

    speculates: bool
    is_probe: bool  # one step with the other choice, to measure it
    token_ms: float  # generation time over the generated tokens
    has_switched: bool = False  # the choice differs from that of the steps before


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitCheck:
    """Comparison after a refit: tensors of policy and draft, 0 where no full check was due."""

    num_tensors: int
    elapsed_s: float
    probe_difference: float | None = None  # nats a token; None: the engine shows the policy's tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Distance of the engine's logprobs from the learner's, over all response tokens of a step."""

    k1: float  # mean(rollout - trainer), an estimate of KL(rollout || trainer)
    k3: float  # mean(r - 1 - log r) with r = trainer / rollout probability: another one, never negative, less noisy
    mean: float  # absolute difference of a token's two logprobs
    largest: float
    outside_fraction: float  # share of tokens whose r lies outside the recipe's band


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStats:
    """Outcome of the updates of a step."""

    loss: float
    grad_norm: float  # before clipping
    kl: float  # to the reference policy, per token; 0 without one
    clip_fraction: float  # share of tokens whose gradient the clip cut off, or whose weight it changed
    num_tokens: int  # response tokens that enter the loss
    learning_rate: float
    entropy: float | None = None  # of the policy at the sampling temperature, nats a token; None: not recorded
    num_all_tokens: int | None = None  # response tokens with those that the loss leaves out; None: not recorded
    num_computed_tokens: int | None = None  # of prompts too; those that sequences share may count once; None: the same


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftDecision:
    """Decision about training the draft: it trains if `saved_s` is above `cost_s` and `lost_s` reaches `cost_s`."""

    trains: bool
    reason: str
    length: float  # recent mean acceptance length
    reference_length: float  # mean acceptance length that the draft is known to reach
    generation_s: float  # generation time of the step's rollouts
    saved_s: float  # generation time that the next steps would save if the draft reached that length again
    lost_s: float  # generation time lost since earlier trainings, less their cost
    cost_s: float | None  # time of training in one step; None: not measured yet


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftUpdate:
    """Training of the draft beside the policy, in one step."""

    loss: float  # sum over the TTT passes, mean over the updates
    num_updates: int
    elapsed_s: float  # part of the stage `train`


@dataclass(frozen=True, kw_only=True, slots=True)
class LagStats:
    """Tokens of a step that lag behind the trained policy by one same number of versions, and their correction.

    Ratios are trained policy / policy that sampled, for each token, before any cap.
    """

    lag: int  # 0: sampled by the version that is trained
    num_tokens: int
    ratio_mean: float
    ratio_max: float
    clipped_fraction: float  # share of tokens whose weight the cap or the band changed
    effective_sample_size: float  # (sum w)^2 / sum w^2 over the tokens, as a share of them; w after the correction


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Work beside the training of one step of an asynchronous loop.

    The exposed part of generation, in which training waited for rollouts, is the step's `times.generation_s`.
    """

    generation_s: float  # engine work between the end of the step before and that of this one
    hidden_s: float  # part of the engine work during which the learner worked
    engine_idle_fraction: float  # share of the step
    learner_idle_fraction: float
    score_s: float  # rewards, on their own thread
    exposed_score_s: float  # part of scoring in which training waited for nothing else
    publish_s: float  # time of the refit in learner and engines, with its check
    exposed_publish_s: float  # part of the refit for which training waited; equals `times.prepare_s`
    num_awaited: int = 0  # rollouts that training waited for because they would have exceeded the lag
    num_restarted: int = 0  # rollouts that were restarted because they exceeded the lag
    num_regenerated: int = 0  # rollouts that were lost with a process and generated again


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """Accuracy of one policy on a set of problems, `k` samples a problem."""

    policy: str  # "start", or the name of an arm
    num_problems: int
    k: int
    avg_at_k: float  # expected pass@1
    maj_at_k: float
    ci95: tuple[float, float] | None  # of avg_at_k over problems, by `reward_ci95`
    truncated_fraction: float
    num_timeouts: int
    prompt_hash: str
    correct_by_problem: tuple[float, ...]  # sum of the rewards of k samples: the correct ones where a reward is 0 or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineUse:
    """State of the trainer's machine over one step, or over several; None: not to be read there.

    Fractions of CPU time are of the cores that the trainer may run on. On a cluster other nodes are not read.
    """

    load: float | None  # processes that run or wait for a core or a disk, mean of the last minute
    other_cpu_fraction: float | None  # share of CPU time used by processes of others
    steal_fraction: float | None  # share of CPU time in which the host ran other machines
    memory_pressure_fraction: float | None  # share of the time in which at least one process waited for memory
    cpu_mhz: float | None  # mean over the cores, at the step's end
    sm_clock_mhz: float | None = None  # mean over the GPUs that are not idle, at the step's end
    throttle_reasons: tuple[str, ...] = ()  # the driver's reasons to throttle a GPU, at the step's end


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSampling:
    """Groups that a step sampled, and those of them that it trained on; one has signal if its rewards differ."""

    num_batches: int  # of prompts; 1: the step's own sufficed
    num_groups: int
    num_with_signal: int
    num_filled: int  # groups without signal that were trained on, because those with signal did not suffice
    num_surplus: int  # groups with signal that were left out, because the step had enough of them
    extra_generation_s: float  # generation time of all batches but the first, on the engines' clock

    @property
    def num_trained(self) -> int:
        """Groups that were trained on."""
        return self.num_with_signal - self.num_surplus + self.num_filled


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One GRPO step of one arm; rewards and counts of rollouts cover all that it sampled, trained on or not."""

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
    policy_version: int  # version of the policy that generated the rollouts
    draft_version: int | None  # version of the draft that proposed tokens for them
    refit: RefitCheck
    num_engine_restarts: int = 0  # lost engines; `times` includes their replacement, except in an evaluation
    engine_idle_fraction: float = 0.0  # share of the time of calls that generate; 0 for a single engine, but in flight
    has_logprob_pass: bool = True  # False: the stage was left out because the training pass gives the same logprobs
    draft_decision: DraftDecision | None = None  # None: the recipe does not train the draft during RL
    draft_update: DraftUpdate | None = None  # None: the draft stayed as it was
    autopilot: AutopilotStep | None = None  # None: it is off
    overlap: Overlap | None = None  # None: generation and training took turns
    lags: tuple[LagStats, ...] = ()  # youngest tokens first; empty: all tokens are of the trained version, uncorrected
    longest_response_tokens: int = 0  # 0: not recorded
    evaluation: EvaluationRecord | None = None  # of `policy_version`, outside `times`; None: none was due
    machine: MachineUse | None = None  # None: not recorded
    num_reward_failures: int = 0  # of a reward function, beside time-outs and crashes
    reward_metrics: dict[str, float] = field(default_factory=dict)  # means of what it returned beside the score
    rewards_by_prompt: tuple[float, ...] = ()  # mean reward of each prompt's rollouts; empty: not recorded
    num_preemptions: int = 0  # rollouts that made room in a full KV cache and were recomputed
    num_filtered: int = 0  # rollouts that were cut off and left out of the loss
    dynamic_sampling: DynamicSampling | None = None  # None: the step trains on all that it samples
    ended_at_s: float = 0.0  # in seconds since 1970; 0: not recorded


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
    machine: str = ""  # machine of the timed engines; empty: not recorded
    versions: dict[str, str] = field(default_factory=dict)  # package versions on that machine
    engine: dict[str, str] = field(default_factory=dict)  # what vLLM chose at its start; empty: not recorded
    loop: str = LoopMode.SYNCHRONOUS.value
    max_off_policy_steps: int = 0
    steps_a_turn: int = 0  # steps in its turn, while the other arms waited; 0: it ran alone
    num_warmup_steps: int = NUM_WARMUP_STEPS  # first steps that are left out of timing, as in `num_warmup`

    @property
    def name(self) -> str:
        """Name of its task, its policy and its results."""
        is_synchronous = self.loop == LoopMode.SYNCHRONOUS.value
        return arm_name(self.arm, ArmLoop.SYNCHRONOUS if is_synchronous else ArmLoop.ASYNCHRONOUS)

    @property
    def timed_steps(self) -> tuple[StepRecord, ...]:
        """Steps whose times count: all but the warm-up, unless there is nothing else."""
        return self.steps[self.num_warmup_steps :] or self.steps


def num_warmup(arms: Iterable[ArmRecord]) -> int:
    """Number of first steps that all of these arms leave out of timing: as many as the slowest to warm up needs.

    A step after the first is warm-up if it stands out from the twelve that follow the longest warm-up: if it is slower
    than the slowest but one of them, by a larger factor than that one is slower than the fastest. One slow step later
    changes nothing, and an arm with fewer than twelve such steps leaves out its first step alone.
    """
    return max((_own_warmup([step.times.step_s for step in arm.steps]) for arm in arms), default=NUM_WARMUP_STEPS)


def _own_warmup(seconds: Sequence[float]) -> int:
    compared = sorted(seconds[_MAX_WARMUP_STEPS:][:_NUM_COMPARED_STEPS])
    if len(compared) < _NUM_COMPARED_STEPS:
        return NUM_WARMUP_STEPS
    fastest, slow = compared[0], compared[-2]
    number = NUM_WARMUP_STEPS
    while number < _MAX_WARMUP_STEPS and seconds[number] * fastest > slow * slow:
        number += 1
    return number


def by_loop(arms: Iterable[ArmRecord]) -> tuple[tuple[ArmRecord, ...], tuple[ArmRecord, ...]]:
    """Split a run's arms into the synchronous ones and those of an asynchronous loop; all get the same warm-up."""
    given = tuple(arms)
    records = tuple(replace(arm, num_warmup_steps=num_warmup(given)) for arm in given)
    asynchronous = tuple(arm for arm in records if arm.name != arm.arm.value)
    return tuple(arm for arm in records if arm not in asynchronous), asynchronous
