"""Documents point to what exists: tests that guarantees name, targets of links on GitHub, pictures as drawn.

`make docs` checks links, anchors and navigation of the site; this covers what it does not see.
"""

import ast
import re
from pathlib import Path

import pytest

from scripts import draw_processes, draw_terminal

ROOT = Path(__file__).parents[2]
PAGES = [page for folder in (".", "docs", "research", "deploy") for page in sorted((ROOT / folder).glob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAMED = re.compile(r"\b(?:docs|research)/\w+\.md")


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub names them in links: lower case, blanks as hyphens, other marks dropped."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _promises() -> list[list[str]]:
    """The cells of each row of the tables of promises."""
    tables = (ROOT / "docs" / "guarantees.md").read_text().split("| promise |")[1:]
    rows = [line for table in tables for line in table.split("\n\n")[0].splitlines()[2:]]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_every_test_that_the_guarantees_name_exists_and_every_promise_has_one_or_says_that_it_has_none() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text()))
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert len(named) > 40
    assert named - tests == set()
    rows = _promises()
    assert len(rows) > 100
    assert [row for row in rows if len(row) != 3 or not row[1]] == []
    assert [row for row in rows if not re.match(r"`test|none", row[2])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_page_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not anchor or anchor in _anchors(found), target


@pytest.mark.parametrize("folder", ["slipstream", "tasks", "workflows", "configs", "scripts", "deploy", "benchmarks"])
def test_every_document_that_code_names_exists(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".yaml", ".jinja", ".sh", ".md"}]
    named = {name for path in files for name in _NAMED.findall(path.read_text())}
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_recipe_field_that_a_document_names_exists() -> None:
    """`docs/recipe.md` is written from the config classes: a field of its tables stands below its section's heading."""
    fields, sections = set(), [""]
    for line in (ROOT / "docs" / "recipe.md").read_text().splitlines():
        if line.startswith("#"):
            sections = re.findall(r"`([\w.]+)(?:\[\])?`", line)
            fields.update(sections)
        elif name := re.match(r"\| `(\w+)` ", line):
            fields.update(f"{section}.{name[1]}" for section in sections)
    first = "|".join(sorted({field.split(".")[0] for field in fields if "." in field}))
    pages = [page for page in PAGES if "research" not in page.parts and page.name != "CHANGELOG.md"]
    named = {(page.name, name) for page in pages for name in re.findall(rf"`((?:{first})\.[\w.]+)", page.read_text())}
    assert len(named) > 50
    assert {(page, name) for page, name in named if name not in fields} == set()


def test_the_readme_fits_on_two_screens_and_the_picture_of_the_processes_is_as_its_script_draws_it() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
    assert draw_processes.PICTURE.read_text() == draw_processes.drawing()


def test_a_terminal_is_drawn_from_the_last_table_of_the_output_without_its_paths() -> None:
    output = "median seconds a step  old\nreport: /a\nlog\nmedian seconds a step  x\nspeedup 1.50x < 2\n\nreport: /b\n"
    assert draw_terminal.table(output) == ["median seconds a step  x", "speedup 1.50x < 2"]
    assert "1.50x &lt; 2" in draw_terminal.drawing(draw_terminal.table(output))
