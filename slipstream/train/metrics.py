"""Times of a step by stage, its overlap with generation, its record, and its metrics under their MLflow names."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, TypeVar

from slipstream.records.steps import EvaluationRecord, LagStats, MachineUse, Overlap, StepRecord
from slipstream.train.batch import Scored
from slipstream.train.machine_use import Counters, read_counters, use_between
from slipstream.types import STAGES, StageTimes

T = TypeVar("T")
Span = tuple[float, float]  # start and end, in seconds of one clock


@dataclass
class StageClock:
    """Wall time by stage. A stage may be entered more than once; stages never overlap."""

    now_s: Callable[[], float] = time.perf_counter
    read_counters: Callable[[], Counters] = read_counters
    _spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def __post_init__(self) -> None:
        self._counters = self.read_counters()
        self._started_s = self.now_s()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the block's wall time to the stage `name`."""
        start = self.now_s()
        try:
            yield
        finally:
            self._spent_s[name] += self.now_s() - start

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere to the stage `name`."""
        self._spent_s[name] += seconds

    def times(self) -> StageTimes:
        """Time spent in each stage so far, and the wall time since the clock started, measured on its own."""
        spent = {f"{name}_s": seconds for name, seconds in self._spent_s.items()}
        return StageTimes(**spent, step_s=self.now_s() - self._started_s)

    def machine_use(self) -> MachineUse:
        """Use of this machine since the clock started."""
        return use_between(self._counters, self.read_counters())


class Activity:
    """Spans in which one part of the training worked; while one thread records them, another may read them.

    Both change the lists by single calls, each of which the interpreter does as a whole, so no lock is needed.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._spans: list[list[float]] = []  # in order; the last one has no end while it goes on
        self._rests_s: list[float] = []

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Record the block as work."""
        span = [self._now_s(), math.inf]
        self._spans.append(span)
        try:
            yield
        finally:
            span[1] = self._now_s()

    def rested(self, seconds: float) -> None:
        """Deduct seconds from the last work: one of several engines had nothing to do."""
        self._rests_s.append(seconds)

    def take_rest(self) -> float:
        """Seconds deducted by `rested` since the last call."""
        taken = self._rests_s[:]
        del self._rests_s[: len(taken)]
        return sum(taken)

    def between(self, start_s: float, end_s: float) -> list[Span]:
        """Work between two times, of which the later is past, a span in progress included."""
        return common([(start, end) for start, end in self._spans[:]], [(start_s, end_s)])

    def forget(self, end_s: float) -> None:
        """Drop spans that ended before this time."""
        del self._spans[: sum(end <= end_s for _, end in self._spans[:])]


def total_s(spans: Sequence[Span]) -> float:
    """Total length of spans."""
    return sum(end - start for start, end in spans)


def common(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Spans in which those of both lists went on at once."""
    cuts = [(max(start, begin), min(end, stop)) for start, end in spans for begin, stop in others]
    return [(start, end) for start, end in cuts if end > start]


class Stopwatch:
    """Work of engines, scorer and learner in one step of an asynchronous loop, and the trainer's waits.

    A refit has a learner's part (`exporting`) and an engines' part (`delivery`), and delays training in two ways. Once
    the rollouts of a step are there, the rest of the export is a wait. While training waits for rollouts, it also waits
    for the delivery that came before them: without it they would have come that much sooner. `waited` tells both from
    the time of generation.

    The trainer's thread alone calls its methods and counts rollouts; other threads use the activities.
    """

    def __init__(self, *, num_regenerated: int = 0, now_s: Callable[[], float] = time.perf_counter) -> None:
        """Start; `num_regenerated` rollouts were lost with a process and are generated again."""
        self.engine, self.learner, self.score = Activity(now_s), Activity(now_s), Activity(now_s)
        self.delivery = Activity(now_s)
        self._now_s = now_s
        self._since_s = now_s()
        self._accounted_s = self._since_s  # deliveries until then are accounted for
        self._export: Span | None = None  # the step's export, until its rollouts are there
        self._export_s = self._exposed_publish_s = self._exposed_score_s = 0.0
        self.num_regenerated = num_regenerated
        self.num_awaited = self.num_restarted = 0

    def restart(self) -> None:
        """Leave out the time since the last `overlap`, in which another arm had its turn."""
        self._since_s = self._accounted_s = self._now_s()

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Record the block as the learner's export, with which a step begins."""
        start_s = self._now_s()
        yield
        self._export = start_s, self._now_s()
        self._export_s += total_s([self._export])

    def waited(self, clock: StageClock, wait: Callable[[], Sequence[Scored]]) -> Sequence[Scored]:
        """Wait for scored rollouts, and attribute the wait, with the export just before it, to stages.

        The wait until the engines had the rollouts is `generation`, without what the refit delayed them. That delay is
        `prepare`. The wait for their scores is `data`. Rollouts that are already there cost nothing.
        """
        now_s = self._now_s()
        export = self._export or (now_s, now_s)
        self._export = None
        start_s, exported_s = export
        scored = wait()
        end_s = self._now_s()
        generated_s = min(max((each.generated_s for each in scored), default=start_s), end_s)
        waited_s = max(0.0, generated_s - start_s)
        held_up_s = min(waited_s, self._publishing_s(export, generated_s))
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
        """Wait until the engines have the weights: `generation` while they still generate, `prepare` otherwise."""
        start_s = self._now_s()
        found = wait()
        waited = start_s, self._now_s()
        generation_s = total_s(self.engine.between(*waited))
        exposed_s = max(0.0, total_s([waited]) - generation_s)
        clock.add("generation", generation_s)
        clock.add("prepare", exposed_s)
        self._exposed_publish_s += exposed_s
        self._accounted_s = waited[1]
        return found

    def overlap(self) -> Overlap:
        """Summarize the work since the last call, or since the start."""
        start_s, end_s = self._since_s, self._now_s()
        engine, learner, score = (each.between(start_s, end_s) for each in (self.engine, self.learner, self.score))
        elapsed_s = max(end_s - start_s, 1e-9)
        worked_s = max(0.0, total_s(engine) - self.engine.take_rest())
        found = Overlap(
            generation_s=total_s(engine),
            hidden_s=total_s(common(engine, learner)),
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
        """Seconds in which engines took weights, or idled during the export, since the rollouts before."""
        since = self._accounted_s, end_s
        delivery, written = self.delivery.between(*since), common([export], [since])
        busy_s = total_s(common(written, [*delivery, *self.engine.between(*since)]))
        return total_s(delivery) + max(0.0, total_s(written) - busy_s)


def metrics_of(record: StepRecord) -> dict[str, float]:
    """Metrics of a step under their MLflow names."""
    metrics: dict[str, float] = {
        "rollout/response_tokens": record.num_response_tokens,
        "rollout/tokens_per_s": _tokens_per_s(record),
        "rollout/longest_response_tokens": record.longest_response_tokens,
        "rollout/truncated": record.num_truncated,
        "rollout/engine_restarts": record.num_engine_restarts,
        "rollout/preemptions": record.num_preemptions,
        "rollout/engine_idle_fraction": record.engine_idle_fraction,
        "train/reward": record.reward_mean,
        "train/reward_timeouts": record.num_reward_timeouts,
        "train/reward_crashes": record.num_reward_crashes,
        "train/reward_failures": record.num_reward_failures,
        **{f"reward/{name}": value for name, value in record.reward_metrics.items()},
        "train/zero_signal_groups": record.num_zero_signal_groups,
        "train/filtered_rollouts": record.num_filtered,
        "train/policy_version": record.policy_version,
    }
    for prefix, part, names in (
        ("time/", record.times, {}),
        ("train/", record.train, {"num_tokens": ""}),
        ("train/mismatch_", record.mismatch, {"k1": "kl", "largest": "max"}),
        ("refit/", record.refit, {"num_tensors": "num_checked_tensors", "elapsed_s": "check_s"}),
        ("spec/", record.autopilot, _AUTOPILOT_NAMES),
        ("sampling/", record.dynamic_sampling, _SAMPLING_NAMES),
        ("draft/", record.draft_decision, _DRAFT_NAMES),
        ("draft/", record.draft_update, {"num_updates": "", "elapsed_s": "train_s"}),
        ("overlap/", record.overlap, _OVERLAP_NAMES),
        ("machine/", record.machine, {}),
    ):
        metrics |= _numbers(prefix, part, names)
    if record.machine is not None and record.machine.sm_clock_mhz is not None:
        metrics["machine/throttled"] = float(bool(record.machine.throttle_reasons))
    if record.evaluation is not None:
        metrics |= accuracy_metrics(record.evaluation)
    if record.acceptance is not None:
        metrics["spec/mean_acceptance_length"] = record.acceptance.mean_acceptance_length
        metrics["spec/acceptance_rate"] = record.acceptance.acceptance_rate
        for position, rate in enumerate(record.acceptance.rate_by_position, start=1):
            metrics[f"spec/acceptance_rate_pos_{position}"] = rate
    if record.draft_decision is not None:
        metrics.setdefault("draft/train_s", 0.0)
        if record.draft_version is not None:
            metrics["draft/version"] = record.draft_version
    return metrics | _lag_metrics(record.lags)


# Names in MLflow where they differ from the record's; an empty one leaves the field out.
_AUTOPILOT_NAMES = {
    "speculates": "autopilot_speculates",
    "is_probe": "autopilot_probes",
    "token_ms": "",
    "has_switched": "",
}
_SAMPLING_NAMES = {
    "num_batches": "batches",
    "num_groups": "groups",
    "num_with_signal": "groups_with_signal",
    "num_filled": "groups_filled",
    "num_surplus": "groups_surplus",
}
_DRAFT_NAMES = {"trains": "trained", "generation_s": "", "saved_s": "expected_saved_s", "cost_s": "expected_cost_s"}
_OVERLAP_NAMES = {
    "hidden_s": "hidden_generation_s",
    "num_awaited": "awaited_rollouts",
    "num_restarted": "restarted_rollouts",
    "num_regenerated": "regenerated_rollouts",
}


def _numbers(prefix: str, part: Any, names: Mapping[str, str]) -> dict[str, float]:
    """Metrics of the numbers of a part of a record under its fields' names, or those in `names`."""
    values = {} if part is None else asdict(part)
    return {
        f"{prefix}{names.get(field, field)}": float(value)
        for field, value in values.items()
        if isinstance(value, int | float) and names.get(field, field)
    }


def accuracy_metrics(evaluation: EvaluationRecord) -> dict[str, float]:
    """Metrics of one policy's accuracy."""
    name = f"validation/avg_at_{evaluation.k}"
    return {
        name: evaluation.avg_at_k,
        **{f"{name}_{end}": value for end, value in zip(("low", "high"), evaluation.ci95 or (), strict=False)},
        f"validation/maj_at_{evaluation.k}": evaluation.maj_at_k,
        "validation/truncated_fraction": evaluation.truncated_fraction,
        "validation/num_timeouts": evaluation.num_timeouts,
    }


def _tokens_per_s(record: StepRecord) -> float:
    """Throughput of the engines while they worked, whether or not training waited for them."""
    generation_s = record.times.generation_s if record.overlap is None else record.overlap.generation_s
    return record.num_response_tokens / generation_s if generation_s > 0.0 else 0.0


def _lag_metrics(lags: Sequence[LagStats]) -> dict[str, float]:
    """Metrics of tokens that are corrected or off-policy: over all of them, and for each lag."""
    if not lags:
        return {}
    nums = [each.num_tokens for each in lags]
    metrics = {
        "offpolicy/lag_mean": fmean((each.lag for each in lags), nums),
        "offpolicy/lag_max": max(each.lag for each in lags),
        "offpolicy/ratio_mean": fmean((each.ratio_mean for each in lags), nums),
        "offpolicy/ratio_max": max(each.ratio_max for each in lags),
        "offpolicy/clipped_fraction": fmean((each.clipped_fraction for each in lags), nums),
        "offpolicy/effective_sample_size": fmean((each.effective_sample_size for each in lags), nums),
    }
    for each in lags:
        values = asdict(each)
        lag, num = values.pop("lag"), values.pop("num_tokens")
        metrics[f"offpolicy/tokens_fraction_lag_{lag}"] = num / sum(nums)
        metrics |= {f"offpolicy/{name}_lag_{lag}": value for name, value in values.items()}
    return metrics


def step_line(record: StepRecord, num_steps: int) -> str:
    """Line of the log about a step."""
    acceptance = "" if record.acceptance is None else f", AL {record.acceptance.mean_acceptance_length:.2f}"
    if record.autopilot is not None and not record.autopilot.speculates:
        acceptance = ", not drafted"
    more = "" if record.draft_update is None else f", draft trained in {record.draft_update.elapsed_s:.2f} s"
    if record.evaluation is not None:
        more += f"; after step {record.step} avg@{record.evaluation.k} was {record.evaluation.avg_at_k:.3f}"
    sampling = record.dynamic_sampling
    if sampling is not None and (sampling.num_batches > 1 or sampling.num_filled):
        signal = f"{sampling.num_with_signal} of {sampling.num_groups} groups in {sampling.num_batches} batches"
        more += f"; {signal} had signal"
        more += f", {sampling.num_filled} without it filled the step" if sampling.num_filled else ""
    return (
        f"step {record.step + 1}/{num_steps}, reward {record.reward_mean:.3f}, {record.times.step_s:.2f} s "
        f"(generation {record.times.generation_s:.2f} s, {_tokens_per_s(record):.0f} tokens/s){acceptance}{more}"
    )
