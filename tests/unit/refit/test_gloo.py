"""Weights over gloo: a sender and its engines in threads, each with a process group of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor

from slipstream.refit.config import Channel, ChannelBrokeError, RefitConfig, RefitError
from slipstream.refit.stream import GlooGroup, GlooInit, GlooSender, GlooUpdate, WeightSource, address_towards, receive

TENSORS = [
    ("embed", torch.arange(60, dtype=torch.bfloat16).reshape(6, 10)),
    ("norm", torch.linspace(-1, 1, 7)),
    ("d2t", torch.arange(5)),
]
TIMEOUT_S = 5.0


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
        init = GlooInit(**init_info)
        self._groups = self._all(lambda worker: GlooGroup.join(init, worker=worker))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        update = GlooUpdate.of(update_info)
        self.digests = self._all(lambda worker: self._receive(worker, update))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")

    def _receive(self, worker: int, update: GlooUpdate) -> str:
        def take(tensors: Sequence[tuple[str, Tensor]]) -> None:
            if worker == self._fails:
                raise RefitError(f"engine {worker} could not load")
            self.received[worker] |= dict(tensors)

        try:
            return receive(self._groups[worker], update, take)
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


def source(tensors: Sequence[tuple[str, Tensor]] = TENSORS) -> WeightSource:
    return WeightSource(lambda: iter(tensors), model="policy")


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 64, 7])
def test_every_engine_gets_every_tensor_and_all_agree_on_the_bytes(bucket_bytes: int) -> None:
    engines = ThreadEngines(3)
    sending = sender(engines, bucket_bytes=bucket_bytes)
    sent = sending.send(source(), is_draft=False)
    sending.close()
    whole = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in TENSORS]).numpy().tobytes()
    assert (sent.num_bytes, sent.digest) == (len(whole), xxhash.xxh3_64(whole).hexdigest())
    assert engines.digests == [sent.digest] * 3
    for received in engines.received:
        assert received.keys() == {name for name, _ in TENSORS}
        assert all(
            torch.equal(received[name], tensor) and received[name].dtype == tensor.dtype for name, tensor in TENSORS
        )


def test_the_engines_join_once_and_each_model_is_sent_by_itself() -> None:
    engines = ThreadEngines(1)
    sending = sender(engines)
    sending.send(source(), is_draft=False)
    sending.send(source([("fc", torch.ones(3))]), is_draft=True)
    sending.close()
    assert engines.calls == ["init", *["policy", "start", "update", "finish"], *["draft", "start", "update", "finish"]]
    assert engines.received[0]["fc"].tolist() == [1.0, 1.0, 1.0]


def test_weights_that_are_not_finite_end_in_an_error_and_not_in_a_hang() -> None:
    engines = ThreadEngines(2)
    sending = sender(engines, bucket_bytes=8)
    with pytest.raises(ValueError, match="weight b of the policy must be finite"):
        sending.send(
            source([("a", torch.ones(3)), ("b", torch.tensor([float("nan")])), ("c", torch.ones(5))]), is_draft=False
        )
    sending.close()
    assert engines.calls[-1] == "update"  # nobody was told that the update is whole


@pytest.mark.parametrize("fails", [0, 2])
def test_an_engine_that_fails_is_named_and_nobody_waits_for_it(fails: int) -> None:
    engines = ThreadEngines(3, fails=fails)
    sending = sender(engines, bucket_bytes=8, timeout_s=20.0)
    start = time.monotonic()
    with pytest.raises(RefitError, match=f"engine {fails} could not load"):
        sending.send(source(), is_draft=False)
    assert time.monotonic() - start < 10.0  # the timeout is 20 s


class Dead(ThreadEngines):
    """Engines that are gone before an update."""

    def start_weight_update(self) -> None:
        raise RefitError("engine 0 died")


@pytest.mark.parametrize("engines", [ThreadEngines(1, fails=0), Dead(1)])
def test_a_rank_that_gathers_with_the_sender_is_not_left_alone(engines: ThreadEngines) -> None:
    """After a failure the rest of the weights still goes by: other ranks are on their way through it."""
    gone: list[str] = []

    def weights() -> Any:
        for name, tensor in TENSORS:
            yield name, tensor
            gone.append(name)

    sending = sender(engines, bucket_bytes=8)
    stream = WeightSource(weights, model="policy")
    stream.metas()
    gone.clear()
    with pytest.raises(RefitError):
        sending.send(stream, is_draft=False)
    assert gone == [name for name, _ in TENSORS]


def test_an_engine_that_stands_still_ends_in_an_error_within_the_timeout() -> None:
    class Still(ThreadEngines):
        def update_weights(self, update_info: Any) -> None:
            time.sleep(4.0)  # longer than the channel waits
            raise RefitError("engine 0 did not receive weights within 4 s")

    engines = Still(1)
    sending = sender(engines, timeout_s=1.0)
    with pytest.raises(RefitError, match="engine 0 did not receive weights within 4 s"):
        sending.send(source([("w", torch.ones(1 << 22))]), is_draft=False)


def test_engines_that_never_join_end_in_an_error() -> None:
    class Absent(ThreadEngines):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            time.sleep(3.0)

    with pytest.raises(ChannelBrokeError, match=r"rank 0 of the 2 in the gloo channel could not meet the others"):
        sender(Absent(1), timeout_s=1.0)


def test_a_channel_can_be_opened_again_after_it_was_closed() -> None:
    engines = ThreadEngines(1)
    for _ in range(2):
        sending = sender(engines)
        sending.send(source(), is_draft=False)
        sending.close()
        sending.close()
    assert engines.calls.count("init") == 2


def test_an_own_address_is_the_one_on_the_way_to_the_other() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
