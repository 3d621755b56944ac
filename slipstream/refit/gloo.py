"""Weights over the network between CPUs: torch's gloo, broadcast in buckets from the learner's rank 0 to the engines.

The group is of this transfer alone. It leaves the learner's and vLLM's own process groups as they are, and meets at a
store that the sender keeps at its own address.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from slipstream.refit.config import ChannelBrokeError, RefitConfig
from slipstream.refit.stream import (
    EngineControl,
    Sender,
    Sent,
    Unpacker,
    WeightMeta,
    Weights,
    WeightSource,
    bucket_sizes,
    packed,
)

_NUM_BUFFERS = 2  # one travels while the other is filled, or read


@dataclass(frozen=True, kw_only=True, slots=True)
class GlooInit:
    """Settings for an engine to join; plain values, for they travel through vLLM."""

    master_address: str
    master_port: int
    rank_offset: int  # of the engine's first worker
    world_size: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GlooUpdate:
    """Settings for an engine to receive one model."""

    metas: Sequence[WeightMeta]
    bucket_bytes: int

    def plain(self) -> dict[str, Any]:
        """Plain values, which travel through vLLM."""
        return {"metas": [asdict(meta) for meta in self.metas], "bucket_bytes": self.bucket_bytes}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GlooUpdate:
        """Read what `plain` gave."""
        metas = [WeightMeta(**{**meta, "shape": tuple(meta["shape"])}) for meta in values["metas"]]
        return cls(metas=metas, bucket_bytes=values["bucket_bytes"])


class GlooGroup:
    """Rank 0 sends, all others receive what it sends."""

    def __init__(self, store: TCPStore, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        """Meet the others; returns when all are there.

        Args:
            address: of this host's interface to the others: what a host's name resolves to may be its loopback.
        Raises:
            ChannelBrokeError: not all of them came in time.
        """
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        prefixed = PrefixStore("slipstream", store)
        try:
            self._group: Any = ProcessGroupGloo(prefixed, rank, world_size, options)
        except RuntimeError as error:
            raise ChannelBrokeError(
                f"rank {rank} of the {world_size} in the gloo channel could not meet the others: {error}"
            ) from error
        self._store = store  # rank 0's is the server, which ends with it
        self._timeout_s = timeout_s

    @classmethod
    def join(cls, init: GlooInit, *, worker: int) -> GlooGroup:
        """Join as worker number `worker` of an engine."""
        store = TCPStore(init.master_address, init.master_port, timeout=timedelta(seconds=init.timeout_s))
        address = address_towards(init.master_address, init.master_port)
        return cls(
            store,
            rank=init.rank_offset + worker,
            world_size=init.world_size,
            address=address,
            timeout_s=init.timeout_s,
        )

    def broadcast(self, buffer: Tensor) -> Transfer:
        """Begin to send or receive."""
        assert self._group is not None, "closed"
        options = BroadcastOptions()
        options.rootRank = 0
        return Transfer(self._group.broadcast([buffer], options), self._timeout_s)

    def close(self) -> None:
        """Leave; whoever waits for this rank gets an error. The connections end with the last reference to them."""
        self._group = None


class Transfer:
    """A bucket on its way."""

    def __init__(self, work: Work, timeout_s: float) -> None:
        self._work: Work | None = work
        self._timeout_s = timeout_s

    def wait(self) -> None:
        """Wait until the bucket has arrived.

        Raises:
            ChannelBrokeError: another rank is gone, or stood still.
        """
        work, self._work = self._work, None  # which keeps the connections open, in a traceback too
        assert work is not None, "waited already"
        try:
            work.wait()
        except RuntimeError as error:
            raise ChannelBrokeError(
                f"the gloo channel broke, or stood still for {self._timeout_s:g} s: {_first_line(error)}"
            ) from error
        finally:
            del work

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self._work = None


class GlooSender(Sender):
    """The learner's rank 0."""

    def __init__(self, settings: RefitConfig, *, engines: EngineControl, address: str) -> None:
        """Open the store, have the engines join, and join."""
        self._settings = settings
        self._engines = engines
        self._buffers: list[Tensor] = []
        self._group: GlooGroup | None = None
        timeout_s, world_size = settings.timeout_s, 1 + engines.num_workers
        store = TCPStore(
            address, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )  # port 0: any that is free
        init = GlooInit(
            master_address=address,
            master_port=store.port,
            rank_offset=1,
            world_size=world_size,
            timeout_s=timeout_s,
        )

        def join() -> GlooGroup:
            return GlooGroup(store, rank=0, world_size=world_size, address=address, timeout_s=timeout_s)

        self._group = self._beside(join, lambda: engines.init_weight_transfer_engine(asdict(init)))

    def send(self, source: WeightSource, *, is_draft: bool) -> Sent:
        """Broadcast all of `source`, as `Sender.send` says."""
        metas, weights = source.metas(), iter(source)
        update = GlooUpdate(metas=metas, bucket_bytes=self._settings.bucket_bytes).plain()
        try:
            self._engines.aim(is_draft=is_draft)
            self._engines.start_weight_update()
            digest = self._beside(
                lambda: self._broadcast(weights, source.num_bytes()), lambda: self._engines.update_weights(update)
            )
        except BaseException:
            for _ in weights:  # the learner's other ranks are on their way through them
                pass
            raise
        source.require_finite()
        self._engines.finish_weight_update()
        return Sent(num_bytes=source.num_bytes(), digest=digest)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _broadcast(self, weights: Weights, num_bytes: int) -> str:
        """Send all buckets; returns the digest of their bytes."""
        group = self._group
        assert group is not None, "closed"
        size = min(self._settings.bucket_bytes, num_bytes)
        if not self._buffers or len(self._buffers[0]) != size:
            self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(_NUM_BUFFERS)]
        digest, on_their_way = xxhash.xxh3_64(), deque[Transfer]()
        try:
            for bucket in packed(weights, self._buffers):
                digest.update(bucket.numpy().data)
                on_their_way.append(group.broadcast(bucket))
                if len(on_their_way) == _NUM_BUFFERS:
                    on_their_way.popleft().wait()  # or its buffer would be overwritten next
            for transfer in on_their_way:
                transfer.wait()
        finally:
            on_their_way.clear()
        return digest.hexdigest()

    def _beside(self, ours: Callable[[], Any], theirs: Callable[[], None]) -> Any:
        """Both at the same time, for each waits for the other; what `ours` gives.

        `theirs` knows which engine failed, so its error comes first; it has a deadline of its own. If either fails the
        channel is closed, so that nobody waits for the other.
        """
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(theirs)
            try:
                result = ours()
            except BaseException as error:
                self.close()
                if isinstance(error, ChannelBrokeError):
                    answer.result()
                raise
            answer.result()
        return result


def receive(group: GlooGroup, update: GlooUpdate, take: Callable[[Sequence[tuple[str, Tensor]]], None]) -> str:
    """Take tensors as they are complete; returns the digest of all bytes that came.

    Raises:
        ChannelBrokeError: the sender is gone, or stood still.
    """
    unpacker, digest = Unpacker(update.metas), xxhash.xxh3_64()
    with closing(_buckets(group, update)) as buckets:
        for bucket in buckets:
            digest.update(bucket.numpy().data)
            take(unpacker.feed(bucket))
    assert unpacker.is_complete
    return digest.hexdigest()


def _buckets(group: GlooGroup, update: GlooUpdate) -> Generator[Tensor, None, None]:
    """The buckets in their order; while one is read the next is on its way."""
    sizes = bucket_sizes(sum(meta.num_bytes for meta in update.metas), update.bucket_bytes)
    buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes[:_NUM_BUFFERS]]
    views = [buffers[index % _NUM_BUFFERS][:size] for index, size in enumerate(sizes)]
    transfer = group.broadcast(views[0])
    try:
        for index, view in enumerate(views):
            transfer.wait()
            if index + 1 < len(views):
                transfer = group.broadcast(views[index + 1])
            yield view
    finally:
        transfer.drop()


def address_towards(address: str, port: int) -> str:
    """This host's own address on the way to another one; nothing is sent."""
    family = socket.getaddrinfo(address, port)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
