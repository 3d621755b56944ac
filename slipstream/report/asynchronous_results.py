"""What the asynchronous arms came to: in words, as metrics of the execution's run, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slipstream.records.run import RunRecord
from slipstream.report.asynchronous_arms import LoopArm, LoopComparison, compare_loops
from slipstream.report.formats import metrics_with_ends, percent, seconds, speedup, speedup_with_interval
from slipstream.report.summary import estimate_json
from slipstream.simulator.balance import AsynchronousPrediction
from slipstream.types import Arm

LEARNER_BOUND = 0.05
"""Where training waits for rollouts for less of the step than this, the learner bounds it."""

_LESS_TRAINING = 0.95
"""Training beside speculation that takes less than this share of the time without it is said to be faster."""


def bound_text(compared: LoopComparison) -> str:
    """What bounds the asynchronous step without speculation, and so what speculation can gain there; empty: unknown."""
    base = next((arm for arm in compared.asynchronous if arm.arm is Arm.AUTOREGRESSIVE), None)
    if base is None:
        return ""
    share = base.exposed_s / base.step_s
    waits = (
        f"without speculation training waits for rollouts {seconds(base.exposed_s)} s of a step of "
        f"{seconds(base.step_s)} s ({percent(share)})"
    )
    most = f"at most about {speedup(1 / (1 - share))} can be had of it"
    measured, drafting = _measured(compared), _drafting(compared)
    helped = "" if drafting is None else _helped(base, drafting)
    if share < LEARNER_BOUND:
        return (
            f"The learner bounds the asynchronous step: {waits}. Speculation shortens generation that is hidden behind "
            f"training already, so it gains nothing here but that wait: {most}{measured}.{helped}"
        )
    to = "" if drafting is None else f" to {seconds(drafting.exposed_s)} s"
    return (
        f"Generation bounds the asynchronous step: {waits}. Speculation shortens that wait{to}: "
        f"{most}{measured}.{helped}"
    )


def loop_metrics(record: RunRecord) -> dict[str, float]:
    """What the run's asynchronous arms came to, by name; empty without them."""
    compared = compare_loops(record)
    if compared is None:
        return {}
    metrics: dict[str, float] = {}
    if compared.speculation is not None:
        metrics |= metrics_with_ends("asynchronous_speculation_step_speedup", compared.speculation)
    for arm in compared.asynchronous:
        assert arm.over_synchronous is not None
        metrics |= metrics_with_ends(f"asynchronous_step_speedup_{arm.arm.value}", arm.over_synchronous)
        metrics |= {
            f"reward_{arm.name}": arm.reward_last_quarter,
            f"exposed_generation_s_{arm.name}": arm.exposed_s,
            f"hidden_generation_s_{arm.name}": arm.hidden_s,
            f"engine_idle_fraction_{arm.name}": arm.engine_idle_fraction,
            f"learner_idle_fraction_{arm.name}": arm.learner_idle_fraction,
            f"mean_lag_{arm.name}": arm.mean_lag,
        }
    return metrics


def loops_as_json(compared: LoopComparison, prediction: AsynchronousPrediction | None = None) -> dict[str, Any]:
    """What `report.json` holds of them; what is predicted stands apart."""
    return {
        "predicted": None if prediction is None else asdict(prediction),
        "bound": bound_text(compared),
        "speculation_step_speedup": estimate_json(compared.speculation),
        "arms": {
            arm.name: {
                **{name: value for name, value in asdict(arm).items() if name not in ("name", "arm", "step")},
                "arm": arm.arm.value,
                "step_wall_s": {f"{name}_s": value for name, value in asdict(arm.step).items()},
                "over_baseline": estimate_json(arm.over_baseline),
                "over_synchronous": estimate_json(arm.over_synchronous),
                "exposed_s": arm.exposed_s,
                "mean_lag": arm.mean_lag,
            }
            for arm in compared.arms
        },
    }


def _drafting(compared: LoopComparison) -> LoopArm | None:
    """The asynchronous arm that drafts, if there is one."""
    return next((arm for arm in compared.asynchronous if arm.num_speculative_tokens), None)


def _helped(base: LoopArm, drafting: LoopArm) -> str:
    """That training itself was faster beside engines that are done sooner, which is none of the wait."""
    before_s, after_s = base.stages_s["train"], drafting.stages_s["train"]
    if after_s >= _LESS_TRAINING * before_s:
        return ""
    return (
        f" Training itself takes {seconds(after_s)} s beside it instead of {seconds(before_s)} s, which is no part of "
        "that bound: where engines and learner share a host's cores, engines that are done sooner leave theirs to it."
    )


def _measured(compared: LoopComparison) -> str:
    if compared.speculation is None:
        return ""
    ratio = speedup_with_interval(compared.speculation)
    if _drafting(compared) is not None:
        return f"; measured: {ratio}"
    return f"; nothing was drafted here, so the ratio of both arms, {ratio}, shows the machine's noise"
