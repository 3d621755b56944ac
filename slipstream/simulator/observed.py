"""Calibrations on measured generation times: those of arXiv 2604.26779, and those of a run.

A run is calibrated on its autoregressive arm and its sweep over k, never on the arm to predict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import log, sqrt
from statistics import fmean, median, pstdev

from slipstream.catalog import Precision, target_of
from slipstream.config import require
from slipstream.records.run import LayoutRecord, RunRecord
from slipstream.records.stages import SweepPoint, TuningRecord
from slipstream.records.steps import ArmRecord, StepRecord
from slipstream.simulator.calibration import AcceptanceProfile, Cell, Ensemble, Group, calibrate, fit_profile
from slipstream.simulator.iteration import Drafting
from slipstream.simulator.reference import WorkloadReference, read_reference, read_simulator_reference
from slipstream.simulator.rollout import Slots, level_of_longest, log_sd_reaching
from slipstream.simulator.settings import Setting, load_setting
from slipstream.simulator.step_cost import Learner, stagewise
from slipstream.types import Arm, StageTimes

PAPER_SETTING = "paper-8b"
_MEAN_LOG_SD = 0.7  # the paper does not publish the lengths of responses
_PAPER_LOG_SD = 0.04  # one run each, and speedups with two decimals
_OFFLINE = "EAGLE-3, DAPO, offline"  # the draft of the k = 3 cell
_CPU_SETTING = "cpu-2core"
_LEAST_LOG_SD = 0.05  # smallest spread of the lengths of a step's responses
_CELL_LOG_SD = 0.05  # noise of a median of few repeats on a shared machine
_P10_TO_P90 = 2.563  # distance in standard deviations of a normal distribution
_MEDIAN_OVER_MEAN = 1.2533  # standard error of a median over that of a mean: sqrt(pi / 2)
_SWEEP_MEAN_LOG_SD = 0.3  # uncertainty of a sweep's mean length if the sweep did not record tokens


def paper_cells() -> tuple[Cell, ...]:
    """Build the paper's 16 measured cells: 2 workloads x {AR, k = 3, 5, 7, n-gram, 3 other drafts}.

    AR, k = 3 and n-gram are published in seconds; the other cells divide the AR seconds by the published speedup.
    """
    workloads, ngram_s = read_reference().workloads, read_simulator_reference().ngram_generation_s
    return tuple(cell for name in workloads for cell in _of_workload(name, workloads[name], ngram_s[name]))


@cache
def calibrate_paper() -> Ensemble:
    """Fit the cost model to all cells of the paper."""
    return calibrate(load_setting(PAPER_SETTING), paper_cells())


def paper_learner() -> Learner:
    """Build the paper's learner, with the mean of each stage over the four measured steps."""
    setting = load_setting(PAPER_SETTING)
    mean = max(setting.mean_response_tokens.values())
    steps = [workload.times(arm) for workload in read_reference().workloads.values() for arm in Arm]
    measured = stagewise(lambda seconds: sum(seconds) / len(seconds), steps)
    return Learner(measured=measured, setting=setting, mean_tokens=mean)


def _of_workload(workload: str, published: WorkloadReference, ngram_s: float) -> Iterator[Cell]:
    setting = load_setting(PAPER_SETTING)
    group = Group(
        name=workload,
        shape=setting.shape(),
        mean_tokens=setting.mean_response_tokens[workload],
        mean_log_sd=_MEAN_LOG_SD,
        length_log_sd=setting.length_log_sd,
    )
    cell = partial(Cell, group=group, log_sd=_PAPER_LOG_SD)
    base_s, k = published.autoregressive.generation_s, published.num_speculative_tokens
    yield cell(label=f"{workload}, autoregressive", k=0, acceptance_length=1.0, generation_s=base_s)
    for number, entry in published.draft_lengths.items():
        label, length = f"{workload}, k = {number}", entry.mean_acceptance_length
        seconds = published.speculative.generation_s if number == k else base_s / entry.generation_speedup
        yield cell(label=label, k=number, acceptance_length=length, generation_s=seconds)
    for draft, entry in published.drafts.items():
        label, length = f"{workload}, {draft.removeprefix('EAGLE-3, ')}", entry.mean_acceptance_length
        own = cell(label=label, k=k, acceptance_length=length, generation_s=base_s / entry.generation_speedup)
        if draft == "n-gram":
            yield replace(own, drafting=Drafting.NGRAM, generation_s=ngram_s)
        elif draft != _OFFLINE:
            yield own


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRecord:
    """Predicted beside measured mean generation seconds of the speculative arm, which the calibration does not use."""

    k: int
    acceptance_length: float  # acceptance length of the sweep
    measured_s: float
    predicted_s: float
    predicted_p10_s: float
    predicted_p90_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RunCalibration:
    """Calibration of a run's machine on the run's measurements."""

    setting: Setting  # layout with the run's counts
    mean_tokens: float
    ensemble: Ensemble
    profile: AcceptanceProfile
    swept_ks: tuple[int, ...]  # draft lengths k >= 1 of the sweep
    step: StageTimes  # medians of the autoregressive arm
    check: CheckRecord | None  # None: the run has no speculative arm with k > 0


def calibrate_run(arms: Sequence[ArmRecord], tuning: TuningRecord | None, setting: Setting) -> RunCalibration:
    """Fit the cost model to the autoregressive arm and the sweep, and check it on the speculative arm.

    Args:
        setting: layout of the run; rollouts a step and a prompt, and the mean and spread of lengths, are counted in the
            arm.
    """
    base = _arm(arms, Arm.AUTOREGRESSIVE)
    require(base is not None, "run.arms", "must hold the autoregressive arm", [arm.arm.value for arm in arms])
    require(tuning is not None and bool(tuning.points), "run.tuning", "must hold a sweep over k", 0)
    assert base is not None and tuning is not None
    steps = base.timed_steps
    rollouts = sum(step.num_rollouts for step in steps)
    mean = sum(step.num_response_tokens for step in steps) / rollouts
    counted = replace(
        setting,
        num_rollouts=round(median(step.num_rollouts for step in steps)),
        group_size=_group_size(setting, steps[0]),
        length_log_sd=_length_log_sd(setting, steps, mean),
    )
    spread = counted.length_log_sd
    group = Group(name="grpo", shape=counted.shape(), mean_tokens=mean, mean_log_sd=0.0, length_log_sd=spread)
    cells = (_arm_cell("autoregressive arm", group, 0, 1.0, steps), *_sweep_cells(counted, mean, tuning.points))
    ensemble = calibrate(counted, cells)
    largest = max(point.batch for point in tuning.points)
    lengths = {p.k: p.mean_acceptance_length for p in tuning.points if p.k > 0 and p.batch == largest}
    require(bool(lengths), "run.tuning.points", "must hold a draft length k >= 1", sorted(lengths))
    return RunCalibration(
        setting=counted,
        mean_tokens=mean,
        ensemble=ensemble,
        profile=fit_profile(lengths),
        swept_ks=tuple(sorted({point.k for point in tuning.points if point.k > 0})),
        step=stagewise(median, [step.times for step in steps]),
        check=_check(arms, tuning, group, ensemble),
    )


def _group_size(setting: Setting, step: StepRecord) -> int:
    """Count the rollouts of a prompt, or take the setting's if the step does not say how many prompts it had."""
    return step.num_rollouts // len(step.rewards_by_prompt) if step.rewards_by_prompt else setting.group_size


def _length_log_sd(setting: Setting, steps: Sequence[StepRecord], mean: float) -> float:
    """Estimate the spread of one step's response lengths.

    The truncated fraction implies the spread over all steps, less the spread between steps. If none or most responses
    are truncated, the longest response of a step implies the spread.
    """
    rollouts = sum(step.num_rollouts for step in steps)
    truncated = sum(step.num_truncated for step in steps) / rollouts
    if not 0 < truncated < 0.5:
        return _spread_of(setting, mean, [step.longest_response_tokens for step in steps], rollouts // len(steps))
    limit = float(setting.max_response_tokens)
    pooled = log_sd_reaching(limit, level=1.0 - truncated, mean=mean, max_tokens=limit)
    between = pstdev(log(step.num_response_tokens / step.num_rollouts) for step in steps)
    return max(_LEAST_LOG_SD, sqrt(max(0.0, pooled**2 - between**2)))


def _spread_of(setting: Setting, mean: float, longest: Sequence[float], count: int) -> float:
    """Estimate the spread from the longest of `count` responses, or take the setting's if no length was recorded."""
    if not all(longest):
        return setting.length_log_sd
    level, limit = level_of_longest(count), float(setting.max_response_tokens)
    return max(_LEAST_LOG_SD, log_sd_reaching(fmean(longest), level=level, mean=mean, max_tokens=limit))


def _check(arms: Sequence[ArmRecord], tuning: TuningRecord, group: Group, ensemble: Ensemble) -> CheckRecord | None:
    arm = _arm(arms, Arm.SPECULATIVE)
    k = 0 if arm is None else arm.num_speculative_tokens
    if arm is None or k == 0 or len({entry.num_speculative_tokens for entry in arm.schedule}) > 1:
        return None  # the simulator models a single k during a rollout
    at_k = [point for point in tuning.points if point.k == k]
    require(bool(at_k), "run.tuning.points", f"must hold the speculative arm's k = {k}", k)
    nearest = min(at_k, key=lambda point: abs(point.batch - group.shape.num_rollouts))
    cell = _arm_cell("speculative arm", group, k, nearest.mean_acceptance_length, arm.timed_steps)
    band = ensemble.bands_s([cell])[0]
    return CheckRecord(
        k=k,
        acceptance_length=cell.acceptance_length,
        measured_s=cell.generation_s,
        predicted_s=float(ensemble.predict_s([cell])[0]),
        predicted_p10_s=band.p10,
        predicted_p90_s=band.p90,
    )


def _arm(arms: Sequence[ArmRecord], wanted: Arm) -> ArmRecord | None:
    return next((arm for arm in arms if arm.arm is wanted and arm.steps), None)


def _arm_cell(label: str, group: Group, k: int, length: float, steps: Sequence[StepRecord]) -> Cell:
    return Cell(
        label=label,
        group=group,
        k=k,
        acceptance_length=length,
        generation_s=fmean(step.times.generation_s for step in steps),
        log_sd=_CELL_LOG_SD,
    )


def _sweep_cells(setting: Setting, mean: float, points: Sequence[SweepPoint]) -> list[Cell]:
    """Build a cell for each point of a sweep, relative to the point's interleaved baseline, because machines drift."""
    by_batch = {batch: [point for point in points if point.batch == batch] for batch in {p.batch for p in points}}
    groups = {batch: _sweep_group(setting, mean, batch, of_batch) for batch, of_batch in by_batch.items()}
    cells = []
    for point in points:
        group, baseline_s = groups[point.batch], median(other.autoregressive_s for other in by_batch[point.batch])
        cells.append(
            Cell(
                label=f"{group.name}, k = {point.k}",
                group=group,
                k=point.k,
                acceptance_length=point.mean_acceptance_length,
                generation_s=baseline_s / _speedup(point) if point.k else baseline_s,
                log_sd=_CELL_LOG_SD if point.k else _baseline_log_sd(point),
                clock=f"{group.name}, k = 0" if point.k else "",
            )
        )
    return cells


def _baseline_log_sd(point: SweepPoint) -> float:
    """Estimate the noise of the median of a baseline's rounds from the spread of the rounds."""
    spread = log(point.generation_p90_s / point.generation_p10_s) / _P10_TO_P90
    return max(_CELL_LOG_SD, _MEDIAN_OVER_MEAN * spread / sqrt(point.num_repeats))


def _sweep_group(setting: Setting, mean: float, batch: int, points: Sequence[SweepPoint]) -> Group:
    """Describe the responses of a sweep at one batch size; the mean defaults to the arm's `mean` if not recorded.

    The sweep runs the engines of the arm. A group stays on one engine, so few groups leave some engines idle.
    """
    tokens = [point.autoregressive_response_tokens for point in points]
    longest = [point.autoregressive_longest_tokens for point in points]
    own_mean, log_sd = (fmean(tokens), 0.0) if all(tokens) else (mean, _SWEEP_MEAN_LOG_SD)
    shape = setting.shape()
    num_engines = min(shape.num_engines, max(1, batch // setting.group_size))
    return Group(
        name=f"sweep, batch {batch}",
        shape=replace(shape, num_rollouts=batch, num_engines=num_engines),
        mean_tokens=own_mean,
        mean_log_sd=log_sd,
        length_log_sd=_spread_of(setting, own_mean, longest, batch),
    )


def _speedup(point: SweepPoint) -> float:
    """Compute a point's speedup over its interleaved baseline for responses of equal length.

    k = 0 and k > 0 sample different responses to the same prompts. The longest response of a round sets its duration,
    so the correction uses the longest lengths where they were recorded, else the mean lengths.
    """
    counted = (
        (point.longest_response_tokens, point.autoregressive_longest_tokens),
        (point.mean_response_tokens, point.autoregressive_response_tokens),
    )
    own, baseline = next((pair for pair in counted if all(pair)), (1.0, 1.0))
    return point.speedup * own / baseline


def known_layout(run: RunRecord) -> LayoutRecord:
    """Return the layout of a run, or refuse one whose recipe does not name the simulator's model and hardware."""
    rule = "must be of a recipe that names its simulator.model and simulator.hardware"
    require(run.layout is not None, "--run", rule, run.recipe)
    assert run.layout is not None
    return run.layout


def run_setting(layout: LayoutRecord) -> Setting:
    """Build the setting of a run's engines; prompts and spread of lengths are assumed for the kind of machine."""
    base = load_setting(_CPU_SETTING if target_of(layout.hardware) == "cpu" else PAPER_SETTING)
    return replace(
        base,
        model=layout.model,
        hardware=layout.hardware,
        precision=Precision(layout.precision),
        learner_precision=Precision(layout.learner_precision),
        num_gpus=layout.generation_gpus or layout.num_gpus,
        gpus_per_engine=layout.gpus_per_engine,
        max_response_tokens=layout.max_response_tokens,
        slots=Slots.RESPONSE,  # as the loops of Slipstream; those of the published runs free slots by the group
    )
