"""Compare sizes of the library and its tests, and how it is documented, with budgets.toml, for `make check`.

Code lines are lines with code: no blank line, no comment alone, no docstring. `--write` sets every entry to today's
figure and keeps the comments; only a person calls it, and gives the reason for a higher entry in the commit.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_TABLE = "budgets.toml"
_LIBRARY = "slipstream"
_FREE_STEMS = ("__init__", "config", "cli")  # may occur in every package
_DOCUMENTED = (_LIBRARY, "tasks", "workflows")
_FRAGMENTS = {"Of", "That", "What", "Whether", "Those", "They", "See", "Who", "With", "How"}  # first words
_HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_ENTRY = re.compile(r"^([\w-]+) = \d+")
_SECTION = re.compile(r"^\[(\w+)\]")

Figures = dict[str, int]  # by `section.entry`


def measure(root: Path) -> Figures:
    """Compute all figures of the checkout at `root`."""
    library = root / _LIBRARY
    code = {path: code_lines(path) for path in _python(library)}
    packages: Counter[str] = Counter()
    for path, count in code.items():
        package = path.relative_to(library).parts[0] if path.parent != library else "root_files"
        packages[package] += count
    return {
        "library.code_lines": sum(code.values()),
        "library.lines": _lines(library),
        "library.files": len(code),
        "library.protocols": sum(map(_protocols, code)),
        "library.repeated_stems": len(repeated_stems(library)),
        "library.recipe_fields": len(list(recipe_fields(_schema(root)))),
        "library.docstring_fragments": len(list(docstring_fragments(root))),
        "tests.lines": _lines(root / "tests"),
        **{f"packages.{name}": count for name, count in sorted(packages.items())},
    }


def code_lines(path: Path) -> int:
    """Count the lines of a file that hold code."""
    with tokenize.open(path) as file:
        held = {
            line
            for token in tokenize.generate_tokens(file.readline)
            if token.type not in _LAYOUT
            for line in range(token.start[0], token.end[0] + 1)
        }
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(1 for number, line in enumerate(text.splitlines(), 1) if number in held and line.strip())


def repeated_stems(library: Path) -> list[str]:
    """List the names that more than one module has."""
    stems = Counter(path.stem for path in _python(library))
    return sorted(stem for stem, count in stems.items() if count > 1 and stem not in _FREE_STEMS)


def recipe_fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """List the leaves of a recipe's JSON schema; a section that several fields share counts once."""
    sections = {name: each for name, each in schema["$defs"].items() if not name.startswith("Partial")}
    for name, section in {"Recipe": schema, **sections}.items():
        for field, each in section.get("properties", {}).items():
            parts = (each, each.get("items", {}), *each.get("anyOf", ()))
            below = (sections.get(part.get("$ref", "").rpartition("/")[2], {}) for part in parts)
            if field != "workloads" and not any("properties" in part for part in below):
                yield f"{name}.{field}"


def _schema(root: Path) -> dict[str, Any]:
    """JSON schema of the recipes of a checkout."""
    command = "import json; from slipstream.recipe import recipe_schema; print(json.dumps(recipe_schema()))"
    done = subprocess.run([sys.executable, "-c", command], cwd=root, capture_output=True, check=True)
    return json.loads(done.stdout)


def docstring_fragments(root: Path) -> Iterator[str]:
    """List docstrings of modules, classes, functions and attributes that begin with a word of `_FRAGMENTS`."""
    for path in itertools.chain.from_iterable(_python(root / folder) for folder in _DOCUMENTED):
        for node in ast.walk(ast.parse(path.read_text())):
            for line, text in _docstrings(node):
                words = text.split(maxsplit=1)
                if words and words[0].strip(",.:;`") in _FRAGMENTS:
                    yield f"{path.relative_to(root)}:{line}"


def problems(figures: Figures, entries: Figures, *, offenders: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Name each figure that exceeds its entry, has none, or is no longer counted, with the fix.

    Args:
        offenders: by figure, the places that it counts.
    """
    for name, value in figures.items():
        if name not in entries:
            yield f"{name} must have an entry in {_TABLE}, got none: add `{name.partition('.')[2]} = {value}`"
        elif value > entries[name]:
            which = f" ({', '.join(offenders[name])})" if name in offenders else ""
            fix = f"lower it, or raise the entry in {_TABLE} with a reason"
            yield f"{name} must be <= {entries[name]:,}, got {value:,}{which}: {fix}"
    for name in sorted(entries.keys() - figures.keys()):
        yield f"{name} must be a figure that is counted, got an entry of nothing in {_TABLE}: remove it"


def rewritten(table: str, figures: Figures) -> str:
    """Return the table with today's figures and its comments; entries of new packages are added in order."""
    section, found, lines = "", set(), []
    for line in table.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        if entry := _ENTRY.match(line):
            name = f"{section}.{entry[1]}"
            if name not in figures:
                continue
            found.add(name)
            line = f"{entry[1]} = {figures[name]}{line[entry.end() :]}"
        lines.append(line)
    missing = (name.split(".") for name in figures if name not in found)
    for section, entry in missing:
        place = 1 + next(number for number, line in enumerate(lines) if line.startswith(f"[{section}]"))
        while place < len(lines) and (other := _ENTRY.match(lines[place])) and other[1] < entry:
            place += 1
        lines.insert(place, f"{entry} = {figures[f'{section}.{entry}']}")
    return "\n".join([*lines, ""])


def _python(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in _python(folder))


def _protocols(path: Path) -> int:
    classes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    return sum(any("Protocol" in ast.unparse(base) for base in each.bases) for each in classes)


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Iterate over line and text of the docstrings of a node and of the attributes in its body."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for before, each in zip([node, *body], body, strict=False):
        is_documented = isinstance(before, _HOLDERS if before is node else (ast.Assign, ast.AnnAssign))
        match each:
            case ast.Expr(value=ast.Constant(value=str(text))) if is_documented:
                yield each.lineno, text


def main() -> None:
    """Check the checkout in the working directory, or rewrite its table."""
    root = Path()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"set every entry of {_TABLE} to today's figure")
    table = root / _TABLE
    figures = measure(root)
    if parser.parse_args().write:
        table.write_text(rewritten(table.read_text(), figures))
        return
    sections = tomllib.loads(table.read_text())
    entries = {f"{section}.{name}": value for section, named in sections.items() for name, value in named.items()}
    offenders = {
        "library.repeated_stems": repeated_stems(root / _LIBRARY),
        "library.docstring_fragments": list(docstring_fragments(root)),
    }
    if found := list(problems(figures, entries, offenders=offenders)):
        sys.exit("\n".join(["budgets:", *found]))
    slack = [f"{name} {entries[name]:,} -> {value:,}" for name, value in figures.items() if value < entries[name]]
    sys.stdout.write(f"budgets: kept; could be lowered: {', '.join(slack) or 'none'}\n")


if __name__ == "__main__":
    main()
