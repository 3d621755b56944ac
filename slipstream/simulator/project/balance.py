"""Which split of the GPUs (or of two cores) into generation and training a run's measured times suggest.

The cost model is fitted to the run and brought to each arm's own generation time by one factor; then every split in
whole engines is played with it, the learner at its measured efficiency on what is left. Only the heading's synchronous
steps are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from slipstream.config import require
from slipstream.records.run import LayoutRecord, RunRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator.cost import Array
from slipstream.simulator.cost.asynchronous_cost import overlap
from slipstream.simulator.cost.hardware import target_of
from slipstream.simulator.cost.learner_step import Learner, stagewise
from slipstream.simulator.cost.rollout import Trace, slowest_engine
from slipstream.simulator.fit.observed import RunCalibration, calibrate_run
from slipstream.simulator.project.asynchronous_projection import measured_slowdowns, predict_asynchronous
from slipstream.simulator.project.run_projection import known_layout, run_setting
from slipstream.types import Arm, LoopMode


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRow:
    """One arm on one split, projected: seconds of a step, and of its generation what the trainer waits for."""

    arm: Arm
    generation: int
    training: int
    step_s: float
    exposed_s: float
    bound: str  # `Bound`


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRecord:
    """All splits of a run's machine. The steps by arm are measured; everything in `rows` is projected."""

    unit: str  # what is split: "GPU" or "core"
    mode: LoopMode
    lag: int
    synchronous_step_s: dict[str, float]
    asynchronous_step_s: dict[str, float]  # of the run's own loop; empty where it had none
    rows: tuple[BalanceRow, ...]

    def best(self, arm: Arm) -> BalanceRow:
        """The fastest split for an arm; of equals the one with the fewest for generation."""
        return min((row for row in self.rows if row.arm is arm), key=lambda row: (row.step_s, row.generation))


def balance(
    run: RunRecord, *, lag: int = 1, mode: LoopMode = LoopMode.IN_FLIGHT, gpus_per_node: int = 1
) -> BalanceRecord:
    """The predicted step of every split of the run's GPUs in whole engines, for each of its synchronous arms.

    Args:
        gpus_per_node: splits in whole nodes alone, as `placement.generation_nodes` needs them; 1 lists them all.
    Raises:
        ConfigError: the run does not say on what it ran, its GPUs cannot be split, or the lag is below 1.
    """
    require(lag >= 1, "--lag", "must be >= 1", lag, "with a lag of 0 engines and learner share all GPUs")
    require(mode is not LoopMode.SYNCHRONOUS, "--mode", "must be asynchronous", mode.value)
    layout = known_layout(run)
    on_cores = target_of(layout.hardware) == "cpu"
    rows = _of_cores(run, lag, mode) if on_cores else _of_gpus(run, layout, lag, mode, gpus_per_node)
    return BalanceRecord(
        unit="core" if on_cores else "GPU",
        mode=mode,
        lag=lag,
        synchronous_step_s=_measured_s(run.arms),
        asynchronous_step_s=_measured_s(run.asynchronous),
        rows=tuple(rows),
    )


def _measured_s(arms: Sequence[ArmRecord]) -> dict[str, float]:
    return {arm.arm.value: fmean(step.times.step_s for step in arm.timed_steps) for arm in arms}


def _of_cores(run: RunRecord, lag: int, mode: LoopMode) -> Iterator[BalanceRow]:
    """Two cores have one split, and who is alone has both of them: what a run measured holds that already."""
    beside = {arm.arm: arm for arm in run.asynchronous}
    pairs = [(arm.arm, measured_slowdowns(arm, beside[arm.arm])) for arm in run.arms if arm.arm in beside]
    slowdowns = {arm: factors for arm, factors in pairs if factors is not None}
    predicted = predict_asynchronous(run.arms, lag=lag, mode=mode, slowdowns=slowdowns, idle_core_helps=not slowdowns)
    for each in predicted.arms:
        step_s, exposed_s, bound = each.step_s, each.exposed_s, each.bound.value
        yield BalanceRow(arm=each.arm, generation=1, training=1, step_s=step_s, exposed_s=exposed_s, bound=bound)


def _of_gpus(
    run: RunRecord, layout: LayoutRecord, lag: int, mode: LoopMode, gpus_per_node: int
) -> Iterator[BalanceRow]:
    require(gpus_per_node >= 1, "--gpus-per-node", "must be >= 1", gpus_per_node)
    engine, total = layout.gpus_per_engine, layout.num_gpus
    # Measured on the GPUs that each stage had.
    generating = replace(run_setting(layout), num_gpus=layout.generation_gpus or total)
    found = calibrate_run(run.arms, run.tuning, generating)
    training = replace(found.setting, num_gpus=total - layout.generation_gpus)
    splits = [gpus for gpus in range(engine, total, engine) if gpus % gpus_per_node == total % gpus_per_node == 0]
    rule = f"must leave a GPU for training beside an engine of {engine}, in nodes of {gpus_per_node}"
    require(bool(splits), "--run", rule, total)
    for arm in run.arms:
        measured = stagewise(fmean, [step.times for step in arm.timed_steps])
        learner = Learner(measured=measured, setting=training, mean_tokens=found.mean_tokens)
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
                bound=joined.bound.value,
            )


def _measured_cost(found: RunCalibration, k: int, generation_s: float) -> Callable[[Trace], Array]:
    """The fitted cost of an engine's spans with `k` draft tokens, brought to a measured generation time by a factor."""
    model, accepted = found.ensemble.best.model(found.setting), found.profile.length(k)
    fitted_s = partial(model.span_s, k=k, tokens_per_iteration=accepted)
    slowest = slowest_engine(found.setting.lengths(found.mean_tokens), found.setting.shape())
    factor = generation_s / float(fitted_s(slowest).sum())
    return lambda trace: factor * fitted_s(trace)
