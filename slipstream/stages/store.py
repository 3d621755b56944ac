"""Outputs that later executions take instead of making them again: `<root>/store/<stage>/<key>/`.

A stage works in its execution's own directory, where a retry finds its checkpoints. When it is done the whole
directory moves into the store in one rename, with a marker that was written last, and a link takes its place: what
lies in the store is whole, and of two executions that make the same thing one keeps its own copy.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from slipstream.recipe import Recipe
from slipstream.records.files import read_record, write_record
from slipstream.stages.context import RunContext
from slipstream.stages.runs import tracked

logger = logging.getLogger(__name__)

_MARKER = "made.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Who made an output, and when."""

    stage: str
    key: str
    execution: str
    date: str


def finished(context: RunContext, node: str, record: str) -> Path | None:
    """The directory of a stage that an earlier attempt of this execution ended with `record`; None if it did not."""
    directory = context.directory(node)
    if not (directory / record).is_file():
        return None
    logger.info("%s: finished before, in %s", node, directory)
    return directory


def kept(context: RunContext, recipe: Recipe, stage: str, key: str) -> Path | None:
    """What this execution, or unless it is to be fresh an earlier one, made under `key`; None if nobody did."""
    own = Path(context.root) / context.execution / stage
    made = _made(own, key)
    if made is not None:
        logger.info("%s: finished before, in %s", stage, own)
        return own.resolve()
    if own.is_symlink():
        own.unlink()  # to what cannot be used any more
    entry = _entry(context, stage, key)
    made = _made(entry, key)
    if made is None or not context.reuse_stored:
        return None
    with tracked(context, recipe, stage, {"reused_from": made.execution}):
        _link(own, entry)
    logger.info(
        "%s: reused %s, made on %s by execution %s from the same recipe sections",
        stage,
        entry,
        made.date,
        made.execution,
    )
    return entry


def publish(context: RunContext, stage: str, key: str) -> Path:
    """Move what the stage made in its execution's directory into the store; where it lies now."""
    own, entry = context.directory(stage), _entry(context, stage, key)
    now = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    write_record(Made(stage=stage, key=key, execution=context.execution, date=now), own / _MARKER)
    entry.parent.mkdir(parents=True, exist_ok=True)
    if _made(entry, key) is not None:
        return own  # another execution was quicker, or this one is fresh: what is in use is never replaced
    if entry.exists():
        shutil.rmtree(entry)  # not from here: `publish` leaves nothing half-written
    try:
        own.rename(entry)
    except OSError as error:
        if not entry.exists():
            raise
        logger.info("%s: another execution kept its own first (%s)", stage, error)
        return own
    _link(own, entry)
    return entry


def _entry(context: RunContext, stage: str, key: str) -> Path:
    return Path(context.root) / "store" / stage / key


def _made(directory: Path, key: str) -> Made | None:
    """The record of what lies in `directory`, if it was finished under `key` and all its links lead somewhere."""
    marker = directory / _MARKER
    if not marker.is_file():
        return None
    made = read_record(Made, marker)
    if made.key != key:
        return None
    lost = next((path for path in sorted(directory.rglob("*")) if path.is_symlink() and not path.exists()), None)
    if lost is not None:
        logger.warning("%s: %s is gone, to which %s leads: it is made again", made.stage, lost.readlink(), lost)
        return None
    return made


def _link(own: Path, entry: Path) -> None:
    """Make `own` a link to `entry`; whatever an attempt that was cut off left there is dropped."""
    if own.is_symlink():
        own.unlink()
    elif own.exists():
        shutil.rmtree(own)
    own.parent.mkdir(parents=True, exist_ok=True)
    own.symlink_to(os.path.relpath(entry, own.parent), target_is_directory=True)
