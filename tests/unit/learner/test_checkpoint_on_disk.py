"""A checkpoint's files, and ranks that write and read one together; here each is a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from slipstream.learner.checkpoint import CheckpointError, CheckpointStorageError, CheckpointWriteError, on_disk
from slipstream.learner.checkpoint.boxes import Box, Slice, index_from_json, index_to_json, indexed
from slipstream.learner.checkpoint.on_disk import CheckpointWriter, LearnerRanks, Part, Sum, open_checkpoint
from tests.unit.learner.policies import flip


@pytest.mark.parametrize("dtype", on_disk.DTYPES)
def test_tensors_of_each_type_are_read_back_by_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a[0,0]": torch.arange(6).to(dtype).view(2, 3), "b": torch.arange(5).to(dtype), "c": torch.empty(0, 2)}
    total = on_disk.write_tensors(tmp_path / "f", tensors)
    read = load_file(tmp_path / "f")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    data = (tmp_path / "f").read_bytes()
    assert total == Sum(len(data), xxhash.xxh3_128(data).hexdigest()) == on_disk.sum_of(tmp_path / "f")


def test_json_without_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        on_disk.write_json(tmp_path / "f", {"loss": float("nan")})


def _slice(offset: tuple[int, ...], shape: tuple[int, ...], *, dtype: str = "F32", file: str = "f") -> Slice:
    return Slice("w", dtype, (2, 4), Box(offset, shape), file)


@pytest.mark.parametrize(
    "slices",
    [
        [_slice((0, 0), (2, 3))],
        [_slice((0, 0), (2, 3)), _slice((0, 2), (2, 2))],
        [_slice((0, 0), (2, 4)), _slice((0, 0), (2, 4), file="g")],
        [_slice((0, 0), (2, 3)), _slice((0, 3), (2, 2))],
        [_slice((0, 0), (2, 3)), _slice((1, 0), (1, 2))],
    ],
    ids=["hole", "overlap", "replica", "beyond", "right number of elements, wrong places"],
)
def test_slices_that_do_not_cover_a_tensor_once_are_refused(slices: list[Slice]) -> None:
    with pytest.raises(ValueError, match="slices of w must cover its shape"):
        indexed(slices)


def test_slices_of_two_types_are_refused_and_an_index_comes_back_from_its_json() -> None:
    index = indexed([_slice((0, 0), (2, 3)), _slice((0, 3), (2, 1), file="g")])
    assert [each.key for each in index["w"]] == ["w[0,0]", "w[0,3]"]
    assert index_from_json(index_to_json(index)) == index
    with pytest.raises(ValueError, match="slices of w must agree"):
        indexed([_slice((0, 0), (2, 3)), _slice((0, 3), (2, 1), dtype="BF16")])


class ThreadRanks(LearnerRanks):
    """One of several ranks that exchange what they gather through a list."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(timeout=30)
        found = list(self._values)
        self._barrier.wait(timeout=30)
        return found


def ranks(size: int) -> list[ThreadRanks]:
    values, barrier = [None] * size, threading.Barrier(size)
    return [ThreadRanks(rank, values, barrier) for rank in range(size)]


def on_each(function: Callable[[ThreadRanks], Any], size: int = 2) -> list[Any]:
    """What each rank returned or raised."""

    def run(each: ThreadRanks) -> Any:
        try:
            return function(each)
        except Exception as error:  # noqa: BLE001  # what a rank raises is what the tests look at
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, ranks(size)))


def rows(rank: int, value: float = 0.0) -> Part:
    """Row `rank` of a [2, 3] tensor."""
    return Part("weight/w", (2, 3), Box((rank, 0), (1, 3)), torch.arange(3.0)[None] + 10 * rank + value)


def save(each: ThreadRanks, path: Path, value: float = 0.0) -> None:
    writer = CheckpointWriter(each, visible_within_s=0.2)
    writer.save(path, [rows(each.rank, value)], {"value": value})
    writer.wait()


def saved(path: Path, value: float = 0.0) -> Path:
    assert on_each(lambda each: save(each, path, value)) == [None, None]
    return path


def test_two_ranks_write_a_file_each_and_one_rank_reads_any_part(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    written = {"index.json", "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "state.json"}
    assert {file.name for file in path.iterdir()} == written
    reader, state = open_checkpoint(ranks(1)[0], path)
    with reader:
        assert torch.equal(reader.read_whole("weight/w"), torch.tensor([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]))
        part = torch.empty(2, 1)
        reader.read("weight/w", Box((0, 2), (2, 1)), into=part)
    assert part.tolist() == [[2.0], [12.0]]
    assert state == {"value": 0.0}
    saved(path, 2.0)  # takes the place of the one before it
    assert [state for _, state in on_each(lambda each: open_checkpoint(each, path))] == [{"value": 2.0}] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_numbers_that_change_after_save_returned_are_not_written(tmp_path: Path) -> None:
    (alone,) = ranks(1)
    numbers = torch.ones(1_000_000)
    box = Box((0,), (1_000_000,))
    writer = CheckpointWriter(alone)
    writer.save(tmp_path / "a", [Part("weight/w", box.shape, box, numbers)], {})
    numbers.fill_(2.0)
    writer.save(tmp_path / "b", [Part("weight/w", box.shape, box, numbers)], {})  # waits: its buffers are the same
    numbers.fill_(3.0)
    writer.wait()
    for name, expected in (("a", 1.0), ("b", 2.0)):
        reader, _ = open_checkpoint(alone, tmp_path / name)
        with reader:
            assert bool((reader.read_whole("weight/w") == expected).all())


def test_training_goes_on_while_another_rank_still_writes(tmp_path: Path) -> None:
    """One rank's `save` returns although the other has not begun: only the background threads meet."""
    first, second = ranks(2)
    writer = CheckpointWriter(first)
    writer.save(tmp_path / "c", [rows(0)], {})
    writer.raise_error()
    assert not (tmp_path / "c").exists()
    other = CheckpointWriter(second)
    other.save(tmp_path / "c", [rows(1)], {})
    writer.wait()
    other.wait()
    assert (tmp_path / "c" / "manifest.json").is_file()


def test_what_one_rank_cannot_write_is_raised_by_all_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1.0)

    def fails(each: ThreadRanks) -> None:
        writer = CheckpointWriter(each)
        if each.rank == 1:  # claims the other's row
            writer.save(path, [Part("weight/w", (2, 3), Box((0, 0), (1, 3)), torch.ones(1, 3))], {})
        else:
            writer.save(path, [rows(0)], {})
        writer.wait()

    errors = on_each(fails)
    assert all(isinstance(error, CheckpointWriteError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert "slices of weight/w must cover its shape (2, 3) once" in str(errors[0])
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert on_each(lambda each: open_checkpoint(each, path)[1]) == [{"value": 1.0}] * 2


class LonelyRanks(LearnerRanks):
    """The first of two, whose partner has died: gloo says that the connection is closed."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2

    def gather(self, value: Any) -> list[Any]:
        raise RuntimeError("Connection closed by peer")


def test_a_rank_that_dies_while_a_checkpoint_is_written_ends_it_on_the_others(tmp_path: Path) -> None:
    writer = CheckpointWriter(LonelyRanks())
    writer.save(tmp_path / "c", [rows(0)], {})
    with pytest.raises(CheckpointWriteError, match=r"c could not be written: Connection closed by peer"):
        writer.wait()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_writer_is_raised_once_by_the_next_step(tmp_path: Path) -> None:
    (alone,) = ranks(1)
    writer = CheckpointWriter(alone)
    (tmp_path / "file").touch()
    writer.save(tmp_path / "file" / "c", [], {})
    deadline = time.monotonic() + 30
    with pytest.raises(CheckpointWriteError, match="could not be written: NotADirectoryError"):
        while time.monotonic() < deadline:
            writer.raise_error()
    writer.raise_error()


def test_ranks_whose_hosts_share_no_storage_are_told_so_when_they_save_and_load(tmp_path: Path) -> None:
    for host in range(2):
        (tmp_path / str(host) / "c.partial").mkdir(parents=True)  # left there by a run before: not the same directory
    errors = on_each(lambda each: save(each, tmp_path / str(each.rank) / "c"))
    assert all(isinstance(error, CheckpointWriteError) for error in errors)
    assert "rank-00001.safetensors, which rank 1 on host " in str(errors[0])
    assert "put checkpoints on storage that every host of the learner shares" in str(errors[0])
    assert not (tmp_path / "0" / "c.partial").exists()
    for host in range(2):  # the checkpoint of one of them alone, then another on the other
        saved(tmp_path / str(host) / "c", float(host))
        errors = on_each(lambda each: open_checkpoint(each, tmp_path / str(each.rank) / "c"))
        assert all(isinstance(error, CheckpointStorageError) for error in errors)
        assert "put it on storage that every host of the learner shares" in str(errors[1])


def refusals(path: Path) -> list[Any]:
    """What two ranks raise when they open it together, and one process when it looks alone."""
    with pytest.raises(CheckpointError) as caught:
        on_disk.inspect_checkpoint(path)
    return [*on_each(lambda each: open_checkpoint(each, path)), caught.value]


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "index.json", "state.json"])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, "is damaged"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
        (Path.unlink, "is not whole"),
    ],
    ids=["flipped", "cut", "missing"],
)
def test_a_damaged_file_is_named_by_every_rank(
    name: str, damage: Callable[[Path], object], what: str, tmp_path: Path
) -> None:
    damage(saved(tmp_path / "c") / name)
    for error in refusals(tmp_path / "c"):
        assert isinstance(error, CheckpointError)
        assert name in str(error) and what in str(error)


def unnamed(manifest: str) -> str:
    content = json.loads(manifest)
    del content["files"]["rank-00001.safetensors"]
    return json.dumps(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "is not whole: manifest.json is missing"),
        (lambda _: "", "is damaged: manifest.json cannot be read"),
        (lambda manifest: manifest[:20], "is damaged: manifest.json cannot be read"),
        (lambda _: "[]", "is damaged: manifest.json cannot be read"),
        (lambda _: '{"files": {}}', "is damaged: manifest.json does not name all files"),
        (lambda _: '{"files": {"state.json": {}}}', "is damaged: manifest.json cannot be read"),
        (unnamed, "is damaged: manifest.json does not name rank-00001.safetensors, which holds tensors"),
    ],
)
def test_a_manifest_that_does_not_name_every_file_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    manifest = saved(tmp_path / "c") / "manifest.json"
    manifest.unlink() if change is None else manifest.write_text(change(manifest.read_text()))
    for error in refusals(tmp_path / "c"):
        assert isinstance(error, CheckpointError)
        assert message in str(error)
