"""Checkpoints on disk, written and read by all ranks of a learner together.

Training waits for a copy of the numbers into host memory, nothing else. A thread of each rank then writes its file;
when all have reported theirs, the main rank writes the index, last the manifest with every file's digest, and renames.
To read, every file is checked once by one of the ranks, then each rank reads the slices it needs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open
from torch import Tensor

from slipstream.learner.checkpoint import CheckpointError, CheckpointStorageError, CheckpointWriteError
from slipstream.learner.checkpoint.boxes import Box, Index, Slice, index_from_json, index_to_json, indexed, slice_key
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
_TIMEOUT = timedelta(minutes=30)  # the slowest rank's disk may take this much longer than the fastest's
_FORMAT = 1
_TOKEN = "token"
_POLL_S = 0.05
_TORCH_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in SAFETENSORS_DTYPES.items()}
DTYPES = {dtype: code for code, dtype in _TORCH_DTYPES.items()}


def rank_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Sum:
    """Write contiguous CPU tensors as one safetensors file.

    The library's own writer gives no digest, so that the file would have to be read again for one.
    """
    header = safetensors_header((name, DTYPES[each.dtype], each.shape, each.nbytes) for name, each in tensors.items())
    with _hashed(path) as write:
        write(header)
        for tensor in tensors.values():
            for block in _blocks(tensor):
                write(block)
    return write.sum()


def write_json(path: Path, value: Any) -> Sum:
    """Write JSON without NaN, which not every reader knows."""
    with _hashed(path) as write:
        write(json.dumps(value, allow_nan=False).encode())
    return write.sum()


class _Writer:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest, self._num_bytes = stream, xxhash.xxh3_128(), 0

    def __call__(self, data: Any) -> None:
        self._digest.update(data)
        self._num_bytes += self._stream.write(data)

    def sum(self) -> Sum:
        return Sum(self._num_bytes, self._digest.hexdigest())


@contextmanager
def _hashed(path: Path) -> Iterator[_Writer]:
    with path.open("wb") as stream:
        yield _Writer(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _blocks(tensor: Tensor) -> Iterable[memoryview]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    return (data[start : start + _BLOCK_BYTES] for start in range(0, len(data), _BLOCK_BYTES))


def copy_numbers(source: Tensor, *, into: Tensor) -> None:
    """Copy bit for bit, between tensors of one type and shape; from or to a GPU without waiting for the end of it.

    Within the host's memory by numpy: torch shares out each tensor over its threads and waits for all of them, which
    on busy cores was a millisecond for each of hundreds of tensors.
    """
    if source.is_cuda or into.is_cuda:
        into.copy_(source, non_blocking=True)
        return
    integers = _INTEGERS[source.element_size()]
    np.copyto(into.detach().view(integers).numpy(), source.detach().view(integers).numpy())


class LearnerRanks:
    """The learner's process group, over gloo connections of its own: a background thread may use them. Rank 0 is main.

    Make it on every rank at the same point of the program, for a process group is made collectively.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Gather what JSON can hold of every rank, in rank order; waits for all of them."""
        data = json.dumps(value).encode()
        if self._group is None:
            return [json.loads(data)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self._group)
        return [json.loads(text.numpy().tobytes()) for text in texts]


def on_all(ranks: LearnerRanks, work: Callable[[], Any], *, error: type[Exception]) -> list[Any]:
    """Do a part of the work on each rank, and wait until all have; what they returned, in rank order.

    Raises:
        error: a rank failed; all raise it, with that rank's words.
    """
    problem, value, cause = None, None, None
    try:
        value = work()
    except Exception as caught:  # noqa: BLE001  # whatever it is, the other ranks wait to hear of it; raised below
        cause = caught
        problem = str(caught) if isinstance(caught, error) else f"{type(caught).__name__}: {caught}"
    where = f"rank {ranks.rank} on host {this_host()}: " if ranks.size > 1 else ""
    reports = ranks.gather([None if problem is None else where + problem, value])
    problems = [problem for problem, _ in reports if problem is not None]
    if problems:
        raise error("; ".join(problems)) from cause
    return [value for _, value in reports]


def this_host() -> str:
    """Name of the machine that a rank runs on, for errors."""
    return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a logical tensor that this rank writes: runs of numbers, one after the other."""

    name: str
    whole: tuple[int, ...]
    box: Box
    runs: tuple[Tensor, ...]


class CheckpointWriter:
    """Writes one checkpoint at a time; each method is called on all ranks, in the same order.

    Attributes:
        ranks: what the ranks agree through; used by the background thread alone while it runs.
        visible_within_s: how long a new file may stay unseen by other hosts, as on a network file system.
    """

    def __init__(self, ranks: LearnerRanks, *, visible_within_s: float = 10.0) -> None:
        self.ranks = ranks
        self.visible_within_s = visible_within_s
        self._buffers: dict[str, Tensor] = {}
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, path: Path, parts: Iterable[Part], state: dict[str, Any]) -> None:
        """Copy `parts`, and write them and the JSON `state` in the background; waits for the checkpoint before it.

        Raises:
            CheckpointWriteError: the checkpoint before it could not be written.
        """
        self.wait()
        slices = self._copied(parts)
        self._writing = self._background.submit(self._write, path, slices, state)

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointWriteError: the last checkpoint could not be written; raised once.
        """
        if self._writing is not None:
            futures.wait([self._writing])
        self.raise_error()

    def raise_error(self) -> None:
        """Tell of a checkpoint that could not be written, without waiting for one that is being written."""
        if self._writing is not None and self._writing.done():
            written, self._writing = self._writing, None
            written.result()

    def _write(self, path: Path, slices: dict[Slice, Tensor], state: dict[str, Any]) -> None:
        """Collective: whole or not at all, and if not, an error on every rank."""
        ranks, patience_s = self.ranks, self.visible_within_s
        is_main = ranks.rank == 0
        published = False

        def publish() -> None:
            if is_main:
                _publish(path, reports, state, patience_s)

        try:
            (token, *_) = on_all(ranks, lambda: _begin(path) if is_main else None, error=CheckpointWriteError)
            reports = on_all(
                ranks, lambda: _write_mine(ranks, path, token, slices, patience_s), error=CheckpointWriteError
            )
            on_all(ranks, publish, error=CheckpointWriteError)
            published = True
        except Exception as error:  # also a rank that is gone: then gathering fails
            raise CheckpointWriteError(f"checkpoint {path} could not be written: {error}") from error
        finally:
            if is_main and not published:
                # What is half-written helps nobody, and may have filled the disk.
                shutil.rmtree(partial_directory(path), ignore_errors=True)

    def _copied(self, parts: Iterable[Part]) -> dict[Slice, Tensor]:
        """Copy to host memory, which is kept for the next checkpoint: touching new pages takes longer than copying."""
        buffers, slices = self._buffers, {}
        file = rank_file(self.ranks.rank)
        for part in parts:
            dtype = part.runs[0].dtype
            each = Slice(part.name, DTYPES[dtype], part.whole, part.box, file)
            buffer = buffers.get(each.key)
            if buffer is None or buffer.shape != part.box.shape or buffer.dtype is not dtype:
                buffer = torch.empty(part.box.shape, dtype=dtype, pin_memory=torch.cuda.is_available())
            slices[each] = buffers[each.key] = buffer
            for target, run in zip(buffer.view(-1).split([run.numel() for run in part.runs]), part.runs, strict=True):
                copy_numbers(run, into=target)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return slices


def _begin(path: Path) -> str:
    token = f"{this_host()} {uuid.uuid4()}"
    (begin_directory(path) / _TOKEN).write_text(token)
    return token


def _write_mine(
    ranks: LearnerRanks, path: Path, token: str, slices: dict[Slice, Tensor], patience_s: float
) -> dict[str, Any]:
    directory = partial_directory(path)
    file = directory / _TOKEN
    if not _soon(lambda: file.is_file() and file.read_text() == token, patience_s):
        raise CheckpointWriteError(
            f"does not see the directory {directory} that rank 0 on host {token.split()[0]} has made: put checkpoints "
            "on storage that every host of the learner shares"
        )
    name = rank_file(ranks.rank)
    total = write_tensors(directory / name, {slice_key(s.name, s.box): tensor for s, tensor in slices.items()})
    described = [[s.name, s.dtype, s.whole, s.box.offset, s.box.shape] for s in slices]
    return {"file": name, "num_bytes": total.num_bytes, "xxh3": total.xxh3, "slices": described}


def _publish(path: Path, reports: list[dict[str, Any]], state: dict[str, Any], patience_s: float) -> None:
    directory = partial_directory(path)
    sums = {}
    for rank, report in enumerate(reports):
        file = directory / report["file"]
        num_bytes = report["num_bytes"]
        if not _soon(lambda file=file, size=num_bytes: file.is_file() and file.stat().st_size == size, patience_s):
            raise CheckpointWriteError(f"does not see {file}, which rank {rank} has written: is the storage shared?")
        sums[report["file"]] = Sum(num_bytes, report["xxh3"])
    index = indexed(
        Slice(name, dtype, tuple(whole), Box(tuple(offset), tuple(shape)), report["file"])
        for report in reports
        for name, dtype, whole, offset, shape in report["slices"]
    )
    sums[INDEX] = write_json(directory / INDEX, index_to_json(index))
    sums[STATE] = write_json(directory / STATE, state)
    (directory / _TOKEN).unlink()
    listed = {name: {"num_bytes": each.num_bytes, "xxh3": each.xxh3} for name, each in sums.items()}
    write_json(directory / MANIFEST, {"format": _FORMAT, "files": listed})
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
    """The tensors of a checkpoint that `open_checkpoint` has checked; its files are closed at the end of the block."""

    def __init__(self, directory: Path, index: Index) -> None:
        super().__init__()
        self.index = index
        self._directory = directory
        self._open: dict[str, Any] = {}

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
            self._open[name] = self.enter_context(safe_open(self._directory / name, framework="pt"))
        return self._open[name]


def open_checkpoint(ranks: LearnerRanks, path: Path) -> tuple[Reader, dict[str, Any]]:
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
    return Reader(directory, index), json.loads((directory / STATE).read_text())


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
    saved_ns = (directory / MANIFEST).stat().st_mtime_ns
    touched = {}
    for name, (num_bytes, xxh3) in sums.items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != num_bytes or file.stat().st_mtime_ns > saved_ns:
            touched[name] = [num_bytes, xxh3]
    _require_sums(directory, touched)
    _index(directory, sums)
    return json.loads((directory / STATE).read_text())


def _existing(path: Path) -> Path:
    directory = existing_directory(path)
    names = {file.name for file in directory.iterdir()}
    if names.isdisjoint({MANIFEST, INDEX, STATE, rank_file(0)}):
        raise FileNotFoundError(f"no checkpoint at {path}: the directory holds none of its files")
    return directory


def _index(directory: Path, sums: dict[str, Any]) -> Index:
    index = index_from_json(json.loads((directory / INDEX).read_text()))
    missing = {each.file for entry in index.values() for each in entry.slices} - sums.keys()
    if missing:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: {MANIFEST} does not name {min(missing)}, which holds tensors"
        )
    return index


def _require_same_storage(ranks: LearnerRanks, path: Path) -> None:
    seen = ranks.gather([this_host(), _fingerprint(path)])
    for rank, (host, fingerprint) in enumerate(seen):
        if fingerprint != seen[0][1]:
            raise CheckpointStorageError(
                f"checkpoint {path} must be the same for all ranks: rank {rank} on host {host} does not see the one "
                f"that rank 0 on host {seen[0][0]} sees; put it on storage that every host of the learner shares"
            )


def _fingerprint(path: Path) -> str:
    """A text that tells checkpoints apart; empty without one."""
    try:
        manifest = existing_directory(path) / MANIFEST
        return sum_of(manifest).xxh3 if manifest.is_file() else "incomplete"
    except FileNotFoundError:
        return ""


def _manifest(directory: Path) -> dict[str, Any]:
    file = directory / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"checkpoint {directory} is not whole: {file.name} is missing")
    try:
        manifest = json.loads(file.read_bytes())
        sums = {name: [entry["num_bytes"], entry["xxh3"]] for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {directory} is damaged: {file.name} cannot be read: {error}") from error
    if not {INDEX, STATE} <= sums.keys():
        raise CheckpointError(f"checkpoint {directory} is damaged: {file.name} does not name all files")
    return sums


def _require_sums(directory: Path, sums: dict[str, list[Any]]) -> None:
    for name, (num_bytes, xxh3) in sums.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {directory} is not whole: {name} is missing")
        if sum_of(file) != Sum(num_bytes, xxh3):
            raise CheckpointError(
                f"checkpoint {directory} is damaged: {name} does not have the digest it was saved with"
            )
