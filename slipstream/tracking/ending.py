"""End the runs that a killed process left open, in their spools: a later replay brings it to the server."""

from __future__ import annotations

from pathlib import Path

from slipstream.tracking.replay import not_arrived
from slipstream.tracking.spool import Event, Spool, read_spool, spool_path
from slipstream.tracking.tracker import RunStatus, now_ms, spool_directory


def end_open_runs(root: Path, execution: str, status: RunStatus) -> list[str]:
    """End every run of `execution` whose spool does not end it; their keys. Nobody may write to them any more."""
    ended = []
    for path in sorted(spool_directory(root).glob("*.jsonl")):
        key, is_open = _state(path)
        if is_open and _belongs(key, execution):
            spool = Spool(path)
            spool.append(Event(kind="end", time_ms=now_ms(), status=status.value))
            spool.close()
            ended.append(key)
    return ended


def has_ended(root: Path, experiment: str, key: str) -> bool:
    """Whether the run `key` was opened before and nobody has it open now."""
    path = spool_path(spool_directory(root), experiment=experiment, key=key)
    return path.is_file() and not _state(path)[1]


def unsent(root: Path, execution: str) -> list[str]:
    """Runs of `execution` of which the server has not got all, each with what it lacks."""
    paths = sorted(spool_directory(root).glob("*.jsonl"))
    own = {key: path for path in paths if _belongs(key := _state(path)[0], execution)}
    return [f"{key} ({what})" for key, path in own.items() if (what := not_arrived(path))]


def _belongs(key: str, execution: str) -> bool:
    return key == execution or key.startswith(f"{execution}/")


def _state(path: Path) -> tuple[str, bool]:
    """Key of the spool's run, and whether it was opened and not ended since."""
    key, is_open, offset = "", False, 0
    while (part := read_spool(path, offset=offset)).end_offset > offset:
        offset = part.end_offset
        for event in part.events:
            if event.kind in ("open", "end"):
                is_open = event.kind == "open"
            if event.header is not None:
                key = event.header.key
    return key, is_open
