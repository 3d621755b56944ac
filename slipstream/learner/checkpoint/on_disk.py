"""Checkpoint files, which all ranks of a learner write and read together.

A save copies the rank's tensors into host memory, the only part that training waits for. A background thread of each
rank then writes one file. The main rank collects the reports of all ranks, writes the index, then the manifest with a
digest of every file, and renames the directory. A load verifies each file once, on one of the ranks; then each rank
reads the slices it needs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open
from torch import Tensor

from slipstream.learner.checkpoint import CheckpointError, CheckpointStorageError, CheckpointWriteError
from slipstream.learner.checkpoint.boxes import Box, Index, Slice, index_from_json, index_to_json, indexed
from slipstream.storage import (
    SAFETENSORS_DTYPES,
    Sum,
    begin_directory,
    existing_directory,
    flush_directory,
    partial_directory,
    put_in_place,
    safetensors_header,
    sum_of,
)

MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
_BLOCK_BYTES = 16 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TIMEOUT = timedelta(minutes=30)  # the slowest rank may finish writing this much later than the fastest
_POLL_S = 0.05
_TORCH_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in SAFETENSORS_DTYPES.items()}
DTYPES = {dtype: code for code, dtype in _TORCH_DTYPES.items()}


def rank_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Sum:
    """Write contiguous CPU tensors as one safetensors file; the library's own writer returns no digest."""
    header = safetensors_header((name, DTYPES[each.dtype], each.shape, each.nbytes) for name, each in tensors.items())
    return _write_blocks(path, chain([header], *map(_blocks, tensors.values())))


def write_json(path: Path, value: Any) -> Sum:
    """Write JSON without NaN, which not every reader accepts."""
    return _write_blocks(path, [json.dumps(value, allow_nan=False).encode()])


def _write_blocks(path: Path, blocks: Iterable[bytes | memoryview]) -> Sum:
    digest, num_bytes = xxhash.xxh3_128(), 0
    with path.open("wb") as stream:
        for block in blocks:
            digest.update(block)
            num_bytes += stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    return Sum(num_bytes, digest.hexdigest())


def _blocks(tensor: Tensor) -> Iterable[memoryview]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    return (data[start : start + _BLOCK_BYTES] for start in range(0, len(data), _BLOCK_BYTES))


def copy_numbers(source: Tensor, *, into: Tensor) -> None:
    """Copy bit for bit between tensors of one type and shape; a copy from or to a GPU is only started.

    Host memory is copied by numpy. Torch splits each tensor over its threads and waits for all of them, which on busy
    cores took a millisecond for each of hundreds of tensors.
    """
    if source.is_cuda or into.is_cuda:
        into.copy_(source, non_blocking=True)
        return
    integers = _INTEGERS[source.element_size()]
    np.copyto(into.detach().view(integers).numpy(), source.detach().view(integers).numpy())


class LearnerRanks:
    """The learner's ranks over gloo connections of their own, which a background thread may use. Rank 0 is main.

    Every rank constructs this object at the same point of the program, because a process group is made collectively.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Gather a small object from every rank, in rank order."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value, group=self._group)
        return found


def on_all(ranks: LearnerRanks, work: Callable[[], Any], *, error: type[Exception]) -> list[Any]:
    """Call `work` on each rank and wait for all ranks; returns their results in rank order.

    Raises:
        error: `work` failed on a rank; every rank raises it, with that rank's message.
    """
    problem, value, cause = None, None, None
    try:
        value = work()
    except Exception as caught:  # noqa: BLE001  # the other ranks wait for this report; raised below
        cause = caught
        where = f"rank {ranks.rank} on host {socket.gethostname()}: " if ranks.size > 1 else ""
        problem = where + (str(caught) if isinstance(caught, error) else f"{type(caught).__name__}: {caught}")
    reports = ranks.gather((problem, value))
    if problems := [problem for problem, _ in reports if problem is not None]:
        raise error("; ".join(problems)) from cause
    return [value for _, value in reports]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a logical tensor, and its numbers in this rank's memory."""

    name: str
    whole: tuple[int, ...]
    box: Box
    numbers: Tensor


Report = tuple[list[Slice], Sum, str]
"""Slices, size and digest of a rank's file, and the rank's host."""


class CheckpointWriter:
    """Writer of one checkpoint at a time; every rank calls each method, in the same order."""

    def __init__(self, ranks: LearnerRanks, *, visible_within_s: float = 10.0) -> None:
        """Write with these ranks, which the background thread alone uses while it runs.

        Args:
            visible_within_s: how long a new file may stay unseen by other hosts, as on a network file system.
        """
        self._ranks = ranks
        self._visible_within_s = visible_within_s
        self._buffers: dict[str, Tensor] = {}
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, path: Path, parts: Iterable[Part], state: dict[str, Any]) -> None:
        """Copy `parts` and write them, with the JSON `state`, in the background; waits for the checkpoint before.

        Raises:
            CheckpointWriteError: the checkpoint before could not be written.
        """
        self.wait()
        slices = self._copied(parts)
        self._writing = self._background.submit(self._write, path, slices, state)

    def wait(self) -> None:
        """Wait until nothing is being written; raises the error of the last checkpoint once."""
        if self._writing is not None:
            futures.wait([self._writing])
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a checkpoint that failed, without waiting for one that is being written."""
        if self._writing is not None and self._writing.done():
            written, self._writing = self._writing, None
            written.result()

    def _write(self, path: Path, slices: dict[Slice, Tensor], state: dict[str, Any]) -> None:
        """Write the whole checkpoint or nothing; a failure is an error on every rank."""
        ranks, patience_s, error = self._ranks, self._visible_within_s, CheckpointWriteError
        is_main = ranks.rank == 0
        try:
            on_all(ranks, lambda: begin_directory(path) if is_main else None, error=error)
            reports = on_all(ranks, lambda: _write_mine(ranks, path, slices), error=error)
            on_all(ranks, lambda: _publish(path, reports, state, patience_s) if is_main else None, error=error)
        except Exception as caught:  # gathering fails too, when a rank has died
            if is_main:  # a partial checkpoint is of no use, and may have filled the disk
                shutil.rmtree(partial_directory(path), ignore_errors=True)
            raise CheckpointWriteError(f"checkpoint {path} could not be written: {caught}") from caught

    def _copied(self, parts: Iterable[Part]) -> dict[Slice, Tensor]:
        """Copy to buffers that the next checkpoint uses again: touching new pages takes longer than copying."""
        buffers, slices = self._buffers, {}
        file = rank_file(self._ranks.rank)
        for part in parts:
            each = Slice(part.name, DTYPES[part.numbers.dtype], part.whole, part.box, file)
            buffer, numbers = buffers.get(each.key), part.numbers
            if buffer is None or buffer.shape != numbers.shape or buffer.dtype is not numbers.dtype:
                buffer = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=torch.cuda.is_available())
            slices[each] = buffers[each.key] = buffer
            copy_numbers(numbers, into=buffer)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return slices


def _write_mine(ranks: LearnerRanks, path: Path, slices: dict[Slice, Tensor]) -> Report:
    directory = partial_directory(path)
    directory.mkdir(parents=True, exist_ok=True)  # rank 0 has made it, which a network file system may show later
    tensors = {each.key: tensor for each, tensor in slices.items()}
    return list(slices), write_tensors(directory / rank_file(ranks.rank), tensors), socket.gethostname()


def _publish(path: Path, reports: list[Report], state: dict[str, Any], patience_s: float) -> None:
    directory = partial_directory(path)
    sums = {}
    for rank, (_, total, host) in enumerate(reports):
        file = directory / rank_file(rank)
        if not _soon(lambda f=file, n=total.num_bytes: f.is_file() and f.stat().st_size == n, patience_s):
            fix = "put checkpoints on storage that every host of the learner shares"
            raise CheckpointWriteError(f"does not see {file}, which rank {rank} on host {host} has written: {fix}")
        sums[file.name] = total
    index = indexed(chain.from_iterable(slices for slices, *_ in reports))
    sums[INDEX] = write_json(directory / INDEX, index_to_json(index))
    sums[STATE] = write_json(directory / STATE, state)
    listed = {name: asdict(each) for name, each in sums.items()}
    write_json(directory / MANIFEST, {"format": 1, "files": listed})
    flush_directory(directory)
    put_in_place(path)
    flush_directory(path.parent)


def _soon(holds: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


class Reader(ExitStack):
    """Tensors of a checkpoint that `open_checkpoint` has verified; the end of the block closes its files."""

    def __init__(self, directory: Path, index: Index) -> None:
        super().__init__()
        self.index = index
        self._directory = directory
        self._open: dict[str, Any] = {}

    def read(self, name: str, box: Box, *, into: Tensor) -> None:
        """Fill `into`, which has the box's shape, with that box of a logical tensor; nothing else is read."""
        for each in self.index[name]:
            common = box.within(each.box)
            if common is not None:
                stored = self._file(each.file).get_slice(each.key)
                copy_numbers(stored[common.slices(each.box.offset)], into=into[common.slices(box.offset)])

    def read_whole(self, name: str) -> Tensor:
        """Read a whole logical tensor."""
        first = self.index[name][0]
        tensor = torch.empty(first.whole, dtype=_TORCH_DTYPES[first.dtype])
        self.read(name, Box((0,) * len(first.whole), first.whole), into=tensor)
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self.enter_context(safe_open(self._directory / name, framework="pt"))
        return self._open[name]


def open_checkpoint(ranks: LearnerRanks, path: Path) -> tuple[Reader, dict[str, Any]]:
    """Verify a checkpoint, on all ranks together; returns its tensors and its `state.json`.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`.
        CheckpointError: a file is missing, truncated or altered.
        CheckpointStorageError: the ranks do not see the same checkpoint.
    """
    _require_same_storage(ranks, path)
    directory = _existing(path)  # every rank sees the same checkpoint, so all of them raise or none

    def verified() -> dict[str, Sum]:
        sums = _manifest(directory)
        _require_sums(directory, {name: sums[name] for name in sorted(sums)[ranks.rank :: ranks.size]})
        return sums

    (sums, *_) = on_all(ranks, verified, error=CheckpointError)
    return Reader(directory, _index(directory, sums)), json.loads((directory / STATE).read_text())


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """The `state.json` of a whole checkpoint, read by one process.

    All files are written before the manifest, so a file that is no younger is unchanged if its size is. A younger file,
    as in a copy, is read for its digest.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`.
        CheckpointError: a file is missing, truncated or altered.
    """
    directory = _existing(path)
    sums = _manifest(directory)
    saved_ns = (directory / MANIFEST).stat().st_mtime_ns

    def is_untouched(name: str) -> bool:
        file = directory / name
        return file.is_file() and file.stat().st_size == sums[name].num_bytes and file.stat().st_mtime_ns <= saved_ns

    _require_sums(directory, {name: each for name, each in sums.items() if not is_untouched(name)})
    _index(directory, sums)
    return json.loads((directory / STATE).read_text())


def _existing(path: Path) -> Path:
    directory = existing_directory(path)
    names = {file.name for file in directory.iterdir()}
    if names.isdisjoint({MANIFEST, INDEX, STATE, rank_file(0)}):
        raise FileNotFoundError(f"no checkpoint at {path}: the directory holds none of its files")
    return directory


def _index(directory: Path, sums: Mapping[str, Sum]) -> Index:
    index = index_from_json(json.loads((directory / INDEX).read_text()))
    missing = {each.file for slices in index.values() for each in slices} - sums.keys()
    if missing:
        raise _damaged(directory, f"{MANIFEST} does not name {min(missing)}, which holds tensors")
    return index


def _require_same_storage(ranks: LearnerRanks, path: Path) -> None:
    seen = ranks.gather((socket.gethostname(), _fingerprint(path)))
    for rank, (host, fingerprint) in enumerate(seen):
        if fingerprint != seen[0][1]:
            got = f"rank {rank} on host {host} does not see the one that rank 0 on host {seen[0][0]} sees"
            fix = "put it on storage that every host of the learner shares"
            raise CheckpointStorageError(f"checkpoint {path} must be the same for all ranks: {got}; {fix}")


def _fingerprint(path: Path) -> str:
    """Digest of the manifest, which tells checkpoints apart; empty without a checkpoint."""
    try:
        manifest = _existing(path) / MANIFEST
    except FileNotFoundError:
        return ""
    return sum_of(manifest).xxh3 if manifest.is_file() else "incomplete"


def _manifest(directory: Path) -> dict[str, Sum]:
    file = directory / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"checkpoint {directory} is not whole: {file.name} is missing")
    try:
        sums = {name: Sum(**entry) for name, entry in json.loads(file.read_bytes())["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(directory, f"{file.name} cannot be read: {error}") from error
    if not {INDEX, STATE} <= sums.keys():
        raise _damaged(directory, f"{file.name} does not name all files")
    return sums


def _require_sums(directory: Path, sums: Mapping[str, Sum]) -> None:
    for name, total in sums.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {directory} is not whole: {name} is missing")
        if sum_of(file) != total:
            raise _damaged(directory, f"{name} does not have the digest it was saved with")


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {directory} is damaged: {what}")
