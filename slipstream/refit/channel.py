"""Channels that bring weights from the learner to the engines, as the driver controls them.

The driver sends no weights itself but calls the learner's ranks and the engines. The choice of the channel is a pure
function of the locations of learner and engines.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.config import require
from slipstream.refit.config import Channel, EngineState, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import Turn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
NUM_SNAPSHOTS = 2  # engines may read one version while the next is written
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Host, shared memory and device of a process."""

    host: str  # name in messages
    memory: str  # equal for two processes that see the same files in /dev/shm, which host names do not tell
    gpu: str | None = None  # UUID of the device; None on a CPU


def here(gpu: str | None = None) -> Location:
    """Return the location of this process."""
    host = socket.gethostname()
    if not (_SHARED_MEMORY.is_dir() and _BOOT.is_file()):
        return Location(host=host, memory=host, gpu=gpu)
    # A container has a file system of its own at /dev/shm, with another device number.
    return Location(host=host, memory=f"{_BOOT.read_text().strip()}/{os.stat(_SHARED_MEMORY).st_dev}", gpu=gpu)


def resolve(wanted: Channel, *, driver: Location, learner: Sequence[Location], engines: Sequence[Location]) -> Channel:
    """Choose the channel; `auto` takes the fastest that the locations allow, and another is refused if they do not.

    Args:
        driver: location of the driver, which makes the transfer directory.
        learner: location of each rank; rank 0 comes first and sends.
        engines: location of each worker of each engine.
    """
    if wanted is Channel.AUTO:
        fastest = (Channel.IPC, Channel.NCCL, Channel.SHARED_MEMORY, Channel.GLOO)
        return next(channel for channel in fastest if not _obstacle(channel, driver, learner, engines)[0])
    problem, fix = _obstacle(wanted, driver, learner, engines)
    require(not problem, "refit.channel", problem, wanted.value, fix)
    return wanted


def _obstacle(
    channel: Channel, driver: Location, learner: Sequence[Location], engines: Sequence[Location]
) -> tuple[str, str]:
    """Return the rule that the locations break, and the fix; empty texts if the channel is possible."""
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
class Snapshot:
    """A file with one version of a model's weights."""

    path: str
    version: int
    digest: str  # of the file's bytes, which every engine must report


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Result of a delivery: what was sent, and the state that every engine reports afterwards."""

    states: Sequence[EngineState]
    digest: str | None  # digest of the policy's bytes as sent; None for a channel without digests
    draft_digest: str | None = None  # digest of the draft's bytes as sent; None if no draft was sent
    origin: str  # file or channel that the engines read, for messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A version of the learner's weights that is ready for delivery.

    Attributes:
        policy: snapshot of the policy; None where weights stream from the learner.
        draft: snapshot of the newest draft; None where weights stream, and before the first draft.
    """

    policy_version: int
    policy: Snapshot | None = None
    draft: Snapshot | None = None


class EngineControl(Protocol):
    """Calls of a sender to all engines at once: the four calls of vLLM's `VLLMWeightSyncClient`, and two more.

    Each call returns when all engines have answered. A call raises an error that names the engines which failed, died,
    or missed the deadline.
    """

    num_workers: int  # receiving processes: the tensor-parallel ranks of all engines

    def aim(self, *, is_draft: bool) -> None:
        """Choose the model, policy or draft, that the next updates replace."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the channel; `rank_offset` in `init_info` is the first engine's."""
        ...

    def start_weight_update(self) -> None:
        """Begin an update of the chosen model."""
        ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Load a part of the weights; with a broadcast, wait for its end."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update."""
        ...


class WeightChannel(Protocol):
    """Channel that brings the learner's weights to every engine in two parts: an export, then a delivery."""

    keeps_weights: bool  # True: the learner may train between export and delivery, and a delivery may be repeated
    takes_digest: bool  # True: the channel computes a digest of the bytes

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        """Begin to export the learner's present policy, and its draft if `draft_version` is given.

        Returns a function that waits for the export, and raises ValueError if a weight is not finite. The version
        before must be delivered, as files are reused.
        """
        ...

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        """Begin to load the policy into every engine, and the draft if `draft_version` is given.

        Returns a function that waits for the engines' answers, once all calls to the engines are made. Both raise
        RefitError if an engine failed, died or missed the deadline, and ValueError if a streamed weight is not finite.
        """
        ...

    def engines_changed(self) -> None:
        """Prepare the channel for engines that were replaced."""
        ...


def send(channel: WeightChannel, policy_version: int, *, draft_version: int | None = None) -> Delivery:
    """Export and deliver; raises as the two parts do."""
    exported = channel.start_export(policy_version, draft_version=draft_version)()
    return channel.start_delivery(exported, draft_version=draft_version)()


class SendingLearner(Protocol):
    """Learner as far as a refit needs it; each call runs on all ranks, after all calls made before.

    A `start_` method returns at once. The function that it returns waits for the result, may be called again, and
    raises the errors of the call.
    """

    def locations(self) -> list[Location]:
        """Return the location of each rank, rank 0 first."""
        ...

    def weight_bytes(self) -> int:
        """Compute the size of all models that are sent."""
        ...

    def start_publish(self, directory: Path, version: int, *, is_draft: bool = False) -> Callable[[], Snapshot]:
        """Begin to write a snapshot of the policy, or of the draft."""
        ...

    def open_stream(self, settings: RefitConfig, engines: EngineControl) -> None:
        """Join a channel with the engines; leaves a channel that was open."""
        ...

    def stream(self, *, is_draft: bool, timeout_s: float) -> str | None:
        """Send the policy, or the draft, to the engines that joined; returns the digest of the bytes, if any."""
        ...

    def close_stream(self) -> None:
        """Leave the channel."""
        ...

    def start_fingerprints(
        self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
    ) -> Callable[[], dict[str, int]]:
        """Begin to fingerprint the tensors in `turn` as engines with these types must hold them."""
        ...

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> Sequence[NDArray[np.float32]]:
        """Compute the logprobs that the engines' logprobs are compared with."""
        ...


class ReceivingEngines(Protocol):
    """Rollout engines as far as a refit needs them; each call runs on all engines, after all calls made before.

    A `start_` method returns at once; the function that it returns waits for the answers, one an engine.
    """

    def locations(self) -> list[Location]:
        """Return the location of each worker of each engine."""
        ...

    def start_refit(self, weights: WeightFiles) -> Callable[[], list[EngineState]]:
        """Begin to load weights from files."""
        ...

    def control(self, channel: Channel, *, timeout_s: float) -> EngineControl:
        """Make the control by which a sender in another process calls the engines."""
        ...

    def start_adopt(self, *, policy_version: int, draft_version: int | None) -> Callable[[], list[EngineState]]:
        """Begin to adopt these versions for the received weights."""
        ...

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """Return the types of the readable tensors; raises LookupError if an engine hides one."""
        ...

    def start_fingerprints(self, *, is_draft: bool, turn: Turn) -> Callable[[], list[dict[str, int]]]:
        """Begin to fingerprint the tensors in `turn`."""
        ...

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> Sequence[Sequence[Sequence[float]]]:
        """Compute the logprobs of each sequence's tokens."""
        ...

    def states(self) -> list[EngineState]:
        """Return the versions that each engine holds."""
        ...


def transfer_directory() -> Path:
    """Make a directory for snapshots, in memory if the host has such a file system; the caller removes it."""
    where = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix=_transfer_prefix(os.getpid()), dir=where))


def discard_transfers(pid: int) -> None:
    """Remove the transfer directories of a process that was killed."""
    if _SHARED_MEMORY.is_dir():
        for directory in _SHARED_MEMORY.glob(f"{_transfer_prefix(pid)}*"):
            shutil.rmtree(directory, ignore_errors=True)


def require_space(directory: Path, num_bytes: int) -> None:
    """Refuse a file system without room for the snapshots of `num_bytes` of weights.

    A process that writes to a mapped page without room is killed by a signal, without an error.
    """
    free, needed = shutil.disk_usage(directory).free, NUM_SNAPSHOTS * num_bytes
    rule = f"shared_memory needs {needed:,} bytes for {NUM_SNAPSHOTS} snapshots of the weights in {directory.parent}"
    fix = "mount a larger /dev/shm (a pod has 64 MiB unless it says otherwise), or set gloo, which needs no files"
    require(needed <= free, "refit.channel", rule, f"{free:,} bytes free", fix)


def _transfer_prefix(pid: int) -> str:
    return f"slipstream-refit-{pid}-"


class SharedMemoryChannel:
    """Channel of snapshot files in the shared memory of one host: the learner writes, the engines read."""

    keeps_weights = True  # a file stays until the version after the next is written
    takes_digest = True

    def __init__(self, learner: SendingLearner, engines: ReceivingEngines, directory: Path) -> None:
        """Check the space in `directory`, which the caller removes."""
        require_space(directory, learner.weight_bytes())
        self._learner = learner
        self._engines = engines
        self._directory = directory
        self._draft: Snapshot | None = None  # the last draft that was written

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        """Begin to write the learner's snapshots."""
        policy, draft = self._learner.start_publish(self._directory, policy_version), None
        if draft_version is not None:
            draft = self._learner.start_publish(self._directory, draft_version, is_draft=True)

        def wait() -> Exported:
            written = policy()
            if draft is not None:
                self._draft = draft()
            return Exported(policy_version=policy_version, policy=written, draft=self._draft)

        return wait

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        """Begin to load the snapshots into the engines."""
        policy, draft, draft_digest = exported.policy, exported.draft, None
        assert policy is not None, "exported over another channel"
        weights = WeightFiles(policy=Path(policy.path), policy_version=policy.version)
        if draft_version is not None:
            assert draft is not None, f"draft version {draft_version} was not exported"
            weights = replace(weights, draft=Path(draft.path), draft_version=draft.version)
            draft_digest = draft.digest
        states = self._engines.start_refit(weights)
        return lambda: Delivery(states=states(), digest=policy.digest, draft_digest=draft_digest, origin=policy.path)

    def engines_changed(self) -> None:
        """Do nothing, as any engine can read the files."""


class StreamChannel:
    """Channel over gloo, NCCL or CUDA IPC: the learner's ranks send, and rank 0 calls the engines meanwhile."""

    keeps_weights = False

    def __init__(self, learner: SendingLearner, engines: ReceivingEngines, settings: RefitConfig) -> None:
        """Join learner and engines over the resolved channel of `settings`."""
        self._learner = learner
        self._engines = engines
        self._settings = settings
        self.takes_digest = settings.channel is Channel.GLOO  # vLLM's NCCL and IPC transfers compute none
        self.engines_changed()

    def engines_changed(self) -> None:
        """Let all engines join again."""
        engines = self._engines.control(self._settings.channel, timeout_s=self._settings.timeout_s)
        self._learner.open_stream(self._settings, engines)

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        """Do nothing, as weights are sent at delivery."""
        del draft_version
        return lambda: Exported(policy_version=policy_version)

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        """Send the learner's weights and begin to adopt their versions."""
        timeout_s, origin = self._settings.timeout_s, f"the {self._settings.channel.value} channel"
        digest = self._learner.stream(is_draft=False, timeout_s=timeout_s)
        draft = None if draft_version is None else self._learner.stream(is_draft=True, timeout_s=timeout_s)
        states = self._engines.start_adopt(policy_version=exported.policy_version, draft_version=draft_version)
        return lambda: Delivery(states=states(), digest=digest, draft_digest=draft, origin=origin)


@contextmanager
def open_channel(config: RefitConfig, learner: SendingLearner, engines: ReceivingEngines) -> Iterator[WeightChannel]:
    """Open the channel of `config` between a learner with a loaded policy and running engines."""
    channel = resolve(config.channel, driver=here(), learner=learner.locations(), engines=engines.locations())
    logger.info("refit: weights are sent by %s", channel.value)
    if channel is Channel.SHARED_MEMORY:
        directory = transfer_directory()
        try:
            yield SharedMemoryChannel(learner, engines, directory)
        finally:
            shutil.rmtree(directory)
        return
    yield StreamChannel(learner, engines, replace(config, channel=channel))
    learner.close_stream()
