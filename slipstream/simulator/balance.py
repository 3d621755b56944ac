"""Predictions of a run's arms in an asynchronous loop, for every split of its GPUs or its two cores.

On two cores, engine and learner have one core each, which slows a stage by a factor that does not come from the
synchronous arms. Stages are overlapped step by step and then averaged, because a short update hides less of a long
rollout than the means suggest.

On GPUs the cost model is fitted to the run and scaled to each arm's generation time by one factor. The learner keeps
its measured efficiency on the GPUs that the engines of a split leave.

Legend: `D` samples of the slowdowns, the first one the medians, `S` steps; seconds are [D, S].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np

from slipstream.catalog import target_of
from slipstream.config import require
from slipstream.records.run import LayoutRecord, RunRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator import Array
from slipstream.simulator.observed import RunCalibration, calibrate_run, known_layout, run_setting
from slipstream.simulator.rollout import Trace, slowest_engine
from slipstream.simulator.settings import Prior, load_belief
from slipstream.simulator.step_cost import Bound, Learner, overlap, stagewise
from slipstream.types import Arm, LoopMode

_NUM_DRAWS = 200
_HALVINGS = 40
_MEASURED_LOG_SD = 0.03  # assumed noise of a slowdown that one run measured on a shared machine


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreSlowdowns:
    """Seconds of a stage on one core over its seconds on the cores of a synchronous step."""

    engine: Prior
    learner: Prior


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedArm:
    """Predicted seconds of one arm's mean step in an asynchronous loop; p10 to p90 covers the slowdowns' priors."""

    arm: Arm
    synchronous_step_s: float  # measured
    step_s: float
    step_p10_s: float
    step_p90_s: float
    exposed_s: float  # generation while the trainer waits
    hidden_s: float  # generation while the trainer works
    bound: Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class AsynchronousPrediction:
    """Predictions of all arms of a loop; only `synchronous_step_s` was measured in this run."""

    mode: LoopMode
    lag: int
    arms: tuple[PredictedArm, ...]
    sources: dict[str, str]  # sources of the slowdowns, by arm


def measured_slowdowns(synchronous: ArmRecord, asynchronous: ArmRecord) -> CoreSlowdowns | None:
    """Measure the slowdowns of an arm that ran in both loops; None if its asynchronous steps have no overlap record."""
    steps = asynchronous.timed_steps
    whole_s = [step.overlap.generation_s for step in steps if step.overlap is not None]
    if not steps or len(whole_s) < len(steps):
        return None
    alone = [step.times for step in synchronous.timed_steps]
    beside = [step.times for step in steps]
    measured = partial(Prior, log_sd=_MEASURED_LOG_SD, source="measured: the arm in both loops of this run")
    return CoreSlowdowns(
        engine=measured(median=fmean(whole_s) / fmean(times.generation_s for times in alone)),
        learner=measured(median=fmean(times.train_s for times in beside) / fmean(times.train_s for times in alone)),
    )


def predict_asynchronous(
    sync_arms: Sequence[ArmRecord],
    *,
    lag: int,
    mode: LoopMode,
    slowdowns: Mapping[Arm, CoreSlowdowns | None] | None = None,
) -> AsynchronousPrediction:
    """Predict each arm of `sync_arms` in an asynchronous loop on two cores, from the arm's measured stages.

    Args:
        slowdowns: measured slowdowns by arm; other arms take the priors.
    """
    believed = CoreSlowdowns(engine=load_belief("cores", "engine"), learner=load_belief("cores", "learner"))
    factors = {arm.arm: (slowdowns or {}).get(arm.arm) or believed for arm in sync_arms}
    sources = {arm.value: f"engine: {f.engine.source}; learner: {f.learner.source}" for arm, f in factors.items()}
    arms = [_predict(arm, factors[arm.arm], lag, mode) for arm in sync_arms]
    return AsynchronousPrediction(mode=mode, lag=lag, arms=tuple(arms), sources=sources)


def _predict(arm: ArmRecord, factors: CoreSlowdowns, lag: int, mode: LoopMode) -> PredictedArm:
    times = [step.times for step in arm.timed_steps]
    random = np.random.default_rng(0)
    beliefs = (factors.engine, factors.learner, load_belief("cores", "engine_fixed_share"))
    engine, learner, fixed_share = (_drawn(belief, random) for belief in beliefs)
    # Batch t + 1 is generated while step t trains; the last step is paired with the first batch.
    generated_s = engine * np.array([each.generation_s for each in (*times[1:], times[0])])
    trained_s = learner * np.array([each.train_s + each.logprob_s for each in times])
    bound_s, busy_s = generated_s, np.array([each.data_s for each in times]) + trained_s
    if mode is LoopMode.IN_FLIGHT:
        bound_s = _in_flight_s(bound_s, busy_s, lag, np.minimum(1.0, fixed_share))
    exposed_s = np.maximum(0.0, bound_s - busy_s)
    step_D = (np.array([each.prepare_s for each in times]) + busy_s + exposed_s).mean(axis=1)
    exposed = float(exposed_s[0].mean())
    by_lag = Bound.LAG if mode is LoopMode.IN_FLIGHT else Bound.DRAINED
    p10, p90 = np.percentile(step_D, [10, 90]).tolist()
    return PredictedArm(
        arm=arm.arm,
        synchronous_step_s=fmean(each.step_s for each in times),
        step_s=float(step_D[0]),
        step_p10_s=p10,
        step_p90_s=p90,
        exposed_s=exposed,
        hidden_s=max(0.0, float(np.minimum(bound_s, generated_s)[0].mean()) - exposed),
        bound=by_lag if (exposed_s[0] > 0).mean() > 0.5 else Bound.LEARNER,
    )


def _in_flight_s(drained_s: Array, busy_s: Array, lag: int, fixed_share: Array) -> Array:
    """Compute the shortest step of engines that are never drained, from the seconds of a drained batch.

    A fraction `fixed_share` of these is independent of the number of running sequences; the rest is proportional to the
    tokens. If a step generates a fraction u of the longest response, T(u) = drained (fixed u + 1 - fixed). The
    longest response must end within the lag, (1 + lag) T - busy >= T / u; the smallest such u gives the shortest step.
    """
    low, high = np.full_like(drained_s, 1.0 / (1 + lag)), np.ones_like(drained_s)
    for _ in range(_HALVINGS):
        share = 0.5 * (low + high)
        step_s = drained_s * (fixed_share * share + 1.0 - fixed_share)
        ends = step_s * (1 + lag - 1.0 / share) >= busy_s
        low, high = np.where(ends, low, share), np.where(ends, share, high)
    return drained_s * (fixed_share * high + 1.0 - fixed_share)


def _drawn(belief: Prior, random: np.random.Generator) -> Array:
    """Sample a prior, [D, 1]; the first sample is the median."""
    deviations = np.append(0.0, random.standard_normal(_NUM_DRAWS))[:, None]
    return belief.median * np.exp(belief.log_sd * deviations)


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRow:
    """Projection of one arm on one split: seconds of a step and of exposed generation."""

    arm: Arm
    generation: int
    training: int
    step_s: float
    exposed_s: float
    bound: Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRecord:
    """Projected splits of a run's machine."""

    unit: str  # "GPU" or "core"
    rows: tuple[BalanceRow, ...]

    def best(self, arm: Arm) -> BalanceRow:
        """Return the fastest split of an arm; among equals, the split with the fewest units for generation."""
        return min((row for row in self.rows if row.arm is arm), key=lambda row: (row.step_s, row.generation))


def balance(
    run: RunRecord, *, lag: int = 1, mode: LoopMode = LoopMode.IN_FLIGHT, gpus_per_node: int = 1
) -> BalanceRecord:
    """Predict the step of each synchronous arm on every split of the run's GPUs in whole engines.

    Args:
        gpus_per_node: list splits in whole nodes only, as `placement.generation_nodes` needs; 1 lists every split.
    """
    require(lag >= 1, "--lag", "must be >= 1", lag, "with a lag of 0 engines and learner share all GPUs")
    require(mode is not LoopMode.SYNCHRONOUS, "--mode", "must be asynchronous", mode.value)
    layout = known_layout(run)
    on_cores = target_of(layout.hardware) == "cpu"
    rows = _of_cores(run, lag, mode) if on_cores else _of_gpus(run, layout, lag, mode, gpus_per_node)
    return BalanceRecord(unit="core" if on_cores else "GPU", rows=tuple(rows))


def _of_cores(run: RunRecord, lag: int, mode: LoopMode) -> Iterator[BalanceRow]:
    """Predict the only split of two cores."""
    beside = {arm.arm: arm for arm in run.asynchronous}
    slowdowns = {arm.arm: measured_slowdowns(arm, beside[arm.arm]) for arm in run.arms if arm.arm in beside}
    predicted = predict_asynchronous(run.arms, lag=lag, mode=mode, slowdowns=slowdowns)
    for each in predicted.arms:
        step_s, exposed_s, bound = each.step_s, each.exposed_s, each.bound
        yield BalanceRow(arm=each.arm, generation=1, training=1, step_s=step_s, exposed_s=exposed_s, bound=bound)


def _of_gpus(
    run: RunRecord, layout: LayoutRecord, lag: int, mode: LoopMode, gpus_per_node: int
) -> Iterator[BalanceRow]:
    require(gpus_per_node >= 1, "--gpus-per-node", "must be >= 1", gpus_per_node)
    engine, total = layout.gpus_per_engine, layout.num_gpus
    found = calibrate_run(run.arms, run.tuning, run_setting(layout))
    splits = [gpus for gpus in range(engine, total, engine) if gpus % gpus_per_node == total % gpus_per_node == 0]
    rule = f"must leave a GPU for training beside an engine of {engine}, in nodes of {gpus_per_node}"
    require(bool(splits), "--run", rule, total)
    for arm in run.arms:
        measured = stagewise(fmean, [step.times for step in arm.timed_steps])
        learner = Learner(
            measured=measured,
            setting=found.setting,
            mean_tokens=found.mean_tokens,
            num_gpus=total - layout.generation_gpus,  # each stage was measured on the GPUs that it used
        )
        seconds = _measured_cost(found, arm.num_speculative_tokens, measured.generation_s)
        for gpus in splits:
            joined = overlap(
                learner.stages(found.setting, num_gpus=total - gpus, mean_tokens=found.mean_tokens),
                lengths=found.setting.lengths(found.mean_tokens),
                shape=found.setting.shape(gpus),
                lag=lag,
                seconds=seconds,
                mode=mode,
            )
            yield BalanceRow(
                arm=arm.arm,
                generation=gpus,
                training=total - gpus,
                step_s=joined.step.step_s,
                exposed_s=joined.step.generation_s,
                bound=joined.bound,
            )


def _measured_cost(found: RunCalibration, k: int, generation_s: float) -> Callable[[Trace], Array]:
    """Scale the fitted cost of an engine's spans with `k` draft tokens to a measured generation time."""
    model, accepted = found.ensemble.best.model(found.setting), found.profile.length(k)
    fitted_s = partial(model.span_s, k=k, tokens_per_iteration=accepted)
    slowest = slowest_engine(found.setting.lengths(found.mean_tokens), found.setting.shape())
    factor = generation_s / float(fitted_s(slowest).sum())
    return lambda trace: factor * fitted_s(trace)
