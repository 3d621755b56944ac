"""From the record of a run to what people read: an HTML page, a JSON summary, a table for the terminal."""

from slipstream.report.page import ReportPaths, render, write_report
from slipstream.report.reference import Reference, read_reference
from slipstream.report.summary import summarise
from slipstream.report.terminal import speedup_table

__all__ = ["Reference", "ReportPaths", "read_reference", "render", "speedup_table", "summarise", "write_report"]
