"""Report of `make mutants`: writes research/mutants.md from mutmut's working directory.

Every surviving mutant needs an entry with a reason in scripts/mutants_accepted.yaml, and 92 % of all mutants must be
found. The report keeps its rows of modules that the working directory has not tried.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import yaml
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

_WORK = Path("mutants")
_ACCEPTED = Path("scripts/mutants_accepted.yaml")
_REPORT = Path("research/mutants.md")
_TRIED = _WORK / "tried.json"
_LEAST_SHARE = 0.92
_NO_REASON = "No reason yet"
_FOUND = ("killed", "timeout")
_COLUMNS = ("not checked", "killed", "survived", "no tests", "timeout")
_ITEM = re.compile(r"- `(.+):(\d+)` `` (.*) `` becomes `` (.*) ``")
_HEAD = """# Mutants

`make mutants` changes the code in small ways (an operator, a number, a string, an argument), one change at a time, and
runs the unit tests that reach the changed function. A mutant is killed if one of them fails; one that survives is a
change that nobody would notice. A time-out counts as found: the change made a loop endless. The table and the list
below are written by the command itself. What is mutated, and by which tests it is judged, stands under `[tool.mutmut]`
in `pyproject.toml`; functions with a decorator and the defaults of config fields are not mutated (mutmut cannot).

A killed mutant stays so while its function is unchanged, so a run tries what is new, and what survived; a run may also
be of some modules alone, judged by the tests that mirror them. `tried at` is the commit at which a module's results
last changed. A run keeps the rows of the other modules whose files are still what was tried; of the rest it says how
many mutants are not tried.

"""


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """Mutant that no test killed."""

    path: Path
    line: int
    old: str
    new: str

    @property
    def change(self) -> str:
        """Text that the entries of the accepted list are matched with."""
        return f"{self.old} -> {self.new}"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Row and survivors of a module."""

    commit: str
    counts: Counter[str]
    survivors: list[Survivor]


def results() -> Iterator[tuple[Path, dict[str, str]]]:
    """Iterate over source files with the status of each mutant."""
    for meta in sorted(_WORK.rglob("*.meta")):
        codes = json.loads(meta.read_text())["exit_code_by_key"]
        if codes:
            yield meta.relative_to(_WORK).with_suffix(""), {key: status_by_exit_code[c] for key, c in codes.items()}


def survivor(path: Path, key: str) -> Survivor:
    """Find the line in which the mutant `key` differs from the source `path`."""
    lines = get_diff_for_mutant(key, path=path).splitlines()[2:]
    old = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    new = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    hunk = re.match(r"@@ -(\d+)", lines[0])
    offset = next(i for i, line in enumerate(lines[1:]) if line[:1] in "+-")
    start = int(hunk[1]) if hunk else 1
    return Survivor(path=path, line=_first_line(path, key) + start + offset - 1, old=old, new=new)


def _first_line(path: Path, key: str) -> int:
    """Find the first line of a mutant's function: `module.x_name__mutmut_1`, or of a class `xǁClassǁname__mutmut_1`."""
    name = key.rpartition("__mutmut_")[0].rpartition(".")[2]
    owner, name = name.split("ǁ")[1:] if "ǁ" in name else ("", name.removeprefix("x_"))
    body = ast.parse(path.read_text()).body
    if owner:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name).lineno


def reason_of(found: Survivor, accepted: list[dict[str, str]]) -> str | None:
    """Look up the reason why a survivor is accepted; None if no entry matches."""
    for entry in accepted:
        if found.path.match(entry.get("file", "*")) and re.search(entry["change"], found.change):
            return entry["reason"]
    return None


def forget_survivors() -> None:
    """Make the next run retry every mutant that was not killed."""
    for meta in _WORK.rglob("*.meta"):
        data = json.loads(meta.read_text())
        codes = data["exit_code_by_key"]
        data["exit_code_by_key"] = {k: c if status_by_exit_code[c] == "killed" else None for k, c in codes.items()}
        meta.write_text(json.dumps(data))


def kept(text: str) -> dict[Path, Kept]:
    """Parse the rows and survivors of a report, by source file; files that no longer exist are left out."""
    found = {}
    for path, commit, numbers in re.findall(r"^\| `(\S+)` \| (\S+) \| ([\d |]+) \|", text, re.MULTILINE):
        num, *counts = map(int, numbers.split(" | "))
        by_status = Counter(dict(zip(_COLUMNS, counts, strict=True)))
        assert by_status.total() == num, f"the row of {path} must add up to {num}, got {by_status.total()}"
        if Path(path).exists():
            found[Path(path)] = Kept(commit=commit, counts=by_status, survivors=[])
    for line in text.partition("## Survivors")[2].splitlines():
        if match := _ITEM.fullmatch(line):
            path, number, old, new = match.groups()
            each = Survivor(path=Path(path), line=int(number), old=old, new="" if new == "(nothing)" else new)
            if each.path in found:
                found[each.path].survivors.append(each)
    return found


def known() -> dict[str, dict[str, str]]:
    """Read digest and commit of each source file's results from the working directory."""
    return json.loads(_TRIED.read_text()) if _TRIED.exists() else {}


def tried_at(found: dict[Path, dict[str, str]], commit: str) -> dict[str, str]:
    """Return the commit at which each source file's results last changed, and store it beside the results."""
    noted = known()
    for path, statuses in found.items():
        decided = {key: status for key, status in statuses.items() if status != "not checked"}
        digest = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()
        if digest != noted.get(str(path), {}).get("digest"):
            noted[str(path)] = {"digest": digest, "commit": commit}
    _TRIED.write_text(json.dumps(noted, indent=1))
    return {path: each["commit"] for path, each in noted.items()}


def is_known(path: Path, statuses: dict[str, str], before: dict[Path, Kept]) -> bool:
    """Return True if the report knows as much of a module as the working directory, and the file is unchanged.

    A run of selected modules leaves the mutants of other modules untried.
    """
    num_untried = Counter(statuses.values())["not checked"]
    if num_untried == 0 or path not in before or before[path].counts["not checked"] > num_untried:
        return False
    commit = before[path].commit.removesuffix("-dirty")
    return subprocess.run(["git", "diff", "--quiet", commit, "--", path]).returncode == 0  # 128 for an unknown commit


def tried(before: dict[Path, Kept]) -> dict[Path, Kept]:
    """Collect the results of each module of which the report knew less `before`."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    found = {path: statuses for path, statuses in results() if not is_known(path, statuses, before)}
    commits = tried_at(found, described.stdout.strip())
    modules = {}
    for path, statuses in found.items():
        keys = [key for key, status in statuses.items() if status not in _FOUND and status != "not checked"]
        counts = Counter(status if status in _COLUMNS else "survived" for status in statuses.values())
        survivors = [survivor(path, key) for key in keys]
        modules[path] = Kept(commit=commits[str(path)], counts=counts, survivors=survivors)
    return modules


def report() -> list[str]:
    """Write the report; returns the problems of the result."""
    untried = {path: Kept(commit="-", counts=Counter(statuses.values()), survivors=[]) for path, statuses in results()}
    before = kept(_REPORT.read_text())
    modules = dict(sorted((untried | before | tried(before)).items()))
    accepted = yaml.safe_load(_ACCEPTED.read_text())
    survivors = [each for module in modules.values() for each in module.survivors]
    listed = [(reason_of(each, accepted) or _NO_REASON, each) for each in survivors]
    problems = [f"{each.path}:{each.line} {each.change}" for reason, each in listed if reason == _NO_REASON]
    total = sum((module.counts for module in modules.values()), Counter[str]())
    share = sum(total[status] for status in _FOUND) / (total.total() - total["not checked"])
    if share < _LEAST_SHARE or total["not checked"]:
        problems.append(f"{share:.1%} of the mutants tried are found, {total['not checked']} were not tried")
    table = "\n".join(
        [
            f"{date.today():%Y-%m-%d}, `make mutants`, mutmut 3.8.1.\n",
            "| module | tried at | mutants | not tried | killed | survived | no test | time-out | found of tried |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_row(f"`{path}`", module.commit, module.counts) for path, module in modules.items()),
            _row("**all**", "", total),
        ]
    )
    _REPORT.write_text(f"{_HEAD}{table}\n\n## Survivors\n{_list(listed)}")
    return problems


def _row(name: str, commit: str, counts: Counter[str]) -> str:
    tried = counts.total() - counts["not checked"]
    found = f"{sum(counts[status] for status in _FOUND) / tried:.1%}" if tried else "-"
    numbers = (counts.total(), *(counts[status] for status in _COLUMNS))
    return f"| {name} | {commit} | {' | '.join(map(str, numbers))} | {found} |"


def _list(listed: list[tuple[str, Survivor]]) -> str:
    parts = []
    for reason in dict.fromkeys(reason for reason, _ in sorted(listed, key=lambda pair: pair[0])):
        parts.append(f"\n{reason}:\n")
        parts += [
            f"- `{each.path}:{each.line}` `` {each.old} `` becomes `` {each.new or '(nothing)'} ``"
            for why, each in listed
            if why == reason
        ]
    return "\n".join([*parts, ""])


def main() -> None:
    """Write the report, or prepare the next run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forget-survivors", action="store_true", help="make the next run retry them")
    if parser.parse_args().forget_survivors:
        forget_survivors()
        return
    problems = report()
    if problems:
        sys.exit("\n".join(["mutants:", *problems]))


if __name__ == "__main__":
    main()
