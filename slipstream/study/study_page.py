"""Tables of a study as plain text, and the study's self-contained HTML page with its figure and failures."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from markupsafe import Markup
from matplotlib.axes import Axes

from slipstream.records.files import write_atomic, write_record
from slipstream.report.claims import ClaimKind
from slipstream.report.figures import ARM_COLOURS, INK, LOSS, draw_svg, errors
from slipstream.report.formats import WORKLOAD_LABELS, render, speedup, with_interval
from slipstream.simulator.reference import DraftReference, read_reference
from slipstream.study.ranking import Row, StudyRecord, equals_first, loses, verdict
from slipstream.study.variants import TUNED, Setting, Study
from slipstream.types import Arm
from slipstream.workers.placement.plan import table

_WORDS = {
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "draft_model": "small model",
    "ngram": "n-gram",
    "suffix": "suffix",
    "history": "earlier answers",
    "mtp": "MTP",
    "in_domain": "the task's prompts",
    "general": "general prompts",
    "from_hub": "a given draft, the task's prompts",
    "always": "trained every step",
    "when_stale": "trained when stale",
}
"""Display names of a drafter's method, prompts and training in RL."""
_PUBLISHED = {
    "ngram-off": "n-gram",
    "eagle3-general-off": "EAGLE-3, UltraChat + Magpie, offline",
    "eagle3-general-always": "EAGLE-3, UltraChat + Magpie, online",
    "eagle3-in_domain-off": "EAGLE-3, DAPO, offline",
    "eagle3-in_domain-always": "EAGLE-3, DAPO, online",
}
"""Published draft comparable to each drafter; general prompts were UltraChat and Magpie, in-domain ones DAPO."""
_ROW_HEIGHT_IN = 0.34
_WIDTH = 120  # characters a line of notes in a terminal

Cell = Callable[[StudyRecord, Row], str]


def label(record: StudyRecord, setting: Setting) -> str:
    """Name a drafter, or an ablation's setting by the axes in which settings differ."""
    if setting.online is not None:
        return ", ".join(_WORDS[part] for part in (setting.method, setting.init, setting.online) if part in _WORDS)
    settings = {variant.setting for variant in record.variants}
    shown = {
        "workload": WORKLOAD_LABELS[setting.workload.value],
        **{axis: str(getattr(setting, axis) or "") for axis in ("init", "method", "loss")},
    }
    words = [text for axis, text in shown.items() if text and len({getattr(other, axis) for other in settings}) > 1]
    length = f"k {setting.num_speculative_tokens or TUNED}"
    return ", ".join([*words, length]) if words or len(settings) > 1 else setting.name


def _seeds(record: StudyRecord, row: Row) -> str:
    """Number of seeds with a result; with the number of all seeds where one failed."""
    number = len({variant.seed for variant in record.variants})
    return str(number) if len(row.outcomes) == number else f"{len(row.outcomes)} of {number}"


def _seconds(value: float, digits: int) -> str:
    return f"{value:.{digits}f} s" if value else "-"


def _repaid(_: StudyRecord, row: Row) -> str:
    """Number of steps whose savings add up to the time of pretraining."""
    (outcome,) = row.outcomes
    if not outcome.pretraining_s:
        return "-"
    return f"{outcome.pretraining_s / outcome.saved_s:.0f} steps" if outcome.saved_s > 0 else "never"


def _published(form: Callable[[DraftReference], str]) -> Cell:
    """Return a cell that quotes the comparable published draft for the workload of the same name."""

    def cell(_: StudyRecord, row: Row) -> str:
        drafts = read_reference().workloads[row.setting.workload.value].drafts
        draft = drafts.get(_PUBLISHED.get(row.setting.name, ""))
        return "-" if draft is None else form(draft)

    return cell


COLUMNS: dict[str, Cell] = {
    "rank": lambda _, row: str(row.rank),
    "setting": lambda record, row: label(record, row.setting),
    "drafter": lambda record, row: label(record, row.setting),
    "k": lambda _, row: ", ".join(map(str, sorted(set(row.lengths)))),  # `5, 7` where seeds tuned to different k
    "seeds": _seeds,
    "step speedup": lambda _, row: with_interval(row.step),
    "generation speedup": lambda _, row: with_interval(row.generation),
    "step time / first": lambda _, row: "-" if row.behind is None else with_interval(row.behind),
    "control": lambda _, row: "-" if row.control is None else with_interval(row.control),
    "reward - AR": lambda _, row: with_interval(row.reward_difference, "reward difference"),
    "acceptance length": lambda _, row: f"{row.mean_acceptance_length:.2f}",
    "AL": lambda _, row: f"{row.mean_acceptance_length:.2f}",
    "AL, first to last": lambda _, row: " to ".join(f"{length:.2f}" for length in row.outcomes[0].ends),
    "pretraining": lambda _, row: _seconds(row.outcomes[0].pretraining_s, 0),
    "repaid after": _repaid,
    "training a step": lambda _, row: _seconds(row.outcomes[0].training_s, 2),
    "paper: acceptance length": _published(lambda draft: f"{draft.mean_acceptance_length:.2f}"),
    "paper: generation speedup": _published(lambda draft: speedup(draft.generation_speedup)),
    "verdict": lambda _, row: verdict(row),
}
_RANKED = ("rank", "setting", "k", "seeds", "step speedup", "generation speedup", "control")
TABLES: dict[Study, tuple[tuple[str, ...], ...]] = {
    Study.ABLATION: ((*_RANKED, "step time / first", "reward - AR", "acceptance length", "verdict"),),
    Study.BAKE_OFF: (  # several tables, so that each fits a terminal
        ("drafter", "AL", "generation speedup", "step speedup", "verdict"),
        ("drafter", "control", "reward - AR", "training a step"),
        ("drafter", "pretraining", "repaid after", "AL, first to last"),
        ("drafter", "paper: acceptance length", "paper: generation speedup"),
    ),
}
"""Headings of each study's tables. AL is the acceptance length; published figures have columns of their own."""


def cells(record: StudyRecord, row: Row, headings: Sequence[str]) -> list[str]:
    """The cells of a row under `headings`."""
    return [COLUMNS[heading](record, row) for heading in headings]


def study_text(record: StudyRecord) -> str:
    """Render the study as plain text: tables, notes, and failures with their reasons."""
    tables = [
        table([list(headings), *(cells(record, row, headings) for row in record.rows)])
        for headings in (TABLES[record.study] if record.rows else ())
    ]
    failures = "\n".join(f"{failure.variant.name} FAILED: {failure.reason}" for failure in record.failures)
    return "\n\n".join(
        filter(None, [*tables, "\n".join(textwrap.fill(note, _WIDTH) for note in notes(record)), failures])
    )


def notes(record: StudyRecord) -> list[str]:
    """Return the notes of all verdicts, each with the rows that it applies to."""
    about: dict[str, list[str]] = {}
    for row in record.rows:
        for note in row.claim.notes:
            about.setdefault(note, []).append(label(record, row.setting))
    rows = {note: "all" if len(names) == len(record.rows) else "; ".join(names) for note, names in about.items()}
    return [f"{names}: {note}" for note, names in rows.items()]


def answers(record: StudyRecord) -> list[str]:
    """State for each workload which setting is fastest, by how much, and which settings are as fast."""
    sentences = []
    for first in (row for row in record.rows if row.rank == 1):
        workload, name = first.setting.workload, label(record, first.setting)
        start = f"{WORKLOAD_LABELS[workload.value]}: "
        claimed = first.claim
        if claimed.kind is not ClaimKind.FASTER:
            is_measured = claimed.kind is not ClaimKind.NOT_MEASURED
            found = "measured draft makes a step faster" if is_measured else "draft was measured"
            sentences.append(f"{start}no {found}; the best is {name}. {claimed.sentence}")
            continue
        others = [row for row in record.rows if row.setting.workload is workload and row.rank > 1]
        equal = [label(record, row.setting) for row in others if equals_first(row, first)]
        tie = f" Not told apart from it by these steps: {'; '.join(equal)}." if equal else ""
        sentences.append(f"{start}{name} has the shortest step. {claimed.sentence}{tie}")
    return sentences or ["No variant came to a result."]


def write_study(record: StudyRecord, directory: Path) -> list[Path]:
    """Write the page, the figure if there is a result, and the record as files named after the study."""
    html, figure = directory / f"{record.study.value}.html", directory / "speedups.svg"
    svg = speedups(record) if record.rows else ""
    page = render(
        Path(__file__).with_name("study.html.jinja"),
        record=record,
        is_ablation=record.study is Study.ABLATION,
        answers=answers(record),
        workloads={row.setting.workload: WORKLOAD_LABELS[row.setting.workload.value] for row in record.rows},
        tables=TABLES[record.study],
        cells=partial(cells, record),
        loses=loses,
        notes=notes(record),
        paper_label=read_reference().label,
        figure=Markup(svg),
    )
    write_atomic(html, page.encode())
    if svg:
        write_atomic(figure, svg.encode())
    written = write_record(record, html.with_suffix(".json"))  # last, for its presence marks the study as finished
    return [html, *([figure] if svg else []), written]


def speedups(record: StudyRecord) -> str:
    """Draw step and generation speedup of every setting in rank order: value, interval, and each seed's value."""

    def draw(*axes: Axes) -> None:
        for ax, kind in zip(axes, ("step", "generation"), strict=True):
            for place, row in enumerate(record.rows):
                estimate = getattr(row, kind)
                colour = LOSS if loses(row) else ARM_COLOURS[Arm.SPECULATIVE]
                ax.errorbar(estimate.value, place, xerr=errors(estimate), fmt="o", ms=5, color=colour, capsize=3)
                values = [getattr(outcome, kind).value for outcome in row.outcomes]
                ax.plot(values, [place + 0.24] * len(values), "|", color=INK, markersize=5, alpha=0.7)
            ax.axvline(1, color=INK, linewidth=0.9, linestyle="--")
            ax.set(title=f"{kind.capitalize()} speedup over autoregressive", ylim=(len(record.rows) - 0.4, -0.6))
            ax.grid(visible=True, axis="x")
            ax.grid(visible=False, axis="y")
            names = [f"{row.rank}. {label(record, row.setting)}" for row in record.rows] if kind == "step" else []
            ax.set_yticks(range(len(names)), names)

    return draw_svg(2, 0.9 + _ROW_HEIGHT_IN * len(record.rows), draw)
