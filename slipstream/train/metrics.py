"""Times of a step by stage and of what went on beside it, its record, and its metrics under their MLflow names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np

from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.update import Trained
from slipstream.records.steps import EvaluationRecord, LagStats, MachineUse, Mismatch, Overlap, RefitCheck, StepRecord
from slipstream.rewards.verifier import RewardResult
from slipstream.train.machine_use import Counters, read_counters, use_between
from slipstream.train.pending import Scored
from slipstream.types import STAGES, FinishReason, StageTimes

T = TypeVar("T")
Span = tuple[float, float]  # from and to, in seconds of one clock


@dataclass
class StageClock:
    """Wall time by stage; a stage may be entered more than once, stages never overlap."""

    now_s: Callable[[], float] = time.perf_counter
    read_counters: Callable[[], Counters] = read_counters
    _spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def __post_init__(self) -> None:
        self._counters = self.read_counters()
        self._started_s = self.now_s()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block's wall time to the stage `name`."""
        start = self.now_s()
        try:
            yield
        finally:
            self._spent_s[name] += self.now_s() - start

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere to the stage `name`."""
        self._spent_s[name] += seconds

    def times(self) -> StageTimes:
        """What was spent so far, and the wall time since the clock was made, measured on its own."""
        spent = {f"{name}_s": seconds for name, seconds in self._spent_s.items()}
        return StageTimes(**spent, step_s=self.now_s() - self._started_s)

    def machine_use(self) -> MachineUse:
        """Use of this machine since the clock was made."""
        return use_between(self._counters, self.read_counters())


class Activity:
    """Spans in which one part of the training worked. One thread works; another may ask meanwhile."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._since: float | None = None
        self._rest_s = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The block is work."""
        with self._lock:
            self._since = self._now_s()
        try:
            yield
        finally:
            with self._lock:
                assert self._since is not None
                self._spans.append((self._since, self._now_s()))
                self._since = None

    def rested(self, seconds: float) -> None:
        """Note that so much of the last work was none, for one of several engines had nothing to do."""
        with self._lock:
            self._rest_s += seconds

    def take_rest(self) -> float:
        """Seconds that were `rested` since the last call of this."""
        with self._lock:
            rest_s, self._rest_s = self._rest_s, 0.0
        return rest_s

    def between(self, start_s: float, end_s: float) -> list[Span]:
        """The work between two times, that which goes on included."""
        with self._lock:
            going_on = [] if self._since is None else [(self._since, self._now_s())]
            found = [_cut(span, start_s, end_s) for span in (*self._spans, *going_on)]
        return [span for span in found if span[1] > span[0]]

    def forget(self, end_s: float) -> None:
        """Drop what lies before this time."""
        with self._lock:
            self._spans = [span for span in self._spans if span[1] > end_s]


def total_s(spans: Sequence[Span]) -> float:
    """Their lengths together."""
    return sum(end - start for start, end in spans)


def common_s(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """How long both went on at once."""
    cuts = [_cut(span, *other) for span in spans for other in others]
    return sum(max(0.0, end - start) for start, end in cuts)


def _cut(span: Span, start_s: float, end_s: float) -> Span:
    return max(span[0], start_s), min(span[1], end_s)


class Stopwatch:
    """The work of engines, scorer and learner, and the trainer's waits; `overlap` gives a step's and starts the next.

    Publishing weights has a learner's part (`exporting`) and an engines' part (`delivery`), and so costs training time
    in two ways, which `waited` tells from the time that rollouts take to be generated. Once the rollouts of a step are
    there, what is left of the learner's part is a wait. And while training waits for rollouts, it waits for the
    engines' part too, which came before them: without it they would have been there that much sooner.

    All but the activities is called by the trainer alone, which counts rollouts into `num_awaited`, `num_restarted` and
    `num_regenerated`.
    """

    def __init__(self, *, num_regenerated: int = 0, now_s: Callable[[], float] = time.perf_counter) -> None:
        """Begin; `num_regenerated` rollouts are made again, for they were lost with a process."""
        self.engine, self.learner, self.score = Activity(now_s), Activity(now_s), Activity(now_s)
        self.delivery = Activity(now_s)
        self._now_s = now_s
        self._since_s = now_s()
        self._accounted_s = self._since_s  # what was delivered until then is accounted for
        self._export: Span | None = None  # of the step, until its rollouts are there
        self._export_s = self._exposed_publish_s = self._exposed_score_s = 0.0
        self.num_regenerated = num_regenerated
        self.num_awaited = self.num_restarted = 0

    def restart(self) -> None:
        """Leave out what lies between the last `overlap` and now: another arm had its turn, and nothing worked here."""
        self._since_s = self._accounted_s = self._now_s()

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """The block does the learner's part, as the first thing in a step."""
        start_s = self._now_s()
        yield
        self._export = start_s, self._now_s()
        self._export_s += total_s([self._export])

    def waited(self, clock: StageClock, wait: Callable[[], Sequence[Scored]]) -> Sequence[Scored]:
        """What the trainer waits for; with it the step's export, if there was one just before, is divided into stages.

        It counts as generation until the engines had the rollouts, but for what publication held those up, and as data
        afterwards, for they were scored; publication is `prepare`. What was there already costs nothing.
        """
        now_s = self._now_s()
        export = self._export or (now_s, now_s)
        self._export = None
        start_s, exported_s = export
        scored = wait()
        end_s = self._now_s()
        generated_s = min(max((each.generated_s for each in scored), default=start_s), end_s)
        waited_s = max(0.0, generated_s - start_s)
        held_up_s = min(waited_s, self._publishing_s(export, generated_s)) if waited_s else 0.0
        exposed_s = held_up_s + max(0.0, exported_s - max(start_s, generated_s))
        score_s = end_s - max(exported_s, generated_s)
        clock.add("prepare", exposed_s)
        clock.add("generation", waited_s - held_up_s)
        clock.add("data", score_s)
        self._exposed_publish_s += exposed_s
        self._exposed_score_s += score_s
        self._accounted_s = max(generated_s, self._accounted_s)
        return scored

    def delivered(self, clock: StageClock, wait: Callable[[], T]) -> T:
        """What the trainer waits for until the engines have its weights: `prepare`, but while they still generated."""
        start_s = self._now_s()
        found = wait()
        waited = start_s, self._now_s()
        generation_s = common_s([waited], self.engine.between(*waited))
        exposed_s = max(0.0, total_s([waited]) - generation_s)
        clock.add("generation", generation_s)
        clock.add("prepare", exposed_s)
        self._exposed_publish_s += exposed_s
        self._accounted_s = waited[1]
        return found

    def generated_s(self) -> float:
        """How long the engines have worked since the last call of `overlap`."""
        return total_s(self.engine.between(self._since_s, self._now_s()))

    def overlap(self) -> Overlap:
        """What went on since the last call of this, or the beginning."""
        start_s, end_s = self._since_s, self._now_s()
        engine, learner, score = (each.between(start_s, end_s) for each in (self.engine, self.learner, self.score))
        elapsed_s = max(end_s - start_s, 1e-9)
        worked_s = max(0.0, total_s(engine) - self.engine.take_rest())
        found = Overlap(
            generation_s=total_s(engine),
            hidden_s=common_s(engine, learner),
            engine_idle_fraction=max(0.0, 1.0 - worked_s / elapsed_s),
            learner_idle_fraction=max(0.0, 1.0 - total_s(learner) / elapsed_s),
            score_s=total_s(score),
            exposed_score_s=self._exposed_score_s,
            publish_s=self._export_s + total_s(self.delivery.between(start_s, end_s)),
            exposed_publish_s=self._exposed_publish_s,
            num_awaited=self.num_awaited,
            num_restarted=self.num_restarted,
            num_regenerated=self.num_regenerated,
        )
        for each in (self.engine, self.learner, self.score):
            each.forget(end_s)
        self.delivery.forget(self._accounted_s)
        self._since_s = end_s
        self._export_s = self._exposed_publish_s = self._exposed_score_s = 0.0
        self.num_awaited = self.num_regenerated = self.num_restarted = 0
        return found

    def _publishing_s(self, export: Span, end_s: float) -> float:
        """How long engines took weights, or stood still while the learner wrote them, since the rollouts before."""
        delivery = self.delivery.between(self._accounted_s, end_s)
        written = max(export[0], self._accounted_s), min(export[1], end_s)
        if written[1] <= written[0]:
            return total_s(delivery)
        busy_s = common_s([written], [*delivery, *self.engine.between(*written)])
        return total_s(delivery) + max(0.0, total_s([written]) - busy_s)


def step_record(
    step: int,
    times: StageTimes,
    refit: RefitCheck,
    *,
    result: GenerationResult,
    rewards: RewardResult,
    trained: Trained,
    mismatch: Mismatch,
    has_logprob_pass: bool,
) -> StepRecord:
    """The record of one step; its versions are those of the first rollout's first token."""
    rollouts = [rollout for group in result.groups for rollout in group.rollouts]
    rewards_PG = np.asarray(rewards.rewards).reshape(len(result.groups), -1)
    return StepRecord(
        step=step,
        times=times,
        reward_mean=float(rewards_PG.mean()),
        num_rollouts=len(rollouts),
        num_response_tokens=sum(len(rollout.token_ids) for rollout in rollouts),
        num_truncated=sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts),
        num_reward_timeouts=rewards.num_timeouts,
        num_reward_crashes=rewards.num_crashes,
        num_zero_signal_groups=int((rewards_PG == rewards_PG[:, :1]).all(axis=1).sum()),
        train=trained.stats,
        mismatch=mismatch,
        acceptance=result.acceptance,
        policy_version=rollouts[0].policy_version,
        draft_version=rollouts[0].draft_version,
        refit=refit,
        num_engine_restarts=result.num_engine_restarts,
        engine_idle_fraction=result.engine_idle_fraction,
        has_logprob_pass=has_logprob_pass,
        draft_update=trained.draft,
        autopilot=result.autopilot,
        longest_response_tokens=max(len(rollout.token_ids) for rollout in rollouts),
        rewards_by_prompt=tuple(rewards_PG.mean(axis=1).tolist()),
    )


def metrics_of(record: StepRecord) -> dict[str, float]:
    """A step's metrics under their MLflow names."""
    seconds = record.times.by_stage()
    metrics: dict[str, float] = {f"time/{stage}_s": seconds[stage] for stage in STAGES}
    metrics |= {
        "time/step_s": record.times.step_s,
        "rollout/response_tokens": record.num_response_tokens,
        "rollout/tokens_per_s": _tokens_per_s(record),
        "rollout/longest_response_tokens": record.longest_response_tokens,
        "rollout/truncated": record.num_truncated,
        "rollout/engine_restarts": record.num_engine_restarts,
        "rollout/engine_idle_fraction": record.engine_idle_fraction,
        "train/reward": record.reward_mean,
        "train/reward_timeouts": record.num_reward_timeouts,
        "train/reward_crashes": record.num_reward_crashes,
        "train/zero_signal_groups": record.num_zero_signal_groups,
        "train/loss": record.train.loss,
        "train/grad_norm": record.train.grad_norm,
        "train/kl": record.train.kl,
        "train/clip_fraction": record.train.clip_fraction,
        "train/learning_rate": record.train.learning_rate,
        "train/mismatch_kl": record.mismatch.k1,
        "train/mismatch_k3": record.mismatch.k3,
        "train/mismatch_mean": record.mismatch.mean,
        "train/mismatch_max": record.mismatch.largest,
        "train/mismatch_outside_fraction": record.mismatch.outside_fraction,
        "refit/num_checked_tensors": record.refit.num_tensors,
        "refit/check_s": record.refit.elapsed_s,
        "train/policy_version": record.policy_version,
    }
    if record.train.entropy is not None:
        metrics["train/entropy"] = record.train.entropy
    if record.refit.probe_difference is not None:
        metrics["refit/probe_difference"] = record.refit.probe_difference
    if record.autopilot is not None:
        metrics["spec/autopilot_speculates"] = float(record.autopilot.speculates)
        metrics["spec/autopilot_probes"] = float(record.autopilot.is_probe)
    if record.evaluation is not None:
        metrics |= accuracy_metrics(record.evaluation)
    if record.acceptance is not None:
        metrics["spec/mean_acceptance_length"] = record.acceptance.mean_acceptance_length
        metrics["spec/acceptance_rate"] = record.acceptance.acceptance_rate
        for position, rate in enumerate(record.acceptance.rate_by_position, start=1):
            metrics[f"spec/acceptance_rate_pos_{position}"] = rate
    metrics |= _draft_metrics(record) | _lag_metrics(record.lags) | _overlap_metrics(record.overlap)
    return metrics | _machine_metrics(record.machine)


def accuracy_metrics(evaluation: EvaluationRecord) -> dict[str, float]:
    """Metrics of the accuracy of one policy."""
    name = f"aime24/avg_at_{evaluation.k}"
    low, high = evaluation.ci95
    return {
        name: evaluation.avg_at_k,
        f"{name}_low": low,
        f"{name}_high": high,
        f"aime24/maj_at_{evaluation.k}": evaluation.maj_at_k,
        "aime24/truncated_fraction": evaluation.truncated_fraction,
        "aime24/num_timeouts": evaluation.num_timeouts,
    }


def _tokens_per_s(record: StepRecord) -> float:
    """Throughput of the engines while they worked, whether training waited for them or not."""
    generation_s = record.times.generation_s if record.overlap is None else record.overlap.generation_s
    return record.num_response_tokens / generation_s if generation_s > 0.0 else 0.0


_OVERLAP_NAMES = {
    "hidden_s": "hidden_generation_s",
    "num_awaited": "awaited_rollouts",
    "num_restarted": "restarted_rollouts",
    "num_regenerated": "regenerated_rollouts",
}  # in MLflow; other fields are called as in the record


def _overlap_metrics(overlap: Overlap | None) -> dict[str, float]:
    """Metrics of a step beside which rollouts were generated."""
    if overlap is None:
        return {}
    return {f"overlap/{_OVERLAP_NAMES.get(name, name)}": value for name, value in asdict(overlap).items()}


def _machine_metrics(use: MachineUse | None) -> dict[str, float]:
    """Metrics of the machine that the step ran on, as far as it shows its state."""
    if use is None:
        return {}
    found = {f"machine/{name}": value for name, value in asdict(use).items() if isinstance(value, float)}
    return found if use.sm_clock_mhz is None else {**found, "machine/throttled": float(bool(use.throttle_reasons))}


def _draft_metrics(record: StepRecord) -> dict[str, float]:
    """Metrics of a draft that may be trained during RL: its decision, that inequality, and the update."""
    decision, update = record.draft_decision, record.draft_update
    if decision is None:
        return {}
    metrics = {
        "draft/trained": float(decision.trains),
        "draft/length": decision.length,
        "draft/reference_length": decision.reference_length,
        "draft/expected_saved_s": decision.saved_s,
        "draft/lost_s": decision.lost_s,
        "draft/train_s": 0.0 if update is None else update.elapsed_s,
    }
    if record.draft_version is not None:
        metrics["draft/version"] = record.draft_version
    if decision.cost_s is not None:
        metrics["draft/expected_cost_s"] = decision.cost_s
    if update is not None:
        metrics["draft/loss"] = update.loss
    return metrics


def _lag_metrics(lags: Sequence[LagStats]) -> dict[str, float]:
    """Metrics of tokens that are corrected, or older than the policy: over all of them, and for each lag."""
    if not lags:
        return {}
    num_tokens = sum(each.num_tokens for each in lags)

    def mean(values: Iterable[float]) -> float:
        return sum(value * each.num_tokens for value, each in zip(values, lags, strict=True)) / num_tokens

    metrics = {
        "offpolicy/lag_mean": mean(each.lag for each in lags),
        "offpolicy/lag_max": max(each.lag for each in lags),
        "offpolicy/ratio_mean": mean(each.ratio_mean for each in lags),
        "offpolicy/ratio_max": max(each.ratio_max for each in lags),
        "offpolicy/clipped_fraction": mean(each.clipped_fraction for each in lags),
        "offpolicy/effective_sample_size": mean(each.effective_sample_size for each in lags),
    }
    for each in lags:
        metrics |= {
            f"offpolicy/tokens_fraction_lag_{each.lag}": each.num_tokens / num_tokens,
            f"offpolicy/ratio_mean_lag_{each.lag}": each.ratio_mean,
            f"offpolicy/ratio_max_lag_{each.lag}": each.ratio_max,
            f"offpolicy/clipped_fraction_lag_{each.lag}": each.clipped_fraction,
            f"offpolicy/effective_sample_size_lag_{each.lag}": each.effective_sample_size,
        }
    return metrics


def step_line(record: StepRecord, num_steps: int) -> str:
    """A step in words, for the log."""
    acceptance = "" if record.acceptance is None else f", AL {record.acceptance.mean_acceptance_length:.2f}"
    if record.autopilot is not None and not record.autopilot.speculates:
        acceptance = ", not drafted"
    more = "" if record.draft_update is None else f", draft trained in {record.draft_update.elapsed_s:.2f} s"
    if record.evaluation is not None:
        more += f"; after step {record.step} avg@{record.evaluation.k} was {record.evaluation.avg_at_k:.3f}"
    return (
        f"step {record.step + 1}/{num_steps}, reward {record.reward_mean:.3f}, {record.times.step_s:.2f} s "
        f"(generation {record.times.generation_s:.2f} s, {_tokens_per_s(record):.0f} tokens/s){acceptance}{more}"
    )
