"""What a stage hands on: its records, and weights by the hash of their bytes. Never checkpoints, never the spool.

A stage works in a directory under the run's root that also holds checkpoints, responses and sources. Handing that on
as it is would upload it all, and every later task would download it. So what is handed on is a folder of its own:

    <root>/<execution>/deliverables/<node>/
        *                       the records that later tasks read: JSON, tokenizer, prompts, report
        deliverable.json        which weights belong to them, by identity, and where in the stage's directory they lie
        weights/<identity>/     only where weights are uploaded

Weights lie in `<root>/store/weights/<identity>/`, where `identity` hashes names and bytes: what a later task reads is
what the earlier one wrote, whatever happened to its directory since. Hard links put them there, so that they take no
space twice; from another file system they are copied. Who needs them gets a directory on the same root (engines and
learners on other hosts read it too) with the records and links to the weights, laid out as the stage wrote it.

Where `<root>` is shared, which checkpoints and retries ask for anyway, no weights move at all. Where weights are
uploaded, a root that does not have them fetches them once and checks their hash.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import require
from slipstream.records.files import read_record, write_record
from slipstream.stages.context import RunContext
from slipstream.stages.keys import content

logger = logging.getLogger(__name__)

MANIFEST = "deliverable.json"
WEIGHTS = "weights"
_NOT_WEIGHTS = "policy.json"  # a record that lies beside them; it holds times, so that equal weights would differ

Fetch = Callable[[str, Path], None]
"""Copies a folder of the deliverable, by its name, to a path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """One model of a deliverable."""

    at: str  # its directory, seen from the stage's; `.` is that itself
    identity: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliverable:
    """What belongs to the records beside it."""

    weights: tuple[Weights, ...] = ()
    is_uploaded: bool = False  # its weights lie beside the records


def deliver(
    context: RunContext,
    node: str,
    directory: Path,
    *,
    records: Sequence[str],
    weights: Sequence[str] = (),
    upload: bool = False,
) -> Path:
    """Lay out what the stage `node` hands on from its directory; the folder to hand on.

    Args:
        records: patterns of files, relative to `directory`.
        weights: directories of models in it.
        upload: weights are handed on as files too.
    """
    root = Path(context.root)
    kept = tuple(_keep(root, directory, at) for at in weights)
    target = root / context.execution / "deliverables" / node
    with put(target, replace=True) as folder:
        paths = sorted({path for pattern in records for path in directory.glob(pattern) if path.is_file()})
        assert paths, f"{directory} has no {' or '.join(records)}"
        for path in paths:
            _link(path, folder / path.relative_to(directory))
        write_record(Deliverable(weights=kept, is_uploaded=upload), folder / MANIFEST)
        for model in kept if upload else ():
            _link_all(_stored(root, model), folder / WEIGHTS / model.identity)
    logger.info(
        "%s: hands on %d bytes, and %d bytes of weights that stay in %s",
        node,
        num_bytes(target),
        0 if upload else sum(model.num_bytes for model in kept),
        root / "store" / WEIGHTS,
    )
    return target


def is_record(name: str) -> bool:
    """Whether the file `name` of a deliverable is no part of its weights."""
    return not name.startswith(f"{WEIGHTS}/")


def assemble(context: RunContext, records: Path, fetch: Fetch) -> Path:
    """A directory as the stage wrote it, with records and weights, on the run's root.

    Args:
        records: a deliverable, with or without its weights.
        fetch: for weights that are uploaded, and that the root does not have.
    Raises:
        ConfigError: weights are not there, for the root is not shared and they were not uploaded.
    """
    root = Path(context.root)
    deliverable = read_record(Deliverable, records / MANIFEST)
    for model in deliverable.weights:
        _ensure(root, model, fetch if deliverable.is_uploaded else None)
    contents = {name: digest for name, digest in _contents(records).items() if is_record(name)}
    name = _digest(contents)
    target = root / context.execution / "received" / name
    if target.is_dir() and all(path.exists() for path in target.rglob("*")):
        return target
    with put(target, replace=True) as view:  # one whose links lead nowhere any more is laid out anew
        for record in contents:
            (view / record).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(records / record, view / record)
        for model in deliverable.weights:
            stored = _stored(root, model)
            for path in _files(stored):
                name = Path(model.at) / path.relative_to(stored)
                link = view / name
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():  # a record, as the tokenizer may be
                    link.symlink_to(os.path.relpath(path, (target / name).parent))  # so that the root can be moved
    return target


def num_bytes(directory: Path) -> int:
    """Of all files in it."""
    return sum(path.stat().st_size for path in _files(directory))


def _keep(root: Path, directory: Path, at: str) -> Weights:
    """Put the model `directory/at` into the store, unless it is there."""
    source = directory / at
    contents = _contents(source)
    contents.pop(_NOT_WEIGHTS, None)
    require(bool(contents), "weights", "must be a directory with a model", source)
    identity = _digest(contents)
    size = sum((source / name).stat().st_size for name in contents)
    model = Weights(at=at, identity=identity, num_bytes=size)
    if not _stored(root, model).is_dir():
        with put(_stored(root, model)) as folder:
            for name in contents:
                _link(source / name, folder / name)
    return model


def _ensure(root: Path, model: Weights, fetch: Fetch | None) -> None:
    """Have the weights in the root's store."""
    stored = _stored(root, model)
    if stored.is_dir():
        found = num_bytes(stored)
        fix = "remove that directory, and run the task that made it again"
        require(found == model.num_bytes, f"weights {stored}", f"must be {model.num_bytes} bytes", found, fix)
        return
    fix = "mount the same storage at the same path in every pod, or set upload_weights in the cluster profile"
    require(fetch is not None, "run_root", "must be storage that every task sees", stored, fix)
    assert fetch is not None
    with put(stored) as folder:
        fetch(f"{WEIGHTS}/{model.identity}", folder)
        got = _digest(_contents(folder))
        require(got == model.identity, "weights", f"must be those of {model.identity}", got, "upload them again")


def _stored(root: Path, model: Weights) -> Path:
    return root / "store" / WEIGHTS / model.identity


@contextmanager
def put(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A path to make a directory at, which then becomes `target` in one rename.

    What is there already stays, for it has the same content and is in use, unless it is to be replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        made = Path(scratch) / "made"
        yield made
        if replace and target.is_dir():
            target.rename(Path(scratch) / "old")
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise  # else another task was quicker, with the same


def _digest(contents: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]


def _contents(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): content(path) for path in _files(directory)}


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _link_all(source: Path, target: Path) -> None:
    for path in _files(source):
        _link(path, target / path.relative_to(source))


def _link(source: Path, target: Path) -> None:
    """A second name for the file itself, not for a link to it; a copy where it is on another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
