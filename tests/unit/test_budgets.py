"""The budgets: what `scripts/budgets.py` counts on a small tree, and what it says of a figure beside its entry."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.budgets import docstring_fragments, measure, repeated_stems

ROOT = Path(__file__).parents[2]
LOSS = '''"""The docstring of a module,

of three lines."""

# A comment alone.
from typing import Protocol


class Learner(Protocol):
    """A role."""

    step: int  # a comment behind code
    """What an attribute means."""


TEXT = """of a string

that is code"""
'''
RECIPE = '''"""A recipe."""

from slipstream.grpo.config import Grpo


def recipe_schema():
    """Everything."""
    return {"$defs": {}, "properties": {"name": {"type": "string"}, "workloads": {}}}
'''
CONFIG = '''"""The config of GRPO."""

Grpo = int
'''
TABLE = """# Why there is a table.

[library] # the library
code_lines = 9 # without docstrings
lines = 30
files = 5
protocols = 1
repeated_stems = 0 # names
recipe_fields = 1
docstring_fragments = 1

[tests]
lines = 2

[packages]
grpo = 6
root_files = 3
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Five modules, of which two stand in `grpo`; a test of two lines; and the table that fits them."""
    files = {
        "slipstream/__init__.py": '"""A library."""\n',
        "slipstream/recipe.py": RECIPE,
        "slipstream/grpo/__init__.py": "",
        "slipstream/grpo/config.py": CONFIG,
        "slipstream/grpo/loss.py": LOSS,
        "slipstream/notes.md": "no Python\n",
        "tests/test_loss.py": "\nassert True\n",
        "budgets.toml": TABLE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "budgets.py"), *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_a_tree_is_counted_as_by_hand(tree: Path) -> None:
    assert measure(tree) == {
        "library.code_lines": 3 + 1 + 5,
        "library.lines": 1 + 9 + 0 + 3 + 17,
        "library.files": 5,
        "library.protocols": 1,
        "library.repeated_stems": 0,
        "library.recipe_fields": 1,
        "library.docstring_fragments": 1,
        "tests.lines": 2,
        "packages.grpo": 1 + 5,
        "packages.root_files": 3,
    }


def test_a_second_module_of_a_name_is_found_unless_every_package_may_have_one(tree: Path) -> None:
    (tree / "slipstream/config.py").write_text("")
    assert repeated_stems(tree / "slipstream") == []
    (tree / "slipstream/loss.py").write_text("")
    assert repeated_stems(tree / "slipstream") == ["loss"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""What a module does."""\n', [1]),
        ('"""A module of what is kept."""\n', []),
        ('class Kept:\n    """`Those` that are kept."""\n', [2]),
        ('def keep() -> None:\n    """\n    Whether it is kept.\n    """\n', [2]),
        ('async def keep() -> None:\n    """Howitzers are kept."""\n', []),
        ('KEPT = 1\n"""Of the kept."""\n', [2]),
        ('kept: int = 1\n"""See `KEPT`."""\n', [2]),
        ('if True:\n    """What documents nothing."""\n', []),
    ],
)
def test_a_docstring_that_begins_as_a_fragment_is_found(tmp_path: Path, text: str, lines: list[int]) -> None:
    for folder in ("slipstream", "tasks", "workflows", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kept.py").write_text(text)
    folders = ("slipstream", "tasks", "workflows")
    assert list(docstring_fragments(tmp_path)) == [f"{folder}/kept.py:{line}" for folder in folders for line in lines]


def test_what_keeps_every_entry_passes(tree: Path) -> None:
    for table, lower in ((TABLE, "none"), (TABLE.replace("grpo = 6", "grpo = 1700"), "packages.grpo 1,700 -> 6")):
        (tree / "budgets.toml").write_text(table)
        done = run(tree)
        assert (done.returncode, done.stdout) == (0, f"budgets: kept; could be lowered: {lower}\n")


def test_a_figure_over_its_entry_fails_with_its_name_the_limit_and_the_fix(tree: Path) -> None:
    with (tree / "tests/test_loss.py").open("a") as file:
        file.write("assert 1\n")
    (tree / "slipstream/loss.py").write_text("")
    done = run(tree)
    lines = done.stderr.splitlines()
    assert (done.returncode, lines[0]) == (1, "budgets:")
    assert "tests.lines must be <= 2, got 3: lower it, or raise the entry in budgets.toml with a reason" in lines
    assert "library.repeated_stems must be <= 0, got 1 (loss): lower it" in done.stderr


def test_a_package_without_an_entry_fails_and_so_does_an_entry_without_a_package(tree: Path) -> None:
    (tree / "budgets.toml").write_text(TABLE.replace("grpo = 6", "rollout = 6"))
    done = run(tree)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        "packages.grpo must have an entry in budgets.toml, got none: add `grpo = 6`",
        "packages.rollout must be a figure that is counted, got an entry of nothing in budgets.toml: remove it",
    ]


def test_write_sets_every_entry_and_keeps_the_comments(tree: Path) -> None:
    table = tree / "budgets.toml"
    stale = TABLE.replace("= 9 #", "= 5 #").replace("grpo = 6\n", "").replace("lines = 2", "lines = 1")
    table.write_text(f"{stale}rollout = 6\n")  # a package is new, and another one has gone
    assert run(tree, "--write").returncode == 0
    assert table.read_text() == TABLE
    assert run(tree).returncode == 0
