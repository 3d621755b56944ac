"""Read rows from the hub or from local files through `datasets` (the only import of it)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from slipstream.config import ConfigError, require
from slipstream.data.config import SourceConfig

_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def read_rows(source: SourceConfig, *, field: str, seed: int) -> datasets.Dataset:
    """The rows of `source`, at most `source.max_rows` of them, chosen by `seed`.

    Raises:
        ConfigError: there is no such file, directory or hub id, or it cannot be read, or it has no rows.
    """
    datasets.disable_progress_bars()
    local = _is_local(source.path)
    arguments = _local_arguments(source, field) if local else _hub_arguments(source, field)
    try:
        rows: Any = datasets.load_dataset(**arguments)
    except (OSError, ValueError, DatasetGenerationError) as error:
        fix = "is it JSON Lines or Parquet?" if local else "is the hub reachable and the split right?"
        cause = str(error.__cause__ or error).split("\n")[0]
        raise ConfigError(f"{field} must be readable, got {source.path!r} ({cause}); {fix}") from error
    require(len(rows) > 0, field, "must have rows", source.path, "the data set is empty")
    if source.max_rows is not None and source.max_rows < len(rows):
        rows = rows.shuffle(seed=seed).select(range(source.max_rows))
    return rows


def _is_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or Path(path).suffix in _KINDS or Path(path).is_dir()


def _local_arguments(source: SourceConfig, field: str) -> dict[str, Any]:
    path = Path(source.path).expanduser()
    require(path.exists(), field, "must be a file or directory that exists", source.path)
    files = sorted(file for file in path.iterdir() if file.suffix in _KINDS) if path.is_dir() else [path]
    require(bool(files), field, f"must hold {', '.join(_KINDS)} files", source.path)
    require(all(file.stat().st_size > 0 for file in files), field, "must have rows", source.path, "a file is empty")
    kinds = {_KINDS.get(file.suffix) for file in files}
    require(len(kinds) == 1 and None not in kinds, field, f"must be of one kind of {', '.join(_KINDS)}", source.path)
    return {"path": kinds.pop(), "data_files": [str(file) for file in files], "split": "train"}


def _hub_arguments(source: SourceConfig, field: str) -> dict[str, Any]:
    require(
        _HUB_ID.fullmatch(source.path) is not None,
        field,
        "must be a hub id (owner/name), a local file or directory, or `synthetic`",
        source.path,
    )
    return {"path": source.path, "name": source.subset, "split": source.split}
