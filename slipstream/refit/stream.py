"""Learner's half of a refit: tensors one at a time, into a snapshot in shared memory or a broadcast over gloo.

A snapshot is one safetensors file with the names of the Hugging Face checkpoint, for engines on the same host.

Every rank of the learner has a sender, and the sender of rank 0 sends. Between CPUs torch's gloo broadcasts each
tensor, in pieces of at most a bucket, from the learner's rank 0 into the memory of the engines' tensors. The gloo group
serves this transfer alone and leaves the process groups of learner and vLLM unchanged. The group's members meet at a
store on the learner's rank 0.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from slipstream.refit.channel import NUM_SNAPSHOTS, EngineControl, Snapshot, require_space
from slipstream.refit.config import Channel, ChannelBrokeError, RefitConfig
from slipstream.storage import SAFETENSORS_DTYPES, safetensors_header
from slipstream.types import Dtype

Weights = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMeta:
    """Name, type and shape of a checkpoint's tensor, which a receiver needs before the bytes."""

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
    """Weights of one model by their names in a checkpoint, in the same order at every pass.

    If several ranks hold the model, each rank iterates over a source of its own at the same time, because gathering a
    tensor is collective.
    """

    def __init__(self, weights: Callable[[], Weights], *, model: str, dtype: Dtype | None = None) -> None:
        """Describe a source without reading tensors.

        Args:
            weights: starts a pass over the tensors.
            model: name of the model in errors.
            dtype: type in which floating-point tensors are sent; None keeps the model's types.
        """
        self._weights = weights
        self._model = model
        self._dtype = None if dtype is None else getattr(torch, dtype.value)
        self._metas: tuple[WeightMeta, ...] = ()
        self._wrong = ""  # first tensor of the last pass with NaN or Inf

    def metas(self) -> tuple[WeightMeta, ...]:
        """Describe the tensors; the first call is collective and iterates over all tensors without keeping any."""
        if not self._metas:
            self._metas = tuple(WeightMeta.of(name, tensor) for name, tensor in self._converted())
        return self._metas

    def num_bytes(self) -> int:
        """Compute the size of all weights; the first call is collective."""
        return sum(meta.num_bytes for meta in self.metas())

    def __iter__(self) -> Weights:
        """Yield the tensors one at a time; call `require_finite` at the end."""
        self._wrong = ""
        for meta, (name, tensor) in zip(self.metas(), self._converted(), strict=True):
            assert meta == WeightMeta.of(name, tensor), f"{meta} first, {name} {tensor.shape} now"
            if not self._wrong and not _is_finite(tensor):
                self._wrong = name
            yield name, tensor.detach()

    def require_finite(self) -> None:
        """Refuse the last pass if a tensor held NaN or Inf, as an engine would sample noise without an error.

        The pass itself raises nothing, because all ranks and receiving engines wait for its end.
        """
        if self._wrong:
            raise ValueError(f"weight {self._wrong} of the {self._model} must be finite, got NaN or Inf")

    def _converted(self) -> Weights:
        for name, tensor in self._weights():
            yield name, tensor.to(self._dtype) if self._dtype and tensor.is_floating_point() else tensor


def _is_finite(tensor: Tensor) -> bool:
    """Return True if no value is NaN or Inf; both survive a sum, which is cheaper than a test of each value.

    Of a quantized matrix, the scales show it.
    """
    if tensor.dtype.itemsize == 1:
        return True
    return math.isfinite(tensor.sum(dtype=torch.float32)) or bool(torch.isfinite(tensor).all())


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor's memory as [bytes] uint8."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class SnapshotWriter:
    """Writes the versions of one model's weights into two files in turn.

    The files are mapped into memory once and overwritten in place, which takes a third of the time of a new file. An
    engine gets the path of a complete version, and the next version goes into the other file. Tensors are written one
    at a time, so no process holds the whole model.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._buffers: dict[Path, Tensor] = {}
        self._header = b""

    def write(self, source: WeightSource, *, version: int) -> Snapshot:
        """Write the tensors of `source` as `version`; after an error the file must not be read."""
        metas = [(each.name, SAFETENSORS_DTYPES[each.dtype], each.shape, each.num_bytes) for each in source.metas()]
        header = safetensors_header(metas, metadata={"format": "pt"})
        assert self._header in (b"", header), "every version has the same tensors"
        self._header = header
        path = self._directory / f"{self._name}-{version % NUM_SNAPSHOTS}.safetensors"
        size = len(header) + source.num_bytes()
        if not self._buffers:
            require_space(self._directory, size)
        if path not in self._buffers:
            self._buffers[path] = _new_file(path, header, size)
        buffer, start = self._buffers[path], len(header)
        for _, tensor in source:
            raw = as_bytes(tensor)
            buffer[start : start + len(raw)].copy_(raw)
            start += len(raw)
        source.require_finite()
        return Snapshot(path=str(path), version=version, digest=bytes_digest([buffer]))


def _new_file(path: Path, header: bytes, size: int) -> Tensor:
    """Make a file with its header, and map it; the space is allocated first, as a page without room kills a writer."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            free = shutil.disk_usage(path.parent).free
            reason = f"the weights need {size:,} bytes in {path.parent}, which has {free:,} free"
            raise OSError(error.errno, reason) from error
        file.write(header)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def bytes_digest(parts: Iterable[Tensor]) -> str:
    """Compute the digest of byte tensors in sequence."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.numpy().data)
    return digest.hexdigest()


class Sender:
    """A rank's part in sending; all ranks make the same calls at the same time.

    This base class sends nothing but takes part in gathering the tensors that rank 0 sends.
    """

    def send(self, source: WeightSource, *, is_draft: bool) -> str | None:
        """Iterate over all of `source`; on rank 0, send it into every engine's policy or draft.

        Returns the digest of the bytes; None on other ranks, and for a channel without digests. A weight that is not
        finite is a ValueError after the last one was sent, and an engine that failed a RefitError.
        """
        del is_draft
        for _ in source:
            pass
        return None

    def close(self) -> None:
        """Leave the channel."""


def open_sender(
    settings: RefitConfig, *, engines: EngineControl, sources: Sequence[WeightSource], rank: int, address: str
) -> Sender:
    """Join the channel with the engines.

    Args:
        settings: the recipe's settings with a resolved channel.
        sources: source of every model that is sent, the policy's first.
        address: address at which the engines' hosts reach this rank's host.
    """
    if settings.channel is Channel.IPC:
        from slipstream.refit import vllm

        return vllm.open_ipc(settings, engines=engines, sources=sources, rank=rank)
    for source in sources:
        source.metas()  # collective, so a rank that gathered alone would wait for ever
    if rank > 0:
        return Sender()
    if settings.channel is Channel.NCCL:
        from slipstream.refit import vllm

        return vllm.open_nccl(settings, engines=engines, source=sources[0], address=address)
    assert settings.channel is Channel.GLOO, settings.channel
    return GlooSender(settings, engines=engines, address=address)


_POLL_S = 0.005  # between two looks at who has joined
_NUM_UNDER_WAY = 2  # pieces: one is sent while the next tensor is gathered, or the last one loaded


class GlooGroup:
    """Process group over gloo in which rank 0 sends and all other ranks receive."""

    def __init__(self, store: TCPStore, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        """Join the group, and wait until all ranks have; a ChannelBrokeError if one misses the deadline.

        Args:
            address: address of this host's interface to the other hosts; the host's name may resolve to its loopback.
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
        self._store = store  # on rank 0 the server, which lives as long as this reference
        self._timeout_s = timeout_s
        self._under_way: deque[tuple[Work, Tensor]] = deque()  # no reference elsewhere: a work keeps connections open

    @classmethod
    def join(
        cls, *, master_address: str, master_port: int, rank_offset: int, world_size: int, timeout_s: float, worker: int
    ) -> GlooGroup:
        """Join as worker number `worker` of the engine whose first worker has rank `rank_offset`."""
        store = TCPStore(master_address, master_port, timeout=timedelta(seconds=timeout_s))
        store.set(_joins(rank_offset + worker), "")
        address = address_towards(master_address, master_port)
        return cls(store, rank=rank_offset + worker, world_size=world_size, address=address, timeout_s=timeout_s)

    def broadcast(self, pieces: Iterable[Tensor], arrived: Callable[[Tensor], None]) -> None:
        """Send pieces, or receive them, and call `arrived` with each; all ranks have the same sizes in the same order.

        Raises:
            ChannelBrokeError: another rank died or stalled.
        """
        assert self._group is not None, "closed"
        options = BroadcastOptions()
        options.rootRank = 0
        for piece in pieces:
            self._under_way.append((self._group.broadcast([piece], options), piece))
            if len(self._under_way) == _NUM_UNDER_WAY:
                arrived(self._oldest())
        while self._under_way:
            arrived(self._oldest())

    def _oldest(self) -> Tensor:
        """Wait for the oldest piece under way, and return it."""
        work, piece = self._under_way.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ChannelBrokeError(
                f"the gloo channel broke, or stood still for {self._timeout_s:g} s: {reason}"
            ) from error
        finally:
            del work  # the traceback would keep it
        return piece

    def close(self) -> None:
        """Leave the group, which raises an error in ranks that wait; the last reference closes the connections."""
        self._under_way.clear()
        self._group = None


def _joins(rank: int) -> str:
    """Key in the store of a rank that is about to join."""
    return f"joins/{rank}"


class GlooSender(Sender):
    """Sender of the learner's rank 0 over gloo."""

    def __init__(self, settings: RefitConfig, *, engines: EngineControl, address: str) -> None:
        """Open the store, let the engines join, and join."""
        self._settings = settings
        self._engines = engines
        self._group: GlooGroup | None = None
        timeout_s, world_size = settings.timeout_s, 1 + engines.num_workers
        any_port, timeout = 0, timedelta(seconds=timeout_s)
        store = TCPStore(address, any_port, is_master=True, timeout=timeout, wait_for_workers=False)
        init = {"master_address": address, "master_port": store.port, "rank_offset": 1}
        init |= {"world_size": world_size, "timeout_s": timeout_s}

        def join(answer: Future[None]) -> GlooGroup:
            # An engine that fails before it joins leaves the group waiting until its time is over.
            while not answer.done() and not store.check([_joins(rank) for rank in range(1, world_size)]):
                time.sleep(_POLL_S)
            if answer.done():
                answer.result()
            return GlooGroup(store, rank=0, world_size=world_size, address=address, timeout_s=timeout_s)

        self._group = self._beside(join, lambda: engines.init_weight_transfer_engine(init))

    def send(self, source: WeightSource, *, is_draft: bool) -> str:
        """Broadcast all of `source`; raises as `Sender.send` does."""
        update = {"metas": source.metas(), "bucket_bytes": self._settings.bucket_bytes}
        weights = iter(source)
        try:
            self._engines.aim(is_draft=is_draft)
            self._engines.start_weight_update()
            digest = self._beside(lambda _: self._broadcast(weights), lambda: self._engines.update_weights(update))
        except BaseException:
            for _ in weights:  # the learner's other ranks iterate to the end
                pass
            raise
        source.require_finite()
        self._engines.finish_weight_update()
        return digest

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _broadcast(self, weights: Weights) -> str:
        """Send all tensors; returns the digest of their bytes."""
        assert self._group is not None, "closed"
        digest, size = xxhash.xxh3_64(), self._settings.bucket_bytes
        pieces = (piece for _, tensor in weights for piece in as_bytes(tensor).cpu().split(size))
        self._group.broadcast(pieces, lambda piece: digest.update(piece.numpy().data))
        return digest.hexdigest()

    def _beside(self, ours: Callable[[Future[None]], Any], theirs: Callable[[], None]) -> Any:
        """Run `ours` and `theirs` at the same time, as each waits for the other; returns the result of `ours`.

        `ours` is told how `theirs` goes. The error of `theirs` comes first, because it names the engine that failed;
        `theirs` has a deadline of its own. If `ours` fails, the channel is closed, so that no engine waits for it.
        """
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(theirs)
            try:
                result = ours(answer)
            except BaseException as error:
                self.close()
                if isinstance(error, ChannelBrokeError):
                    answer.result()
                raise
            answer.result()
        return result


def receive(
    group: GlooGroup,
    take: Callable[[Sequence[tuple[str, Tensor]]], None],
    *,
    metas: Sequence[WeightMeta],
    bucket_bytes: int,
) -> str:
    """Receive one model and hand complete tensors to `take`; returns the digest of all bytes."""
    digest = xxhash.xxh3_64()
    incomplete: deque[tuple[Tensor, str, Tensor]] = deque()  # each with its last piece and its name

    def pieces() -> Iterator[Tensor]:
        for meta in metas:
            raw = torch.empty(meta.num_bytes, dtype=torch.uint8)  # memory of its own, as the loader may keep it
            own = raw.split(bucket_bytes)
            incomplete.append((own[-1], meta.name, raw.view(meta.torch_dtype).view(meta.shape)))
            yield from own

    def arrived(piece: Tensor) -> None:
        digest.update(piece.numpy().data)
        if piece is incomplete[0][0]:
            _, name, tensor = incomplete.popleft()
            take([(name, tensor)])

    group.broadcast(pieces(), arrived)
    return digest.hexdigest()


def address_towards(address: str, port: int) -> str:
    """Look up this host's own address on the route to another address; nothing is sent."""
    family = socket.getaddrinfo(address, port)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])
