"""Verdict on a measured ratio of times: faster, slower, no difference seen, or not measured.

The report, its JSON and tags, `compare`, the ranking of a study and the drift gate take their verdicts from `claim`.
A ratio is the baseline's seconds over the candidate's, so the candidate is faster above 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from slipstream.report.formats import estimate_of, interval, percent, speedup
from slipstream.statistics import Estimate

_CONTROL_WARNS = (0.95, 1.05)  # outside of it a verdict carries a warning
_CONTROL_HOLDS = (0.9, 1.1)  # outside of it there is no verdict


class ClaimKind(StrEnum):
    """A verdict on a ratio of times."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference seen"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Verdict on one ratio, with the notes that qualify it."""

    kind: ClaimKind
    finding: str  # the verdict in words, with its figures
    notes: tuple[str, ...]  # sentences: reasons why nothing was measured, each with the fix, then warnings

    @property
    def sentence(self) -> str:
        """The finding and its notes in full sentences."""
        return " ".join([f"{self.finding[0].upper()}{self.finding[1:]}.", *self.notes])

    def as_json(self) -> dict[str, str]:
        """Return the `verdict` entry of `report.json`."""
        return {"kind": self.kind.value, "sentence": self.sentence}


def claim(ratio: Estimate, control: Estimate | None, *, paired: bool, overlaps: bool = False) -> Claim:
    """Judge whether the candidate is faster or slower than the baseline.

    Args:
        control: ratio of the work that is the same in both arms; None where it was not measured.
        paired: True if the arms alternated step by step.
        overlaps: training overlaps generation, so there is no control and `control` is ignored.
    """
    missing = []  # reasons why there is no verdict, each with what to do
    warnings = [] if paired else ["Unpaired: the arms ran one after the other."]
    if overlaps:
        control = None
        warnings.append("No control: training overlaps generation.")
    elif control is None:
        missing.append("There is no control that shows if the machine was as fast for both arms: run again.")
    elif not _within(control.value, _CONTROL_HOLDS):
        missing.append(
            f"The control, the same work in both arms, was {_with_interval(control)}, outside {_band(_CONTROL_HOLDS)}: "
            "run again on a quiet machine, with the arms in turn."
        )
    if ratio.ci95 is None:
        missing.append("Too few timed steps for an interval: run more steps.")
    if missing or ratio.ci95 is None:
        return Claim(kind=ClaimKind.NOT_MEASURED, finding="not measured", notes=(*missing, *warnings))
    if control is not None and not _within(control.value, _CONTROL_WARNS):
        warnings.append(f"Control {_with_interval(control)} lies outside {_band(_CONTROL_WARNS)}.")
    low, high = ratio.ci95
    kind = ClaimKind.FASTER if low > 1 else ClaimKind.SLOWER if high < 1 else ClaimKind.NO_DIFFERENCE
    seen = f"; a difference of {percent((high - low) / 2)} or more would have been seen"
    figures = f"{speedup(ratio.value)}, {interval(ratio, '95 % interval ')}"
    finding = f"{kind}{seen if kind is ClaimKind.NO_DIFFERENCE else ''} ({figures})"
    return Claim(kind=kind, finding=finding, notes=tuple(warnings))


def said(claims: Mapping[str, Claim]) -> str:
    """Join the findings of several claims, by the name of each ratio; notes that claims share are written once."""
    about: dict[str, list[str]] = {}
    for name, each in claims.items():
        about.setdefault(each.finding, []).append(name)
    findings = [f"{' and '.join(names).capitalize()}: {finding}." for finding, names in about.items()]
    return " ".join([*findings, *dict.fromkeys(note for each in claims.values() for note in each.notes)])


def recorded(metrics: Mapping[str, float], name: str) -> Claim | None:
    """Judge the ratio `name` from an execution's metrics; None where the execution has no such metric."""
    ratio = estimate_of(metrics, name)
    if ratio is None:
        return None
    control, paired = estimate_of(metrics, "control_ratio"), metrics.get("result/paired") == 1
    return claim(ratio, control, paired=paired, overlaps=name.startswith("asynchronous"))


def _within(value: float, band: tuple[float, float]) -> bool:
    return band[0] <= value <= band[1]


def _band(band: tuple[float, float]) -> str:
    return f"{band[0]} to {band[1]}"


def _with_interval(estimate: Estimate) -> str:
    return f"{speedup(estimate.value)} ({interval(estimate, '95 % interval ')})"
