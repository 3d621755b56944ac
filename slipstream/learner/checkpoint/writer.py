"""Writing a checkpoint in the background, by all ranks, into a directory that appears when it is whole.

Training waits for a copy of the numbers into host memory, nothing else. A thread of each rank then writes its file;
when all have reported theirs, the main rank writes the index, last the manifest with every file's digest, and renames.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.learner.checkpoint import on_disk
from slipstream.learner.checkpoint.boxes import Box
from slipstream.learner.checkpoint.copying import copy_numbers
from slipstream.learner.checkpoint.index import Slice, index_to_json, indexed, slice_key
from slipstream.learner.checkpoint.ranks import Ranks, on_all, this_host
from slipstream.learner.directories import begin_directory, partial_directory, put_in_place
from slipstream.learner.errors import CheckpointWriteError

_FORMAT = 1
_TOKEN = "token"
_POLL_S = 0.05


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

    def __init__(self, ranks: Ranks, *, visible_within_s: float = 10.0) -> None:
        self.ranks = ranks
        self.visible_within_s = visible_within_s
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, path: Path, parts: Iterable[Part], state: dict[str, Any]) -> None:
        """Copy `parts`, and write them and the JSON `state` in the background; waits for the checkpoint before it.

        Raises:
            CheckpointWriteError: the checkpoint before it could not be written.
        """
        self.wait()
        slices = self._copied(parts)
        self._thread = threading.Thread(target=self._run, args=(path, slices, state), name=f"checkpoint {path.name}")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            CheckpointWriteError: the last checkpoint could not be written; raised once.
        """
        if self._thread is not None:
            self._thread.join()
        self.raise_error()

    def raise_error(self) -> None:
        """Tell of a checkpoint that could not be written, without waiting for one that is being written."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _run(self, path: Path, slices: dict[Slice, Tensor], state: dict[str, Any]) -> None:
        try:
            self._write(path, slices, state)
        except Exception as error:  # noqa: BLE001  # a thread's error has nobody to go to: `raise_error` raises it
            self._error = error

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
        """In host memory, which is kept for the next checkpoint: touching new pages takes longer than copying."""
        buffers, slices = self._buffers, {}
        file = on_disk.rank_file(self.ranks.rank)
        for part in parts:
            dtype = part.runs[0].dtype
            each = Slice(part.name, on_disk.SAFETENSORS_DTYPES[dtype], part.whole, part.box, file)
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


def _write_mine(ranks: Ranks, path: Path, token: str, slices: dict[Slice, Tensor], patience_s: float) -> dict[str, Any]:
    directory = partial_directory(path)
    file = directory / _TOKEN
    if not _soon(lambda: file.is_file() and file.read_text() == token, patience_s):
        raise CheckpointWriteError(
            f"does not see the directory {directory} that rank 0 on host {token.split()[0]} has made: put checkpoints "
            "on storage that every host of the learner shares"
        )
    name = on_disk.rank_file(ranks.rank)
    total = on_disk.write_tensors(directory / name, {slice_key(s.name, s.box): tensor for s, tensor in slices.items()})
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
        sums[report["file"]] = on_disk.Sum(num_bytes, report["xxh3"])
    index = indexed(
        Slice(name, dtype, tuple(whole), Box(tuple(offset), tuple(shape)), report["file"])
        for report in reports
        for name, dtype, whole, offset, shape in report["slices"]
    )
    sums[on_disk.INDEX] = on_disk.write_json(directory / on_disk.INDEX, index_to_json(index))
    sums[on_disk.STATE] = on_disk.write_json(directory / on_disk.STATE, state)
    (directory / _TOKEN).unlink()
    listed = {name: {"num_bytes": each.num_bytes, "xxh3": each.xxh3} for name, each in sums.items()}
    on_disk.write_json(directory / on_disk.MANIFEST, {"format": _FORMAT, "files": listed})
    on_disk.flush_directory(directory)
    put_in_place(path)
    on_disk.flush_directory(path.parent)


def _soon(holds: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
