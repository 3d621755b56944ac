"""Snapshots of weights, as an engine reads them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from slipstream.refit import snapshot
from slipstream.refit.snapshot import SnapshotWriter, discard_transfers, transfer_directory


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed.weight", torch.full((3, 5), value, dtype=torch.bfloat16)),
        ("head.weight", torch.arange(4, dtype=torch.float32) + value),
        ("d2t", torch.arange(3)),
    ]


def test_a_snapshot_is_a_safetensors_file_of_exactly_the_weights(tmp_path: Path) -> None:
    written = SnapshotWriter(tmp_path, "policy").write(weights(2.0), version=7)

    read = load_file(written.path)

    assert written.version == 7
    assert written.num_bytes == Path(written.path).stat().st_size
    assert set(read) == {name for name, _ in weights(2.0)}
    for name, tensor in weights(2.0):
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_next_version_leaves_the_one_before_it_alone(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "policy")
    first, second, third = (writer.write(weights(float(version)), version=version) for version in (1, 2, 3))

    assert torch.equal(load_file(second.path)["head.weight"], torch.arange(4.0) + 2.0)
    assert torch.equal(load_file(third.path)["head.weight"], torch.arange(4.0) + 3.0)
    assert first.path == third.path  # no third file: disk use does not grow with the steps


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_never_reach_an_engine(tmp_path: Path, value: float) -> None:
    writer = SnapshotWriter(tmp_path, "policy")

    with pytest.raises(ValueError) as caught:
        writer.write(weights(value), version=3)
    assert str(caught.value) == "weight embed.weight of policy version 3 must be finite, got NaN or Inf"


def test_finite_weights_whose_sum_is_not_are_written(tmp_path: Path) -> None:
    huge = torch.full((8,), 3e38)
    assert torch.equal(load_file(SnapshotWriter(tmp_path, "p").write([("w", huge)], version=0).path)["w"], huge)


def test_a_file_is_a_padded_header_and_then_the_bytes(tmp_path: Path) -> None:
    """The format's own words: 8 bytes of the header's length, JSON padded to a multiple of 8, data in order."""
    tensors = [("a", torch.tensor([1, 2], dtype=torch.int64)), ("bb", torch.tensor([[True], [False]]))]
    written = SnapshotWriter(tmp_path, "policy").write(tensors, version=4)
    header = (
        '{"__metadata__":{"format":"pt"},"a":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        '"bb":{"dtype":"BOOL","shape":[2,1],"data_offsets":[16,18]}}'
    )
    padded = header.encode().ljust(-(-len(header) // 8) * 8)
    expected = len(padded).to_bytes(8, "little") + padded + bytes([1, *[0] * 7, 2, *[0] * 7, 1, 0])
    assert len(header) % 8 != 0  # or nothing would be padded here
    assert Path(written.path).read_bytes() == expected
    assert (written.path, written.num_bytes) == (str(tmp_path / "policy-0.safetensors"), len(expected))
    assert written.digest == xxhash.xxh3_64(expected).hexdigest()


def test_versions_alternate_between_two_files(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "draft")
    paths = [Path(writer.write(weights(1.0), version=version).path).name for version in range(4)]
    assert paths == ["draft-0.safetensors", "draft-1.safetensors"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == paths[:2]
    assert len(writer._buffers) == 2  # each is mapped into memory once


def test_other_tensors_under_the_same_name_are_a_mistake_of_ours(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "policy")
    writer.write(weights(1.0), version=0)
    with pytest.raises(AssertionError, match=r"^every version has the same tensors"):
        writer.write(weights(1.0)[:1], version=1)


def test_a_host_without_such_a_file_system_takes_its_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_SHARED_MEMORY", Path("/nowhere"))
    directory = transfer_directory()
    directory.rmdir()
    assert directory.parent == Path(tempfile.gettempdir())


def test_transfer_directories_are_fresh_and_in_memory_where_there_is_such_a_file_system() -> None:
    first, second = transfer_directory(), transfer_directory()
    try:
        assert first != second
        assert first.is_dir()
        assert first.name.startswith("slipstream-refit-")
        assert first.parent == Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    finally:
        first.rmdir()
        second.rmdir()


def test_what_a_killed_process_left_is_discarded_and_nothing_else(tmp_path: Path) -> None:
    """Of this process, for the directory carries the number of the process that made it."""
    ours = transfer_directory()
    (ours / "policy-0.safetensors").write_bytes(b"weights")
    others = Path(tempfile.mkdtemp(prefix="slipstream-refit-1-", dir=ours.parent))
    try:
        discard_transfers(os.getpid())
        assert not ours.exists()
        assert others.is_dir()
        discard_transfers(os.getpid())  # nothing is left, and nothing is wrong
    finally:
        shutil.rmtree(others)
