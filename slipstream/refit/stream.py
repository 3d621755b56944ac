"""The learner's half of a channel that streams: weights that nobody holds whole, their bytes in buckets, and who sends.

Bytes stand one behind the other in the order of the source; a tensor may begin in one bucket and end in a later one, so
no bucket has to hold the largest tensor. vLLM's IPC alone keeps each tensor whole. Every rank of the learner has a
sender, and rank 0's sends.

Between CPUs they travel by torch's gloo, broadcast from the learner's rank 0 to the engines. That group is of this
transfer alone: it leaves the learner's and vLLM's own process groups as they are, and meets at a store that the sender
keeps at its own address.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from slipstream.refit.config import Channel, ChannelBrokeError, RefitConfig
from slipstream.types import Dtype

Weights = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMeta:
    """One tensor of a checkpoint: all that a receiver has to know before its bytes come."""

    name: str
    dtype: str  # torch's name, without `torch.`
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the tensor."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WeightMeta:
        """Describe `tensor`."""
        return cls(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


class WeightSource:
    """One model's weights, by their names in a checkpoint, always the same ones in the same order.

    Where several ranks hold the model, each of them has a source of its own and goes through it at the same time:
    gathering a tensor is collective.
    """

    def __init__(self, weights: Callable[[], Weights], *, model: str, dtype: Dtype | None = None) -> None:
        """Take tensors as they come.

        Args:
            weights: starts a fresh pass.
            model: its name in errors.
            dtype: of floating-point tensors as they are sent; None: as the model has them.
        """
        self._weights = weights
        self._model = model
        self._dtype = None if dtype is None else getattr(torch, dtype.value)
        self._metas: tuple[WeightMeta, ...] = ()
        self._wrong = ""  # the first tensor of the last pass that was not finite

    def metas(self) -> tuple[WeightMeta, ...]:
        """Tensors of a pass; the first call goes through all of them once and keeps none: collective."""
        if not self._metas:
            self._metas = tuple(WeightMeta.of(name, tensor) for name, tensor in self._converted())
        return self._metas

    def num_bytes(self) -> int:
        """Size of all weights; collective the first time."""
        return sum(meta.num_bytes for meta in self.metas())

    def __iter__(self) -> Weights:
        """All tensors, one at a time; copy one before the next update of the model. Ask `require_finite` afterwards."""
        self._wrong = ""
        for meta, (name, tensor) in zip(self.metas(), self._converted(), strict=True):
            assert meta == WeightMeta.of(name, tensor), f"{meta} first, {name} {tensor.shape} now"
            if not self._wrong and not _is_finite(tensor):
                self._wrong = name
            yield name, tensor.detach()

    def require_finite(self) -> None:
        """Refuse what the last pass gave if a tensor of it held NaN or Inf: an engine would sample noise, silently.

        Not while the weights go by: every rank, and every engine that receives them, is waiting for the rest.

        Raises:
            ValueError: it did.
        """
        if self._wrong:
            raise ValueError(f"weight {self._wrong} of the {self._model} must be finite, got NaN or Inf")

    def _converted(self) -> Weights:
        for name, tensor in self._weights():
            yield name, tensor.to(self._dtype) if self._dtype and tensor.is_floating_point() else tensor


def _is_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or Inf: both survive a sum, which is cheaper than looking at each value."""
    return math.isfinite(tensor.sum(dtype=torch.float32)) or bool(torch.isfinite(tensor).all())


def bucket_sizes(num_bytes: int, bucket_bytes: int) -> list[int]:
    """Bytes of each bucket: full ones, and what is left in the last."""
    full, rest = divmod(num_bytes, bucket_bytes)
    return [bucket_bytes] * full + ([rest] if rest else [])


def whole_tensors_bucket(bucket_bytes: int, models: Iterable[Iterable[WeightMeta]]) -> int:
    """Bytes of a bucket that no tensor may be cut for: as large as the largest tensor of any model that travels."""
    return max([bucket_bytes, *(meta.num_bytes for metas in models for meta in metas)])


def packed(weights: Iterable[tuple[str, Tensor]], buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Fill the buffers in turn with the tensors' bytes; gives each when it is full, and the last as far as it is.

    Args:
        buffers: uint8 tensors of one size. With n of them, what was given is overwritten once n - 1 more are taken.
    """
    turn, filled = 0, 0
    for _, tensor in weights:
        raw = as_bytes(tensor)
        start = 0
        while start < len(raw):
            buffer = buffers[turn]
            piece = raw[start : start + len(buffer) - filled]
            buffer[filled : filled + len(piece)].copy_(piece)
            start, filled = start + len(piece), filled + len(piece)
            if filled == len(buffer):
                yield buffer
                turn, filled = (turn + 1) % len(buffers), 0
    if filled:
        yield buffers[turn][:filled]


def as_bytes(tensor: Tensor) -> Tensor:
    """[bytes]: a tensor's memory."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class Unpacker:
    """Puts tensors together again; each has memory of its own, for a receiver may keep it for a while."""

    def __init__(self, metas: Iterable[WeightMeta]) -> None:
        self._metas = iter(metas)
        self._meta = next(self._metas, None)
        self._raw = self._fresh()
        self._filled = 0

    def feed(self, bucket: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that are complete with these bytes.

        Raises:
            ValueError: there are more bytes than the metas announced.
        """
        done: list[tuple[str, Tensor]] = []
        start = 0
        while start < len(bucket) or (self._meta is not None and self._filled == len(self._raw)):
            if self._meta is None:
                raise ValueError(f"{len(bucket) - start} bytes came after the last tensor")
            piece = bucket[start : start + len(self._raw) - self._filled]
            self._raw[self._filled : self._filled + len(piece)].copy_(piece)
            start, self._filled = start + len(piece), self._filled + len(piece)
            if self._filled == len(self._raw):
                done.append((self._meta.name, self._raw.view(self._meta.torch_dtype).view(self._meta.shape)))
                self._meta, self._filled = next(self._metas, None), 0
                self._raw = self._fresh()
        return done

    @property
    def is_complete(self) -> bool:
        """True if every tensor has come."""
        return self._meta is None

    def _fresh(self) -> Tensor:
        return torch.empty(0 if self._meta is None else self._meta.num_bytes, dtype=torch.uint8)


class EngineControl(Protocol):
    """All engines at once, as a sender steers them: the four calls of vLLM's `VLLMWeightSyncClient`, and two more.

    Each call is made on every engine at the same time and returns when all have answered. It raises `RefitError` that
    names the engines which failed, died, or did not answer in time.
    """

    @property
    def num_workers(self) -> int:
        """Processes that receive: tensor-parallel ranks of all engines."""
        ...

    def aim(self, *, is_draft: bool) -> None:
        """Choose the engines' model that the next updates are for."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the channel; `rank_offset` in `init_info` is that of the first engine."""
        ...

    def start_weight_update(self) -> None:
        """Get ready for an update of one model."""
        ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Take a part of the weights; where they are broadcast, this waits for them."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Bytes that went over a channel."""

    num_bytes: int
    digest: str | None  # of the bytes in their order; None where the channel takes none


class Sender:
    """One rank's part in sending; all ranks make the same calls at the same time.

    This one sends nothing itself: it takes part in the gathering of what rank 0 sends.
    """

    def send(self, source: WeightSource, *, is_draft: bool) -> Sent:
        """Go through all of `source`; of rank 0, bring it into every engine's policy, or its draft.

        Raises:
            RefitError: an engine failed, died, or took longer than the settings allow.
            ValueError: a weight is not finite.
        """
        del is_draft
        for _ in source:
            pass
        return Sent(num_bytes=0, digest=None)

    def close(self) -> None:
        """Leave the channel."""


def open_sender(
    settings: RefitConfig, *, engines: EngineControl, sources: Sequence[WeightSource], rank: int, address: str
) -> Sender:
    """Join the channel with the engines.

    Args:
        settings: the recipe's, with the channel that was chosen.
        sources: of every model whose weights will travel, the policy's first.
        address: of this rank's host, which the engines' hosts can reach.
    """
    if settings.channel is Channel.IPC:
        from slipstream.refit import vllm

        return vllm.open_ipc(settings, engines=engines, sources=sources, rank=rank)
    for source in sources:
        source.metas()  # collective, so on all ranks or on none: one that gathered alone would wait for ever
    if rank > 0:
        return Sender()
    if settings.channel is Channel.NCCL:
        from slipstream.refit import vllm

        return vllm.open_nccl(settings, engines=engines, source=sources[0], address=address)
    assert settings.channel is Channel.GLOO, settings.channel
    return GlooSender(settings, engines=engines, address=address)


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
