"""Names and units of results, number formats and the template environment of every page, terminal table and metric."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from slipstream.statistics import Estimate
from slipstream.types import STAGES, Arm, ArmLoop, arm_name

STAGE_LABELS = {stage: stage for stage in STAGES} | {"prepare": "prepare (refit)", "": "step (wall time)"}
"""Label of each stage, and under the empty name that of the whole step."""

WORKLOAD_LABELS = {"rl_zero": "RL-Zero", "rl_think": "RL-Think"}
POLICY_LABELS = {
    "start": "before RL",
    **{arm_name(arm, loop): arm_name(arm, loop).replace("_", ", ") for loop in ArmLoop for arm in Arm},
}
UNITS = {
    "x": "{:.2f}x",
    "reward": "{:.3f}",
    "reward difference": "{:+.3f}",
    "accuracy": "{:.3f}",
    "tokens": "{:.2f}",
    "tokens/s": "{:.0f}",
    "k": "{:.0f}",
    "h": "{:.2f}",
    "GPU h": "{:.1f}",
}
"""Format of a value by its unit."""


class Kind(NamedTuple):
    """Label and unit of a result."""

    label: str
    unit: str
    judged: str = ""  # kind of change that counts as drift, "relative" or "absolute"; empty: no drift check


def _by_arm(name: str, label: str, unit: str, loop: ArmLoop, judged: str = "absolute") -> dict[str, Kind]:
    """Return one `Kind` for each arm of the loop."""
    arms = [arm_name(arm, loop) for arm in Arm]
    return {f"{name}_{arm}": Kind(f"{label}, {POLICY_LABELS[arm]}", unit, judged) for arm in arms}


_IN_TURN, _OVERLAPPING = ArmLoop
_ACCURACY = ("validation", "validation accuracy", "accuracy")
KINDS = {
    "generation_speedup": Kind("generation speedup", "x", "relative"),
    "step_speedup": Kind("step speedup", "x", "relative"),
    "control_ratio": Kind("control (training, the same work in both arms)", "x"),
    "mean_acceptance_length": Kind("mean acceptance length", "tokens", "relative"),
    **_by_arm("tokens_per_s", "generated tokens a second", "tokens/s", _IN_TURN, "relative"),
    **_by_arm("asynchronous_step_speedup", "asynchronous step over the synchronous one", "x", _IN_TURN, "relative"),
    **_by_arm("reward", "reward", "reward", _IN_TURN),
    **_by_arm("reward_gain", "reward gained", "reward difference", _IN_TURN, ""),
    "reward_difference": Kind("reward, speculative - autoregressive", "reward difference", "absolute"),
    **_by_arm(*_ACCURACY, _IN_TURN),
    **_by_arm("reward", "reward", "reward", _OVERLAPPING),
    **_by_arm(*_ACCURACY, _OVERLAPPING),
    "validation_start": Kind(f"validation accuracy, {POLICY_LABELS['start']}", "accuracy"),
    "num_speculative_tokens": Kind("draft length", "k"),
    "hours": Kind("hours", "h"),
    "gpu_hours": Kind("GPU hours", "GPU h"),
}
"""Kinds of results, by metric name without `result/`."""


def seconds(value: float) -> str:
    """Format about three significant digits without an exponent: `0.004`, `0.53`, `4.10`, `87.0`, `151`."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def seconds_band(p10: float, p90: float) -> str:
    """Format two percentiles: `5.90 to 6.20`."""
    return f"{seconds(p10)} to {seconds(p90)}"


def percent(fraction: float) -> str:
    """Format `0.667` as `67 %`, with one decimal below 10 %."""
    return f"{100 * fraction:.0f} %" if fraction >= 0.0995 else f"{100 * fraction:.1f} %"


def speedup(value: float) -> str:
    """Format `1.77x`."""
    return f"{value:.2f}x"


def interval(estimate: Estimate, label: str = "") -> str:
    """Format the 95 % interval after `label`, or say why there is none."""
    if estimate.ci95 is None:
        return "too few steps, no interval"
    return f"{label}{estimate.ci95[0]:.2f} to {estimate.ci95[1]:.2f}"


def with_interval(estimate: Estimate, unit: str = "x") -> str:
    """Format `1.77x [1.60, 1.91]`, or `1.77x` without an interval, by a key of `UNITS`."""
    ends = ", ".join(UNITS[unit].format(end).rstrip("x") for end in estimate.ci95 or ())
    return UNITS[unit].format(estimate.value) + (f" [{ends}]" if ends else "")


def metrics_with_ends(name: str, estimate: Estimate) -> dict[str, float]:
    """Metrics of an estimate: `name`, and `name_low` and `name_high` if it has an interval."""
    ends = dict(zip(("low", "high"), estimate.ci95 or (), strict=False))
    return {name: estimate.value, **{f"{name}_{end}": value for end, value in ends.items()}}


def estimate_of(metrics: Mapping[str, float], name: str) -> Estimate | None:
    """Read back the metrics that `metrics_with_ends` wrote for `result/name`; None where they are missing."""
    value, low, high = (metrics.get(f"result/{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return None
    return Estimate(value=value, ci95=None if low is None or high is None else (low, high))


def count(value: int) -> str:
    """Format `4 882 176` with non-breaking spaces."""
    return f"{value:,}".replace(",", "\u00a0")


def render(template: str | Path, **context: Any) -> str:
    """Render a page's template, an absolute path or a name beside this module, with the style sheet as `style`."""
    here = Path(__file__).parent
    path = here / template
    environment = Environment(
        loader=FileSystemLoader([path.parent, here]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, seconds=seconds, percent=percent)
    return environment.get_template(path.name).render(style=Markup((here / "style.css").read_text()), **context)
