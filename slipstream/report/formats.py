"""How numbers are written, the same on the page and in the terminal."""

from __future__ import annotations

from slipstream.statistics import Estimate
from slipstream.types import Arm, ArmLoop, arm_name

STAGE_LABELS = {
    "data": "data",
    "prepare": "prepare (refit)",
    "generation": "generation",
    "logprob": "logprob",
    "train": "train",
}
WORKLOAD_LABELS = {"rl_zero": "RL-Zero", "rl_think": "RL-Think"}
POLICY_LABELS = {
    "start": "before RL",
    **{arm_name(arm, loop): arm_name(arm, loop).replace("_", ", ") for loop in ArmLoop for arm in Arm},
}


def seconds(value: float) -> str:
    """Three significant digits or so, never an exponent: `0.004`, `0.53`, `4.10`, `87.0`, `151`."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def percent(fraction: float) -> str:
    """`0.667` as `67 %`; one decimal below 10 %."""
    return f"{100 * fraction:.0f} %" if fraction >= 0.0995 else f"{100 * fraction:.1f} %"


def speedup(value: float) -> str:
    """`1.77x`."""
    return f"{value:.2f}x"


def interval(estimate: Estimate, label: str = "") -> str:
    """The 95 % interval after its `label`, or why there is none."""
    if estimate.ci95 is None:
        return "one timed step, no interval"
    return f"{label}{estimate.ci95[0]:.2f} to {estimate.ci95[1]:.2f}"


def speedup_with_interval(estimate: Estimate) -> str:
    """`1.77x [1.60, 1.91]`; without the interval where there is none."""
    ends = "" if estimate.ci95 is None else f" [{estimate.ci95[0]:.2f}, {estimate.ci95[1]:.2f}]"
    return f"{speedup(estimate.value)}{ends}"


def difference_with_interval(estimate: Estimate) -> str:
    """`+0.031 [-0.010, +0.072]`; without the interval where there is none."""
    ends = "" if estimate.ci95 is None else f" [{estimate.ci95[0]:+.3f}, {estimate.ci95[1]:+.3f}]"
    return f"{estimate.value:+.3f}{ends}"


def metrics_with_ends(name: str, estimate: Estimate) -> dict[str, float]:
    """The value as `name`, and the ends of its interval, if it has one, as `name_low` and `name_high`."""
    ends = dict(zip(("low", "high"), estimate.ci95 or (), strict=False))
    return {name: estimate.value, **{f"{name}_{end}": value for end, value in ends.items()}}


def count(value: int) -> str:
    """`4 882 176`, with gaps that no line breaks at."""
    return f"{value:,}".replace(",", "\u00a0")
