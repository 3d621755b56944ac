"""The page of `slipstream compare`: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from slipstream.records.files import write_atomic
from slipstream.report.comparison import HEADINGS, answer, cells, differences
from slipstream.tracking import Execution

_URL_TAG = "flyte.execution_url"


def write_comparison(executions: Sequence[Execution], path: Path, *, uri: str) -> Path:
    """Write the page, atomically.

    Args:
        uri: of the tracking store that the executions were read from.
    """
    write_atomic(path, render_comparison(executions, uri=uri).encode())
    return path


def render_comparison(executions: Sequence[Execution], *, uri: str) -> str:
    """The page: an answer an execution, the table, and what was not the same in all of them."""
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("comparison.html.jinja").render(
        executions=[
            {"name": run.name, "answer": answer(run), "cells": cells(run), "url": _link(run)} for run in executions
        ],
        headings=HEADINGS,
        differences=differences(executions),
        uri=uri,
        style=Markup((here / "style.css").read_text()),
    )


def _link(execution: Execution) -> str:
    """Flyte's page of the execution; a tag that is no web address is no link."""
    url = execution.tags.get(_URL_TAG, "")
    return url if url.startswith(("http://", "https://")) else ""
