"""Channels by which weights travel, as the driver holds them: what the gate asks of one, and which fits the places.

A driver moves no weights: it tells the learner's ranks and the engines to. Which channel is taken is a pure function
of the places where learner and engines run.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.refit.config import Channel, EngineState, RefitConfig
from slipstream.refit.fingerprint import Turn
from slipstream.refit.snapshot import Snapshot, require_space, transfer_directory

if TYPE_CHECKING:
    from slipstream.refit.stream import EngineControl, Sent

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Place in which a process of a run computes."""

    host: str  # for people
    memory: str  # equal where two processes see the same files in memory: neither host names nor addresses tell
    gpu: str | None = None  # the device's own id, whatever a mask calls it; None on a CPU


def here(gpu: str | None = None) -> Location:
    """Place of this process."""
    host = socket.gethostname()
    if not (_SHARED_MEMORY.is_dir() and _BOOT.is_file()):
        return Location(host=host, memory=host, gpu=gpu)
    # A container, or a host made of namespaces, has a file system of its own there: its device number says so.
    return Location(host=host, memory=f"{_BOOT.read_text().strip()}/{os.stat(_SHARED_MEMORY).st_dev}", gpu=gpu)


def resolve(wanted: Channel, *, driver: Location, learner: Sequence[Location], engines: Sequence[Location]) -> Channel:
    """The channel to take; `auto` takes the fastest that the hosts can do.

    Args:
        driver: of the process that holds the transfer directory.
        learner: of each rank, rank 0 first: it sends.
        engines: of each worker of each engine.
    Raises:
        ConfigError: the hosts cannot do the channel asked for.
    """
    if wanted is Channel.AUTO:
        return _best(driver, learner, engines)
    problem, fix = _obstacle(wanted, driver, learner, engines)
    require(not problem, "refit.channel", problem, wanted.value, fix)
    return wanted


def _best(driver: Location, learner: Sequence[Location], engines: Sequence[Location]) -> Channel:
    for channel in (Channel.IPC, Channel.NCCL, Channel.SHARED_MEMORY):
        if not _obstacle(channel, driver, learner, engines)[0]:
            return channel
    return Channel.GLOO


def _obstacle(
    channel: Channel, driver: Location, learner: Sequence[Location], engines: Sequence[Location]
) -> tuple[str, str]:
    """The rule that the places break, and what to set instead; empty if there is none."""
    cpus = sorted({place.host for place in (*learner, *engines) if place.gpu is None})
    trained, served = {place.gpu for place in learner}, {place.gpu for place in engines}
    match channel:
        case Channel.SHARED_MEMORY:
            hosts = [driver, learner[0], *engines]
            if len({place.memory for place in hosts}) > 1:
                names = ", ".join(sorted({place.host for place in hosts}))
                rule = f"must cross hosts or containers: driver, learner rank 0 and engines share no memory ({names})"
                return rule, "set auto, or gloo"
        case Channel.NCCL | Channel.IPC if cpus:
            return f"must do without CUDA: learner or engines compute on the CPU of {', '.join(cpus)}", "set auto"
        case Channel.NCCL if learner[0].gpu in served:
            return "must not join two processes on one GPU: learner rank 0 shares its GPU with an engine", "set ipc"
        case Channel.IPC if not served <= trained:
            alone = len(served - trained)
            return f"must find a learner rank on every engine's GPU: {alone} of {len(served)} have none", "set nccl"
    return "", ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Weights that were sent, and the states that every engine reports after it."""

    states: Sequence[EngineState]
    digest: str | None  # of the policy's bytes as they were sent; None where the channel takes none
    draft_digest: str | None = None  # the same of the draft; None also if none was sent
    num_bytes: int
    origin: str  # where the engines read, for people


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A version of the learner's weights on its way.

    Attributes:
        policy: where it was written; None where weights stream, straight from the learner.
        draft: the learner's newest draft at that version; None also if none was ever written.
    """

    policy_version: int
    policy: Snapshot | None = None
    draft: Snapshot | None = None


class WeightChannel(Protocol):
    """Brings the learner's weights to every engine, in two parts: first the learner's, then the engines'."""

    @property
    def keeps_weights(self) -> bool:
        """True if an export can be delivered, more than once, whatever the learner has by then.

        Else the learner must have the weights of that version until they are delivered.
        """
        ...

    @property
    def takes_digest(self) -> bool:
        """True if the channel counts the bytes that it brings in a digest."""
        ...

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        """Have the learner's present policy written as `policy_version`, and its draft if a version of it is named.

        Returns at once; what it returns waits. The version before must have been delivered, as files are reused.

        Raises:
            ValueError: of what it returns: a weight is not finite.
        """
        ...

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        """Have every engine take the policy, and the draft as this version if one is named.

        Returns once all that is asked of the engines was asked; what it returns waits for their answers.

        Raises:
            RefitError: an engine failed, died or did not take them in time; of what it returns too.
            ValueError: a weight is not finite, where they stream.
        """
        ...

    def engines_changed(self) -> None:
        """Some engines are new, and have not joined."""
        ...


def send(channel: WeightChannel, policy_version: int, *, draft_version: int | None = None) -> Delivery:
    """Both parts, one after the other; errors as of the two."""
    exported = channel.start_export(policy_version, draft_version=draft_version)()
    return channel.start_delivery(exported, draft_version=draft_version)()


class SendingLearner(Protocol):
    """Ranks of the learner, as far as a refit needs them; each call is made on all ranks.

    What a method starts is of the weights that the learner has once all is done that it was asked before. Such a method
    returns at once; what it returns waits, as often as it is called, and raises what went wrong.
    """

    def locations(self) -> list[Location]:
        """Place of each rank, rank 0 first."""
        ...

    def weight_bytes(self) -> int:
        """Size of all models that are sent."""
        ...

    def start_publish(self, directory: Path, version: int, *, is_draft: bool = False) -> Callable[[], Snapshot]:
        """Have the policy, or the draft, written where engines on this host find it."""
        ...

    def open_stream(self, settings: RefitConfig, engines: EngineControl) -> None:
        """Join a channel with the engines; one that was open is left."""
        ...

    def stream(self, *, is_draft: bool, timeout_s: float) -> Sent:
        """Send the policy, or the draft, to the engines that joined."""
        ...

    def close_stream(self) -> None:
        """Leave the channel."""
        ...

    def start_fingerprints(
        self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
    ) -> Callable[[], dict[str, int]]:
        """Compute, of every tensor whose turn it is, the fingerprint that an engine with these types must have."""
        ...

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> Sequence[NDArray[np.float32]]:
        """Logprobs that those of the engines must be near to."""
        ...


class ReceivingEngines(Protocol):
    """Rollout engines, as far as a refit needs them. The methods are those of `VllmEngine`, asked of all engines.

    What a `start_` method returns waits for the answers, one an engine; an engine answers once it has done all that it
    was asked before.
    """

    def locations(self) -> list[Location]:
        """Place of each worker of each engine."""
        ...

    def start_refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> Callable[[], list[EngineState]]:
        """Have the engines read files."""
        ...

    def control(self, channel: Channel, *, timeout_s: float) -> EngineControl:
        """Control with which a sender in another process steers them."""
        ...

    def start_adopt(self, *, policy_version: int, draft_version: int | None) -> Callable[[], list[EngineState]]:
        """Have the engines call by these versions what they received."""
        ...

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """Types of the tensors that can be read; `LookupError` where they cannot."""
        ...

    def start_fingerprints(self, *, is_draft: bool, turn: Turn) -> Callable[[], list[dict[str, int]]]:
        """Compute the fingerprints of the tensors whose turn it is."""
        ...

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> Sequence[Sequence[Sequence[float]]]:
        """Logprobs of each sequence's tokens."""
        ...

    def states(self) -> list[EngineState]:
        """Versions that each engine holds."""
        ...


class SharedMemoryChannel:
    """Versioned files in one host's memory: the learner writes, the engines read."""

    keeps_weights = True  # a file stays until the version after the next is written
    takes_digest = True

    def __init__(self, learner: SendingLearner, engines: ReceivingEngines, directory: Path) -> None:
        """The caller removes `directory`.

        Raises:
            ConfigError: its file system has no room for two versions.
        """
        require_space(directory, learner.weight_bytes())
        self._learner = learner
        self._engines = engines
        self._directory = directory
        self._draft: Snapshot | None = None  # that was written last

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        """Have the learner write files."""
        policy = self._learner.start_publish(self._directory, policy_version)
        draft = None
        if draft_version is not None:
            draft = self._learner.start_publish(self._directory, draft_version, is_draft=True)

        def wait() -> Exported:
            written = policy()
            if draft is not None:
                self._draft = draft()
            return Exported(policy_version=policy_version, policy=written, draft=self._draft)

        return wait

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        """Have the engines read what was written."""
        policy = exported.policy
        assert policy is not None, "exported over another channel"
        draft = exported.draft if draft_version is not None else None
        states = self._engines.start_refit(
            Path(policy.path),
            policy_version=policy.version,
            draft=None if draft is None else Path(draft.path),
            draft_version=0 if draft is None else draft.version,
        )
        return lambda: Delivery(
            states=states(),
            digest=policy.digest,
            draft_digest=None if draft is None else draft.digest,
            num_bytes=policy.num_bytes + (0 if draft is None else draft.num_bytes),
            origin=policy.path,
        )

    def engines_changed(self) -> None:
        """Do nothing: whoever is told where a file is reads it."""


class StreamChannel:
    """gloo, NCCL and IPC: the learner's ranks send, and steer the engines while they do."""

    keeps_weights = False

    def __init__(
        self, learner: SendingLearner, engines: ReceivingEngines, channel: Channel, config: RefitConfig
    ) -> None:
        """Join learner and engines until `close`."""
        self._learner = learner
        self._engines = engines
        self._channel = channel
        self._timeout_s = config.timeout_s
        self._settings = replace(config, channel=channel)
        self.engines_changed()

    def engines_changed(self) -> None:
        """Have all engines join anew."""
        engines = self._engines.control(self._channel, timeout_s=self._timeout_s)
        self._learner.open_stream(self._settings, engines)

    @property
    def takes_digest(self) -> bool:
        """True of what we send ourselves; vLLM's own transfers count no bytes."""
        return self._channel is Channel.GLOO

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        """Write nothing: weights leave the learner when they are delivered."""
        del draft_version
        return lambda: Exported(policy_version=policy_version)

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        """Have the learner's ranks send, and steer the engines until all has come."""
        sent = self._learner.stream(is_draft=False, timeout_s=self._timeout_s)
        draft = None if draft_version is None else self._learner.stream(is_draft=True, timeout_s=self._timeout_s)
        states = self._engines.start_adopt(policy_version=exported.policy_version, draft_version=draft_version)
        return lambda: Delivery(
            states=states(),
            digest=sent.digest,
            draft_digest=None if draft is None else draft.digest,
            num_bytes=sent.num_bytes + (0 if draft is None else draft.num_bytes),
            origin=f"the {self._channel.value} channel",
        )

    def close(self) -> None:
        """Leave the channel."""
        self._learner.close_stream()


@contextmanager
def open_channel(config: RefitConfig, learner: SendingLearner, engines: ReceivingEngines) -> Iterator[WeightChannel]:
    """The channel of `config` between a learner that has loaded its policy and engines that run.

    Raises:
        ConfigError: the hosts cannot do it.
    """
    channel = resolve(config.channel, driver=here(), learner=learner.locations(), engines=engines.locations())
    logger.info("refit: weights travel by %s", channel.value)
    if channel is Channel.SHARED_MEMORY:
        directory = transfer_directory()
        try:
            yield SharedMemoryChannel(learner, engines, directory)
        finally:
            shutil.rmtree(directory)
        return
    stream = StreamChannel(learner, engines, channel, config)
    yield stream
    stream.close()
