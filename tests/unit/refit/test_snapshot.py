"""Snapshots of weights, as an engine reads them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from slipstream.config import ConfigError
from slipstream.refit import channel, stream
from slipstream.refit.channel import discard_transfers, require_space, transfer_directory
from slipstream.refit.stream import SnapshotWriter, WeightSource


def source(tensors: list[tuple[str, torch.Tensor]]) -> WeightSource:
    return WeightSource(lambda: iter(tensors), model="policy")


def weights(value: float) -> WeightSource:
    return source(tensors(value))


def tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed.weight", torch.full((3, 5), value, dtype=torch.bfloat16)),
        ("head.weight", torch.arange(4, dtype=torch.float32) + value),
        ("d2t", torch.arange(3)),
    ]


def test_weights_that_are_not_finite_never_reach_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^weight embed.weight of the policy must be finite, got NaN or Inf$"):
        SnapshotWriter(tmp_path, "policy").write(weights(float("nan")), version=3)


def test_a_file_is_a_padded_header_and_then_the_bytes(tmp_path: Path) -> None:
    """The format's own words: 8 bytes of the header's length, JSON padded to a multiple of 8, data in order."""
    two = [("a", torch.tensor([1, 2], dtype=torch.int64)), ("bb", torch.tensor([[True], [False]]))]
    written = SnapshotWriter(tmp_path, "policy").write(source(two), version=4)
    header = (
        '{"__metadata__":{"format":"pt"},"a":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        '"bb":{"dtype":"BOOL","shape":[2,1],"data_offsets":[16,18]}}'
    )
    padded = header.encode().ljust(-(-len(header) // 8) * 8)
    expected = len(padded).to_bytes(8, "little") + padded + bytes([1, *[0] * 7, 2, *[0] * 7, 1, 0])
    assert len(header) % 8 != 0  # or nothing would be padded here
    assert Path(written.path).read_bytes() == expected
    assert written.path == str(tmp_path / "policy-0.safetensors")
    assert written.digest == xxhash.xxh3_64(expected).hexdigest()


def test_tensors_are_written_as_they_come_and_none_is_kept(tmp_path: Path) -> None:
    """No two tensors of the model need to live at once."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def fresh() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(4):
            assert sum(each() is not None for each in alive) <= 1  # the one that was given last
            tensor = torch.full((8,), float(index))
            alive.append(weakref.ref(tensor))
            yield f"w{index}", tensor

    written = SnapshotWriter(tmp_path, "policy").write(WeightSource(fresh, model="policy"), version=0)
    assert [tensor[0] for tensor in load_file(written.path).values()] == [0.0, 1.0, 2.0, 3.0]


def test_a_file_system_without_room_for_two_snapshots_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ConfigError) as caught:
        require_space(tmp_path, free)
    needed, rest = str(caught.value).split(" bytes for ")
    assert needed == f"refit.channel shared_memory needs {2 * free:,}"
    assert rest.startswith(f"2 snapshots of the weights in {tmp_path.parent}, got '")
    assert rest.endswith(
        "bytes free'; mount a larger /dev/shm (a pod has 64 MiB unless it says otherwise), or set gloo, which needs "
        "no files"
    )
    require_space(tmp_path, 1)


def _may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="mounting a file system takes root and CAP_SYS_ADMIN")
def test_a_shared_memory_of_one_mebibyte_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """As in a pod: the tensor, of 600,000 bytes and a header of 104, fits once and not twice."""
    script = (
        "import torch; from pathlib import Path; from slipstream.refit.stream import SnapshotWriter, WeightSource; "
        "source = WeightSource(lambda: iter([('w', torch.ones(150_000))]), model='policy'); "
        f"SnapshotWriter(Path('{tmp_path}') / 'small', 'policy').write(source, version=0)"
    )
    mount = f"mkdir {tmp_path}/small && mount -t tmpfs -o size=1m tmpfs {tmp_path}/small"
    command = ["unshare", "-m", "sh", "-c", f'{mount} && "{sys.executable}" -c "{script}"']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ConfigError: refit.channel shared_memory needs 1,200,208 bytes" in done.stderr
    assert "'1,048,576 bytes free'" in done.stderr


def test_space_of_both_files_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(stream, "require_space", lambda directory, num_bytes: asked.append((directory, num_bytes)))
    writer = SnapshotWriter(tmp_path, "policy")
    first = writer.write(weights(1.0), version=0)
    assert asked == [(tmp_path, Path(first.path).stat().st_size)]  # of a whole file, its header among it
    for version in (1, 2):
        writer.write(weights(1.0), version=version)
    assert len(asked) == 1


def test_space_that_is_gone_is_an_error_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, f"{offset} {length}")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9 + len(str(path))))
    source = weights(1.0)
    with pytest.raises(OSError) as caught:
        SnapshotWriter(tmp_path, "policy").write(source, version=0)
    assert caught.value.errno == errno.ENOSPC
    size = str(caught.value.__cause__).rpartition(" ")[2]
    free = 10**9 + len(str(tmp_path))
    assert caught.value.strerror == (f"the weights need {int(size):,} bytes in {tmp_path}, which has {free:,} free")
    assert int(size) > source.num_bytes()


def test_versions_alternate_between_two_files_of_exactly_the_weights(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "draft")
    written = [writer.write(weights(float(version)), version=version) for version in range(4)]
    assert [each.version for each in written] == [0, 1, 2, 3]
    paths = [Path(each.path).name for each in written]
    assert paths == ["draft-0.safetensors", "draft-1.safetensors"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == paths[:2]
    assert len(writer._buffers) == 2  # each is mapped into memory once
    for version in (2, 3):
        read, expected = load_file(written[version].path), dict(tensors(version))
        assert read.keys() == expected.keys()
        for name, tensor in expected.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_other_tensors_under_the_same_name_are_a_mistake_of_ours(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "policy")
    writer.write(weights(1.0), version=0)
    with pytest.raises(AssertionError, match=r"^every version has the same tensors"):
        writer.write(source(tensors(1.0)[:1]), version=1)


def test_a_host_without_such_a_file_system_takes_its_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_SHARED_MEMORY", Path("/nowhere"))
    directory = transfer_directory()
    directory.rmdir()
    assert directory.parent == Path(tempfile.gettempdir())


def test_fresh_directories_that_a_killed_process_left_in_memory_are_discarded_and_nothing_else(tmp_path: Path) -> None:
    """The directory's name contains the id of the process that made it."""
    ours, fresh = transfer_directory(), transfer_directory()
    assert ours != fresh
    assert ours.parent == Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    (ours / "policy-0.safetensors").write_bytes(b"weights")
    others = Path(tempfile.mkdtemp(prefix="slipstream-refit-1-", dir=ours.parent))
    try:
        discard_transfers(os.getpid())
        assert not ours.exists() and not fresh.exists()
        assert others.is_dir()
        discard_transfers(os.getpid())  # nothing is left, and nothing is wrong
    finally:
        shutil.rmtree(others)
