"""Output of a stage for later tasks: its records as files, its weights by path, never checkpoints or the spool.

A task that returned its stage's directory would upload checkpoints, responses and sources too, and every later task
would download them. So the output is a folder of its own:

    <root>/<execution>/deliverables/<node>/          records that later tasks read, and the path of the other folder
    <root>/<execution>/handed_on/<node>-<digest>/    records and weights, laid out as the stage wrote them

The digest covers names and bytes: a later task reads what the earlier one wrote, whatever happened to its directory
since. The files are hard links, so that they take no space twice; from another file system they are copies. Engines and
learners on other hosts read them there too: the root is storage that every task sees.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import require
from slipstream.records.files import read_record, write_record
from slipstream.stages.context import RunContext
from slipstream.stages.store import identity
from slipstream.storage import replaced_directory

logger = logging.getLogger(__name__)

MANIFEST = "deliverable.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliverable:
    """Location of the records beside this file together with their weights."""

    path: str  # relative to the root, so that the root can be moved
    num_bytes: int


def deliver(
    context: RunContext, node: str, directory: Path, *, records: Sequence[str], weights: Sequence[str] = ()
) -> Path:
    """Lay out the output of the stage `node`; return the folder of records, which a task returns as files.

    Args:
        records: patterns of files, relative to `directory`.
        weights: directories of models in `directory`.
    """
    root = Path(context.root)
    assert any(path.is_file() for pattern in records for path in directory.glob(pattern)), f"{directory} has no records"
    for at in weights:
        require(any(path.is_file() for path in (directory / at).rglob("*")), "weights", "must hold a model", at)
    both = (*records, *(f"{each}/**/*" for each in weights))
    whole = Path(context.execution) / "handed_on" / f"{node}-{identity(directory, *both)}"
    with put(root / whole) as folder:
        _link_all(directory, both, folder)
        size = num_bytes(folder)  # one that was there before may have lost a file
    target = root / context.execution / "deliverables" / node
    with replaced_directory(target) as folder:
        _link_all(directory, records, folder)
        write_record(Deliverable(path=str(whole), num_bytes=size), folder / MANIFEST)
    logger.info("%s: output of %d bytes; with weights %d in %s", node, num_bytes(target), size, whole)
    return target


def assemble(context: RunContext, records: Path) -> Path:
    """Directory below the run's root with a deliverable's `records` and its weights, which must be complete."""
    handed_on = read_record(Deliverable, records / MANIFEST)
    path = Path(context.root) / handed_on.path
    fix = "mount the same storage at the same path in every pod"
    require(path.is_dir(), "run_root", "must be storage that every task sees", str(path), fix)
    rule, fix = f"must hold {handed_on.num_bytes} bytes", "remove it, and run the task that made it again"
    found = num_bytes(path)
    require(found == handed_on.num_bytes, f"the directory {path}", rule, found, fix)
    return path


def num_bytes(directory: Path) -> int:
    """Size of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@contextmanager
def put(target: Path) -> Iterator[Path]:
    """Yield a path to make a directory at, and rename it to `target` unless that is there: in use, and the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        made = Path(scratch) / "made"
        yield made
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise  # else another task has put the same content there


def _link_all(directory: Path, patterns: Sequence[str], target: Path) -> None:
    """Hard-link files, resolved through links; copy a file that lies on another file system."""
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}):
        link = target / path.relative_to(directory)
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), link)
        except OSError:
            shutil.copyfile(path, link)
