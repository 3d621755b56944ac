"""Draw the table that ends a demo, from the demo's own output, as docs/images/demo.svg.

`make demo 2>&1 | tee demo.log`, then `.venv/bin/python scripts/draw_terminal.py demo.log`. Lines are drawn as printed,
wrapped where they are wide; paths, which are those of one machine, are left out.
"""

from __future__ import annotations

import sys
import textwrap
from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "demo.svg"
_FIRST, _AFTER = "median seconds a step", "report: "
_COLUMNS = 92
_CHARACTER, _LINE, _MARGIN = 7.25, 17, 18  # pixels
_STYLE = (
    'text { font: 12px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d7dce6; white-space: pre } '
    ".strong { fill: #8fe0b6; font-weight: 700 }"
)
_STRONG = ("generation speedup", "step speedup", "losslessness", "Speculation (", "Generation: ")


def table(output: str) -> list[str]:
    """The lines of the table, of the last demo in `output`."""
    lines = output[output.rindex(_FIRST) :].splitlines()
    end = next(index for index, line in enumerate(lines) if line.startswith(_AFTER))
    printed = "\n".join(lines[:end]).rstrip().splitlines()
    return [part for line in printed for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    return [line[:_COLUMNS]] if set(line) == {"-"} else textwrap.wrap(line, _COLUMNS) or [""]


def drawing(lines: list[str]) -> str:
    """The lines as SVG, on a dark ground whatever the reader's mode."""
    width = round(max(map(len, lines)) * _CHARACTER) + 2 * _MARGIN
    height = len(lines) * _LINE + 2 * _MARGIN
    texts = [
        f'<text x="{_MARGIN}" y="{_MARGIN + 12 + index * _LINE}"{_kind(line)}>{escape(line)}</text>'
        for index, line in enumerate(lines)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#1b1f2a"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", ground, *texts, "</svg>"]) + "\n"


def _kind(line: str) -> str:
    return ' class="strong"' if line.startswith(_STRONG) else ""


if __name__ == "__main__":
    PICTURE.write_text(drawing(table(Path(sys.argv[1]).read_text())))
