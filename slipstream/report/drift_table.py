"""The table of the page's section on drift."""

from __future__ import annotations

from slipstream.records.run import DriftFinding, DriftRecord
from slipstream.report.drift import LABELS
from slipstream.report.tables import ColumnGroup, Row, Table


def drift_table(drift: DriftRecord) -> Table:
    """A row a result: its value, the band of the executions before, how many these are, and the verdict."""
    columns = ("this execution", "band", "executions before", "verdict")
    rows = tuple(_row(finding, is_outside=finding in drift.outside) for finding in drift.findings)
    return Table(label="result", groups=(ColumnGroup(heading="", columns=columns),), rows=rows)


def _row(finding: DriftFinding, *, is_outside: bool) -> Row:
    band = "" if finding.band is None else f"{_number(finding.band[0])} to {_number(finding.band[1])}"
    cells = (_number(finding.value), band, str(finding.num_executions), finding.verdict)
    return Row(label=LABELS[finding.name], cells=cells, kind="loses" if is_outside else "")


def _number(value: float) -> str:
    """Three decimals, fewer of what is large."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
