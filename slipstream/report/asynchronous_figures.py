"""The figures of the page's section on the asynchronous arms."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord
from slipstream.report.asynchronous_arms import LoopArm, LoopComparison
from slipstream.report.canvas import ARM_COLOURS, INK, STAGE_COLOURS, draw_svg
from slipstream.report.formats import POLICY_LABELS, seconds
from slipstream.statistics import moving_average

_LANE, _ARM_PITCH = 0.38, 1.0  # heights in the chart of a step's parts
_WAITING = "#f2f3f5"
_LEARNING = ("logprob", "train")


def step_lanes(compared: LoopComparison) -> str:
    """Engines and learner over the mean step of every arm: who works when, and who waits."""

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        longest = max(arm.step_s for arm in compared.arms)
        for row, arm in enumerate(compared.arms):
            place = row * _ARM_PITCH
            for start, width, colour in _engine_spans(arm):
                _span(ax, place, start, width, colour, longest)
            for start, width, colour in _learner_spans(arm):
                _span(ax, place + _LANE, start, width, colour, longest)
            text = f"{seconds(arm.step_s)} s"
            ax.text(arm.step_s + 0.01 * longest, place + _LANE / 2, text, va="center", fontweight="bold")
        ax.set_yticks(
            [row * _ARM_PITCH + lane for row in range(len(compared.arms)) for lane in (0.0, _LANE)],
            [label for arm in compared.arms for label in (f"{POLICY_LABELS[arm.name]}: engines", "learner")],
        )
        ax.set(xlabel="seconds, mean step", xlim=(0, 1.1 * longest))
        ax.invert_yaxis()
        ax.grid(visible=False)
        for stage, label in (("prepare", "data, refit"), ("generation", "generation"), ("train", "training")):
            ax.barh(0, 0, color=STAGE_COLOURS[stage], label=label)
        ax.barh(0, 0, color=_WAITING, edgecolor="#c4c9d1", label="waiting")
        figure = ax.get_figure(root=True)
        assert figure is not None
        figure.legend(loc="outside lower center", ncols=4, columnspacing=1.4, handlelength=1.0)

    return draw_svg(1, 0.72 * len(compared.arms) + 0.7, draw)


def loop_learning(record: RunRecord, compared: LoopComparison) -> str:
    """Reward of every arm over steps, and how far the tokens lag that the asynchronous ones were trained on."""

    def draw(axes: Sequence[Axes]) -> None:
        for arm in (*record.arms, *record.asynchronous):
            _rewards(axes[0], arm)
        axes[0].set(title="Mean reward of a step, moving average", xlabel="step")
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes[0].legend(loc="lower right")
        _lags(axes[1], compared.asynchronous)

    return draw_svg(2, 2.7, draw)


Span = tuple[float, float, str]
"""Start, width and colour of a part of a step, in seconds."""


def _learner_spans(arm: LoopArm) -> list[Span]:
    """Of the learner: data and refit, then the wait for rollouts and its work; the work first where both overlap."""
    stages = arm.stages_s
    first, wait = ("prepare", stages["data"] + stages["prepare"]), ("", arm.exposed_s)
    work = [(stage, stages[stage]) for stage in _LEARNING]
    order = [first, wait, *work] if arm.is_synchronous else [first, *work, wait]
    spans, start = [], 0.0
    for stage, width in order:
        spans.append((start, width, STAGE_COLOURS[stage] if stage else _WAITING))
        start += width
    return spans


def _engine_spans(arm: LoopArm) -> list[Span]:
    """The engines' step: idle before generation, at work while training waits, and while it does not."""
    before = arm.stages_s["data"] + arm.stages_s["prepare"]
    exposed, step = arm.exposed_s, arm.step_s
    hidden = min(arm.hidden_s, max(0.0, step - before - exposed))
    colour = STAGE_COLOURS["generation"]
    return [
        (0.0, before, _WAITING),
        (before, exposed + hidden, colour),
        (before + exposed + hidden, max(0.0, step - before - exposed - hidden), _WAITING),
    ]


def _span(ax: Axes, place: float, start: float, width: float, colour: str, longest: float) -> None:
    edge = "#c4c9d1" if colour == _WAITING else "white"
    ax.barh(place, width, left=start, height=0.9 * _LANE, color=colour, edgecolor=edge, linewidth=0.6)
    if width > 0.07 * longest:
        ink = INK if colour == _WAITING else "white"
        ax.text(start + width / 2, place, seconds(width), ha="center", va="center", color=ink, fontsize=7.5)


def _rewards(ax: Axes, arm: ArmRecord) -> None:
    values = [step.reward_mean for step in arm.steps]
    is_synchronous = arm.name == arm.arm.value
    ax.plot(
        [step.step for step in arm.steps],
        moving_average(values, max(1, len(values) // 6)),
        color=ARM_COLOURS[arm.arm],
        linestyle="-" if is_synchronous else "--",
        label=POLICY_LABELS[arm.name],
    )


def _lags(ax: Axes, arms: Sequence[LoopArm]) -> None:
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        total = sum(lag.num_tokens for lag in arm.lags)
        at = [lag.lag + (place - (len(arms) - 1) / 2) * width for lag in arm.lags]
        shares = [lag.num_tokens / total for lag in arm.lags]
        ax.bar(at, shares, width=0.92 * width, color=ARM_COLOURS[arm.arm], label=arm.arm.value)
    ax.set(title="Trained tokens by lag", xlabel="versions behind the policy that learned", ylim=(0, 1.08))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.legend(loc="best")
