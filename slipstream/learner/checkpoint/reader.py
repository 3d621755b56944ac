"""Reading a checkpoint: every file is checked once by one of the ranks, then each rank reads the slices it needs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.learner.checkpoint import on_disk
from slipstream.learner.checkpoint.boxes import Box
from slipstream.learner.checkpoint.copying import copy_numbers
from slipstream.learner.checkpoint.index import Index, index_from_json
from slipstream.learner.checkpoint.ranks import Ranks, on_all, this_host
from slipstream.learner.directories import existing_directory
from slipstream.learner.errors import CheckpointError, CheckpointStorageError

_TORCH_DTYPES = {name: dtype for dtype, name in on_disk.SAFETENSORS_DTYPES.items()}


class Reader:
    """The tensors of a checkpoint that `open_checkpoint` has checked."""

    def __init__(self, directory: Path, index: Index) -> None:
        self.index = index
        self._directory = directory
        self._open: dict[str, Any] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._closing.close()

    def read(self, name: str, box: Box, *, into: Tensor) -> None:
        """Fill `into`, which has the box's shape, with that part of a logical tensor; other parts are not read."""
        for each in self.index[name].slices:
            common = box.within(each.box)
            if common is not None:
                stored = self._file(each.file).get_slice(each.key)
                copy_numbers(stored[common.slices(each.box.offset)], into=into[common.slices(box.offset)])

    def read_whole(self, name: str) -> Tensor:
        """A logical tensor."""
        entry = self.index[name]
        tensor = torch.empty(entry.shape, dtype=_TORCH_DTYPES[entry.dtype])
        self.read(name, Box((0,) * len(entry.shape), entry.shape), into=tensor)
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._closing.enter_context(safe_open(self._directory / name, framework="pt"))
        return self._open[name]


def open_checkpoint(ranks: Ranks, path: Path) -> tuple[Reader, dict[str, Any]]:
    """Check that a checkpoint is whole, on all ranks together; returns its tensors and its `state.json`.

    Raises:
        FileNotFoundError: there is none, whatever else lies there.
        CheckpointError: a file is missing, cut short or altered.
        CheckpointStorageError: the ranks do not see the same checkpoint.
    """
    _require_same_storage(ranks, path)
    on_all(ranks, lambda: str(_existing(path)), error=FileNotFoundError)
    directory = _existing(path)
    (sums, *_) = on_all(ranks, lambda: _manifest(directory), error=CheckpointError)
    mine = sorted(sums)[ranks.rank :: ranks.size]
    on_all(ranks, lambda: _require_sums(directory, {name: sums[name] for name in mine}), error=CheckpointError)
    index = _index(directory, sums)
    return Reader(directory, index), json.loads((directory / on_disk.STATE).read_text())


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint that is whole; by one process, and without reading what nobody has touched.

    All files are written before the manifest, so a file that is no younger is as it was saved if its size is. A younger
    one, as in a copy, is read for its digest.

    Raises:
        FileNotFoundError: there is none, whatever else lies there.
        CheckpointError: a file is missing, cut short or altered.
    """
    directory = _existing(path)
    sums = _manifest(directory)
    saved_ns = (directory / on_disk.MANIFEST).stat().st_mtime_ns
    touched = {}
    for name, (num_bytes, xxh3) in sums.items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != num_bytes or file.stat().st_mtime_ns > saved_ns:
            touched[name] = [num_bytes, xxh3]
    _require_sums(directory, touched)
    _index(directory, sums)
    return json.loads((directory / on_disk.STATE).read_text())


def _existing(path: Path) -> Path:
    directory = existing_directory(path)
    names = {file.name for file in directory.iterdir()}
    if names.isdisjoint({on_disk.MANIFEST, on_disk.INDEX, on_disk.STATE, on_disk.rank_file(0)}):
        raise FileNotFoundError(f"no checkpoint at {path}: the directory holds none of its files")
    return directory


def _index(directory: Path, sums: dict[str, Any]) -> Index:
    index = index_from_json(json.loads((directory / on_disk.INDEX).read_text()))
    missing = {each.file for entry in index.values() for each in entry.slices} - sums.keys()
    if missing:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: {on_disk.MANIFEST} does not name {min(missing)}, which holds tensors"
        )
    return index


def _require_same_storage(ranks: Ranks, path: Path) -> None:
    seen = ranks.gather([this_host(), _fingerprint(path)])
    for rank, (host, fingerprint) in enumerate(seen):
        if fingerprint != seen[0][1]:
            raise CheckpointStorageError(
                f"checkpoint {path} must be the same for all ranks: rank {rank} on host {host} does not see the one "
                f"that rank 0 on host {seen[0][0]} sees; put it on storage that every host of the learner shares"
            )


def _fingerprint(path: Path) -> str:
    """Tells checkpoints apart; empty without one."""
    try:
        manifest = existing_directory(path) / on_disk.MANIFEST
        return on_disk.sum_of(manifest).xxh3 if manifest.is_file() else "incomplete"
    except FileNotFoundError:
        return ""


def _manifest(directory: Path) -> dict[str, Any]:
    file = directory / on_disk.MANIFEST
    if not file.is_file():
        raise CheckpointError(f"checkpoint {directory} is not whole: {file.name} is missing")
    try:
        manifest = json.loads(file.read_bytes())
        sums = {name: [entry["num_bytes"], entry["xxh3"]] for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {directory} is damaged: {file.name} cannot be read: {error}") from error
    if not {on_disk.INDEX, on_disk.STATE} <= sums.keys():
        raise CheckpointError(f"checkpoint {directory} is damaged: {file.name} does not name all files")
    return sums


def _require_sums(directory: Path, sums: dict[str, list[Any]]) -> None:
    for name, (num_bytes, xxh3) in sums.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {directory} is not whole: {name} is missing")
        if on_disk.sum_of(file) != on_disk.Sum(num_bytes, xxh3):
            raise CheckpointError(
                f"checkpoint {directory} is damaged: {name} does not have the digest it was saved with"
            )
