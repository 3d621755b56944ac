"""The draft's training during RL: what it took, and the decisions behind it over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from slipstream.records.run import RunRecord
from slipstream.records.steps import DraftDecision, StepRecord
from slipstream.report.canvas import ARM_COLOURS, HIGHLIGHT, INK, draw_svg
from slipstream.types import Arm


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTraining:
    """Of an arm whose recipe lets the draft learn beside the policy."""

    num_steps: int
    num_trained: int  # steps that trained the draft: each made another version of it
    elapsed_s: float
    share: float  # of the arm's time


def draft_training(record: RunRecord) -> DraftTraining | None:
    """What it took in the speculative arm; None where the draft was fixed."""
    steps = _decided(record)
    if not steps:
        return None
    spent_s = [step.draft_update.elapsed_s for step, _ in steps if step.draft_update is not None]
    return DraftTraining(
        num_steps=len(steps),
        num_trained=len(spent_s),
        elapsed_s=sum(spent_s),
        share=sum(spent_s) / sum(step.times.step_s for step, _ in steps),
    )


def decisions(record: RunRecord) -> str:
    """Acceptance with the steps that trained the draft, and both sides of the inequality, over steps."""
    steps = _decided(record)

    def draw(axes: Sequence[Axes]) -> None:
        _lengths(axes[0], steps)
        _inequality(axes[1], [(step.step, decision) for step, decision in steps])
        for ax in axes:
            ax.set_xlabel("step")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            ax.legend(loc="best")

    return draw_svg(2, 2.6, draw)


def _decided(record: RunRecord) -> list[tuple[StepRecord, DraftDecision]]:
    arms = [arm for arm in record.arms if arm.arm is Arm.SPECULATIVE]
    return [(step, step.draft_decision) for arm in arms for step in arm.steps if step.draft_decision is not None]


def _lengths(ax: Axes, steps: Sequence[tuple[StepRecord, DraftDecision]]) -> None:
    drafted = [(step.step, step.acceptance.mean_acceptance_length) for step, _ in steps if step.acceptance is not None]
    ax.plot(*zip(*drafted, strict=True), color=ARM_COLOURS[Arm.SPECULATIVE], label="of the step")
    places = [step.step for step, _ in steps]
    references = [decision.reference_length for _, decision in steps]
    ax.plot(places, references, color=INK, linewidth=0.9, linestyle="--", label="known to be reached")
    trained = [(step.step, decision.length) for step, decision in steps if decision.trains]
    if trained:
        ax.plot(*zip(*trained, strict=True), "o", color=HIGHLIGHT, markersize=4, label="draft trained, recent length")
    ax.set_title("Mean acceptance length")


def _inequality(ax: Axes, decided: Sequence[tuple[int, DraftDecision]]) -> None:
    places = [step for step, _ in decided]
    ax.plot(places, [each.saved_s for _, each in decided], color=ARM_COLOURS[Arm.SPECULATIVE], label="expected to save")
    ax.plot(places, [each.lost_s for _, each in decided], color=HIGHLIGHT, linewidth=0.9, label="lost since the last")
    costs = [(step, each.cost_s) for step, each in decided if each.cost_s is not None]
    if costs:
        ax.plot(*zip(*costs, strict=True), color=INK, linestyle="--", label="a training costs")
    ax.set_title("Seconds behind the decision")
    ax.set_ylim(bottom=0.0)
