"""Weights as a stream of bytes: over gloo, to engines in threads with process groups of their own, and in snapshots."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from slipstream.refit import stream as stream_module
from slipstream.refit.config import Channel, ChannelBrokeError, RefitConfig, RefitError
from slipstream.refit.stream import (
    GlooGroup,
    GlooSender,
    SnapshotWriter,
    WeightSource,
    open_sender,
    receive,
)
from slipstream.types import Dtype

TENSORS = [
    ("embed", torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)),  # 12 bytes
    ("norm", torch.tensor([1.5, -2.5])),  # 8
    ("d2t", torch.arange(3)),  # 24
    ("mask", torch.tensor([True, False, True])),  # 3
]


def source(tensors: Sequence[tuple[str, Tensor]]) -> WeightSource:
    return WeightSource(lambda: iter(tensors), model="policy")


def test_metas_say_what_a_pass_gives_and_keep_no_tensor() -> None:
    assert [(meta.name, meta.dtype, meta.shape, meta.num_bytes) for meta in source(TENSORS).metas()] == [
        ("embed", "bfloat16", (3, 2), 12),
        ("norm", "float32", (2,), 8),
        ("d2t", "int64", (3,), 24),
        ("mask", "bool", (3,), 3),
    ]
    assert source(TENSORS).num_bytes() == 47


def test_floats_are_sent_as_the_type_asked_for_and_everything_else_as_it_is() -> None:
    sent = WeightSource(lambda: iter(TENSORS), model="draft", dtype=Dtype.BFLOAT16)
    assert [(meta.dtype, meta.num_bytes) for meta in sent.metas()] == [
        *[("bfloat16", 12), ("bfloat16", 4), ("int64", 24), ("bool", 3)]
    ]
    assert dict(sent)["norm"].tolist() == [1.5, -2.5]
    assert sent.num_bytes() == 43


def test_one_pass_for_the_metas_and_one_for_each_time_the_weights_are_sent() -> None:
    passes = Passes()
    counted = WeightSource(passes, model="policy")
    assert passes.num == 0
    counted.metas()
    for _ in range(2):
        list(counted)
    counted.metas()
    assert passes.num == 3


def test_other_tensors_than_before_are_a_mistake_of_ours() -> None:
    given_first = [[*TENSORS], TENSORS[:1] + TENSORS[2:]]
    changing = WeightSource(lambda: iter(given_first.pop(0)), model="policy")
    changing.metas()
    with pytest.raises(AssertionError, match="d2t"):
        list(changing)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_when_all_have_gone_by(value: float) -> None:
    """Not before: a rank that stops in the middle leaves the others alone in a collective."""
    wrong = source([("a", torch.ones(2)), ("b", torch.tensor([1.0, value])), ("c", torch.tensor([value]))])
    assert [name for name, _ in wrong] == ["a", "b", "c"]
    with pytest.raises(ValueError) as caught:
        wrong.require_finite()
    assert str(caught.value) == "weight b of the policy must be finite, got NaN or Inf"


def test_a_finite_pass_after_another_is_taken_also_where_the_sum_is_not_finite() -> None:
    values = [torch.nan, torch.nan, 3e38]
    healing = WeightSource(lambda: iter([("a", torch.full((8,), values.pop(0)))]), model="policy")
    list(healing)
    with pytest.raises(ValueError):
        healing.require_finite()
    list(healing)
    healing.require_finite()


SETTINGS = RefitConfig(channel=Channel.GLOO, bucket_mib=64 / 2**20, timeout_s=30.0)


class Passes:
    """Weights that count how often somebody went through all of them."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        yield from SENT
        self.num += 1


def test_ranks_go_through_all_weights_equally_often_as_they_open_a_channel_and_as_they_send() -> None:
    """Those of policy and draft, at both times."""
    passes = [[Passes(), Passes()], [Passes(), Passes()]]
    sources = [[WeightSource(each, model="policy") for each in own] for own in passes]
    sender, follower = (
        open_sender(SETTINGS, engines=ThreadEngines(1), sources=own, rank=rank, address="127.0.0.1")
        for rank, own in enumerate(sources)
    )
    assert [each.num for own in passes for each in own] == [1, 1, 1, 1]
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(sender.send, sources[0][1], is_draft=True)
        assert follower.send(sources[1][1], is_draft=True) is None
        assert sent.result(20)
    assert [each.num for own in passes for each in own] == [1, 2, 1, 2]
    sender.close()
    follower.close()


SENT = [
    ("embed", torch.arange(60, dtype=torch.bfloat16).reshape(6, 10)),
    ("norm", torch.linspace(-1, 1, 7)),
    ("none", torch.zeros(0, 3)),
    ("d2t", torch.arange(5)),
]
TIMEOUT_S = 30.0  # a busy machine needs seconds for what takes no time


class ThreadEngines:
    """`EngineControl` over engines that are threads of this process; notes the calls."""

    def __init__(self, num: int, *, fails: int | None = None) -> None:
        self.num_workers = num
        self.calls: list[str] = []
        self.received: list[dict[str, Tensor]] = [{} for _ in range(num)]
        self.digests = [""] * num
        self._fails = fails
        self._groups: list[GlooGroup] = []

    def aim(self, *, is_draft: bool) -> None:
        self.calls.append("draft" if is_draft else "policy")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        self._groups = self._all(lambda worker: GlooGroup.join(**init_info, worker=worker))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        self.digests = self._all(lambda worker: self._receive(worker, update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")

    def _receive(self, worker: int, update: dict[str, Any]) -> str:
        def take(tensors: Sequence[tuple[str, Tensor]]) -> None:
            if worker == self._fails:
                raise RefitError(f"engine {worker} could not load")
            self.received[worker] |= dict(tensors)

        try:
            return receive(self._groups[worker], take, **update)
        except BaseException:
            self._groups[worker].close()  # as the engine does, or the others would wait for it
            raise

    def _all(self, function: Callable[[int], Any]) -> list[Any]:
        """A failure of an engine comes before those of the engines that saw the channel break."""
        with ThreadPoolExecutor(self.num_workers) as pool:
            futures = [pool.submit(function, worker) for worker in range(self.num_workers)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, ChannelBrokeError)):
            raise error
        return [future.result() for future in futures]


def sender(engines: Any, *, bucket_bytes: int = 64, timeout_s: float = TIMEOUT_S) -> GlooSender:
    settings = RefitConfig(channel=Channel.GLOO, bucket_mib=bucket_bytes / 2**20, timeout_s=timeout_s)
    return GlooSender(settings, engines=engines, address="127.0.0.1")


def failing(message: str, *, after_s: float = 0.0) -> Callable[..., Any]:
    """A call of an engine that ends in this error."""

    def fail(*_: Any, **__: Any) -> None:
        time.sleep(after_s)
        raise RefitError(message)

    return fail


def test_an_engine_that_fails_before_it_joins_is_named_at_once() -> None:
    """Its error comes after a look or two at the store, not after the time in which a group must form."""
    engines, began_s = ThreadEngines(2), time.perf_counter()
    engines.init_weight_transfer_engine = failing("engine 0 has no such address")
    with pytest.raises(RefitError, match="engine 0 has no such address"):
        sender(engines, timeout_s=60.0)
    assert time.perf_counter() - began_s < 30.0


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 64, 7])
def test_every_engine_gets_every_tensor_and_all_agree_on_the_bytes(bucket_bytes: int) -> None:
    engines = ThreadEngines(3)
    sending = sender(engines, bucket_bytes=bucket_bytes)
    sent = sending.send(source(SENT), is_draft=False)
    sending.close()
    whole = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in SENT]).numpy().tobytes()
    assert sent == xxhash.xxh3_64(whole).hexdigest()
    assert engines.digests == [sent] * 3
    for received in engines.received:
        assert list(received) == [name for name, _ in SENT]
        assert all(torch.equal(received[name], own) and received[name].dtype == own.dtype for name, own in SENT)


def test_the_engines_join_once_in_a_channel_which_may_be_opened_again_and_each_model_is_sent_by_itself() -> None:
    engines = ThreadEngines(1)
    for _ in range(2):
        sending = sender(engines)
        sending.send(source(SENT), is_draft=False)
        sending.send(source([("fc", torch.ones(3))]), is_draft=True)
        sending.close()
        sending.close()
    calls = ["init", *["policy", "start", "update", "finish"], *["draft", "start", "update", "finish"]]
    assert engines.calls == calls * 2
    assert engines.received[0]["fc"].tolist() == [1.0, 1.0, 1.0]


def test_weights_that_are_not_finite_end_in_an_error_and_not_in_a_hang() -> None:
    engines = ThreadEngines(2)
    sending = sender(engines, bucket_bytes=8)
    with pytest.raises(ValueError, match="weight b of the policy must be finite"):
        sending.send(
            source([("a", torch.ones(3)), ("b", torch.tensor([torch.nan])), ("c", torch.ones(5))]), is_draft=False
        )
    sending.close()
    assert engines.calls[-1] == "update"  # nobody was told that the update is whole


@pytest.mark.parametrize("fails", [0, 2])
def test_an_engine_that_fails_is_named_and_nobody_waits_for_it(fails: int) -> None:
    engines = ThreadEngines(3, fails=fails)
    sending = sender(engines, bucket_bytes=8, timeout_s=20.0)
    start = time.monotonic()
    with pytest.raises(RefitError, match=f"engine {fails} could not load"):
        sending.send(source(SENT), is_draft=False)
    assert time.monotonic() - start < 10.0  # the timeout is 20 s


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_rank_that_gathers_with_the_sender_is_not_left_alone(is_dead: bool) -> None:
    """After a failure the rest of the weights still goes by: other ranks are on their way through it."""
    engines, passes = ThreadEngines(1, fails=0), Passes()
    if is_dead:  # before an update
        engines.start_weight_update = failing("engine 0 died")
    sending = sender(engines, bucket_bytes=8)
    with pytest.raises(RefitError):
        sending.send(WeightSource(passes, model="policy"), is_draft=False)
    assert passes.num == 2  # for the metas, and whole


def test_an_engine_that_stands_still_ends_in_an_error_within_the_timeout() -> None:
    engines = ThreadEngines(1)
    engines.update_weights = failing(
        "engine 0 did not receive weights within 4 s", after_s=4.0
    )  # the channel waits 1 s
    sending = sender(engines, timeout_s=1.0)
    with pytest.raises(RefitError, match="engine 0 did not receive weights within 4 s"):
        sending.send(source([("w", torch.ones(1 << 22))]), is_draft=False)


def test_engines_that_never_join_end_in_an_error() -> None:
    engines = ThreadEngines(1)
    engines.init_weight_transfer_engine = lambda init_info: time.sleep(3.0)
    with pytest.raises(ChannelBrokeError, match=r"rank 0 of the 2 in the gloo channel could not meet the others"):
        sender(engines, timeout_s=1.0)


def test_weights_that_are_not_finite_never_reach_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^weight embed.weight of the policy must be finite, got NaN or Inf$"):
        SnapshotWriter(tmp_path, "policy").write(source([("embed.weight", torch.tensor([torch.nan]))]), version=3)


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
    alive: list[weakref.ref[Tensor]] = []

    def fresh() -> Iterator[tuple[str, Tensor]]:
        for index in range(4):
            assert sum(each() is not None for each in alive) <= 1  # the one that was given last
            tensor = torch.full((8,), float(index))
            alive.append(weakref.ref(tensor))
            yield f"w{index}", tensor

    written = SnapshotWriter(tmp_path, "policy").write(WeightSource(fresh, model="policy"), version=0)
    assert [tensor[0] for tensor in load_file(written.path).values()] == [0.0, 1.0, 2.0, 3.0]


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
    monkeypatch.setattr(
        stream_module, "require_space", lambda directory, num_bytes: asked.append((directory, num_bytes))
    )
    writer = SnapshotWriter(tmp_path, "policy")
    first = writer.write(source(SENT), version=0)
    assert asked == [(tmp_path, Path(first.path).stat().st_size)]  # of a whole file, its header among it
    for version in (1, 2):
        writer.write(source(SENT), version=version)
    assert len(asked) == 1


def test_space_that_is_gone_is_an_error_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, f"{offset} {length}")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9 + len(str(path))))
    with pytest.raises(OSError) as caught:
        SnapshotWriter(tmp_path, "policy").write(source(SENT), version=0)
    assert caught.value.errno == errno.ENOSPC
    size = str(caught.value.__cause__).rpartition(" ")[2]
    free = 10**9 + len(str(tmp_path))
    assert caught.value.strerror == (f"the weights need {int(size):,} bytes in {tmp_path}, which has {free:,} free")
    assert int(size) > source(SENT).num_bytes()


def test_versions_alternate_between_two_files_of_exactly_the_weights(tmp_path: Path) -> None:
    writer, models = SnapshotWriter(tmp_path, "draft"), [{name: own + i for name, own in SENT} for i in range(4)]
    written = [writer.write(source([*model.items()]), version=version) for version, model in enumerate(models)]
    assert [each.version for each in written] == [0, 1, 2, 3]
    paths = [Path(each.path).name for each in written]
    assert paths == ["draft-0.safetensors", "draft-1.safetensors"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == paths[:2]
    assert len(writer._buffers) == 2  # each is mapped into memory once
    for version in (2, 3):
        read, expected = load_file(written[version].path), models[version]
        assert read.keys() == expected.keys()
        for name, tensor in expected.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_other_tensors_under_the_same_name_are_a_mistake_of_ours(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "policy")
    writer.write(source(SENT), version=0)
    with pytest.raises(AssertionError, match=r"^every version has the same tensors"):
        writer.write(source(SENT[:1]), version=1)
