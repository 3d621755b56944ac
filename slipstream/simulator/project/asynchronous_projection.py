"""The asynchronous arms of a run on two cores, engine and learner on one each, from its synchronous arms.

A stage takes longer on one core than on the two that it has in a synchronous run: by how much are the only figures that
do not come from the synchronous arms. Stages are joined step by step, then averaged: a long rollout beside a short
update is not hidden by a short rollout beside a long one. Legend: `D` draws of the factors,
the first one the medians, `S` steps; seconds are [D, S].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from slipstream.config import require
from slipstream.records.steps import ArmRecord
from slipstream.simulator.cost import Array
from slipstream.simulator.cost.asynchronous_cost import Bound
from slipstream.simulator.cost.parameters import Prior, load_belief
from slipstream.types import Arm, LoopMode

_NUM_DRAWS = 200
_HALVINGS = 40
_MEASURED_LOG_SD = 0.03  # assumed noise of a factor that one run measured, on a shared machine


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreSlowdowns:
    """What a stage takes on a core of its own, over what it takes on the cores of a synchronous step."""

    engine: Prior
    learner: Prior


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedArm:
    """One arm in an asynchronous loop, seconds of a mean step; p10 to p90 is what the factors leave open."""

    arm: Arm
    synchronous_step_s: float  # measured, the input
    step_s: float
    step_p10_s: float
    step_p90_s: float
    exposed_s: float  # of generation: the trainer waits
    hidden_s: float  # of generation: the trainer is at work
    bound: Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class AsynchronousPrediction:
    """All arms of a loop. Nothing in it but `synchronous_step_s` was measured in this run."""

    mode: LoopMode
    lag: int
    idle_core_helps: bool
    arms: tuple[PredictedArm, ...]
    sources: dict[str, str]  # of each arm's factors


def believed_slowdowns() -> CoreSlowdowns:
    """The factors before any asynchronous step was measured."""
    return CoreSlowdowns(engine=load_belief("cores", "engine"), learner=load_belief("cores", "learner"))


def measured_slowdowns(synchronous: ArmRecord, asynchronous: ArmRecord) -> CoreSlowdowns | None:
    """The factors of an arm that ran in both loops; None where the asynchronous one did not record its overlap."""
    steps = asynchronous.timed_steps
    whole_s = [step.overlap.generation_s for step in steps if step.overlap is not None]
    if not steps or len(whole_s) < len(steps):
        return None
    alone = [step.times for step in synchronous.timed_steps]
    beside = [step.times for step in steps]
    return CoreSlowdowns(
        engine=_measured(fmean(whole_s) / fmean(times.generation_s for times in alone)),
        learner=_measured(fmean(times.train_s for times in beside) / fmean(times.train_s for times in alone)),
    )


def predict_asynchronous(
    sync_arms: Sequence[ArmRecord],
    *,
    lag: int,
    mode: LoopMode,
    slowdowns: Mapping[Arm, CoreSlowdowns] | None = None,
    has_logprob_pass: bool = True,
    idle_core_helps: bool = False,
) -> AsynchronousPrediction:
    """Each arm of `sync_arms` in an asynchronous loop on two cores, from its measured stages.

    Args:
        slowdowns: of the arms that measured theirs; the others take `believed_slowdowns`.
        has_logprob_pass: False leaves the stage out, as an asynchronous loop with one update a step does.
        idle_core_helps: who is ready first lends its core to the other.
    Raises:
        ConfigError: the mode is synchronous, or the lag is below 1.
    """
    require(mode is not LoopMode.SYNCHRONOUS, "mode", "must be asynchronous", mode.value)
    require(lag >= 1, "lag", "must be >= 1", lag)
    factors = {arm.arm: (slowdowns or {}).get(arm.arm) or believed_slowdowns() for arm in sync_arms}
    sources = {arm.value: f"engine: {f.engine.source}; learner: {f.learner.source}" for arm, f in factors.items()}
    arms = [_predict(arm, factors[arm.arm], lag, mode, has_logprob_pass, idle_core_helps) for arm in sync_arms]
    return AsynchronousPrediction(
        mode=mode, lag=lag, idle_core_helps=idle_core_helps, arms=tuple(arms), sources=sources
    )


def _predict(
    arm: ArmRecord, factors: CoreSlowdowns, lag: int, mode: LoopMode, has_logprob_pass: bool, helps: bool
) -> PredictedArm:
    times = [step.times for step in arm.timed_steps]
    random = np.random.default_rng(0)
    beliefs = (factors.engine, factors.learner, load_belief("cores", "engine_fixed_share"))
    engine, learner, fixed_share = (_drawn(belief, random) for belief in beliefs)
    # Batch t + 1 is generated while step t trains; the last step has none that follows.
    generated_s = engine * np.array([each.generation_s for each in (*times[1:], times[0])])
    trained_s = learner * np.array([each.train_s + (each.logprob_s if has_logprob_pass else 0.0) for each in times])
    bound_s, busy_s = generated_s, np.array([each.data_s for each in times]) + trained_s
    if mode is LoopMode.IN_FLIGHT:
        bound_s = _in_flight_s(bound_s, busy_s, lag, np.minimum(1.0, fixed_share))
    if helps:
        bound_s, busy_s = _helped_s(bound_s, busy_s, engine), _helped_s(busy_s, bound_s, learner)
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
    """Shortest step of engines that are never drained, from the seconds of a drained batch.

    A drained batch of `drained_s` seconds has `fixed_share` of them whatever runs at once, the rest in proportion to
    its tokens. If in a step the engine advances by a share u of the longest response, T(u) = drained (fixed u + 1 -
    fixed), and that response must end in its window, (1 + lag) T - busy >= T / u: the smallest such u is the best.
    """
    low, high = np.full_like(drained_s, 1.0 / (1 + lag)), np.ones_like(drained_s)
    for _ in range(_HALVINGS):
        share = 0.5 * (low + high)
        step_s = drained_s * (fixed_share * share + 1.0 - fixed_share)
        ends = step_s * (1 + lag - 1.0 / share) >= busy_s
        low, high = np.where(ends, low, share), np.where(ends, share, high)
    return drained_s * (fixed_share * high + 1.0 - fixed_share)


def _helped_s(own_s: Array, other_s: Array, factor: Array) -> Array:
    """Seconds of a stage that has both cores once the other one is done."""
    return np.where(own_s > other_s, other_s + (own_s - other_s) / np.maximum(1.0, factor), own_s)


def _drawn(belief: Prior, random: np.random.Generator) -> Array:
    """Draws [D, 1] of a belief, the first one its median."""
    deviations = np.append(0.0, random.standard_normal(_NUM_DRAWS))[:, None]
    return belief.median * np.exp(belief.log_sd * deviations)


def _measured(factor: float) -> Prior:
    return Prior(median=factor, log_sd=_MEASURED_LOG_SD, source="measured: the arm in both loops of this run")
