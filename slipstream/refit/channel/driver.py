"""What the refit gate asks of a channel, and the channels as a driver holds them.

A driver moves no weights: it tells the learner's ranks and the engines to.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slipstream.refit.channel.choice import Location, here, resolve
from slipstream.refit.config import Channel, EngineState, RefitConfig
from slipstream.refit.snapshot import Snapshot, require_space, transfer_directory

if TYPE_CHECKING:
    from slipstream.refit.channel.sender import EngineControl, Sent, StreamSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """What was sent, and what every engine says that it holds now."""

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
        """Whether what was exported can be delivered, more than once, whatever the learner has by then.

        Else the learner must have the weights of that version until they are delivered.
        """
        ...

    @property
    def takes_digest(self) -> bool:
        """Of the bytes that it brings."""
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
    """The learner's ranks, as far as channels need them; each call is made on all ranks."""

    def locations(self) -> list[Location]:
        """Where each rank computes, rank 0 first."""
        ...

    def weight_bytes(self) -> int:
        """Size of all models that are sent."""
        ...

    def start_publish(self, directory: Path, version: int) -> Callable[[], Snapshot]:
        """Have the policy written where engines on this host find it; what it returns waits for that."""
        ...

    def start_publish_draft(self, directory: Path, version: int) -> Callable[[], Snapshot]:
        """The same of the draft."""
        ...

    def open_stream(self, settings: StreamSettings, engines: EngineControl) -> None:
        """Join a channel with the engines; one that was open is left."""
        ...

    def stream(self, *, is_draft: bool, timeout_s: float) -> Sent:
        """Send the policy, or the draft, to the engines that joined."""
        ...

    def close_stream(self) -> None:
        """Leave the channel."""
        ...


class ReceivingEngines(Protocol):
    """The engines, as far as channels need them."""

    def locations(self) -> list[Location]:
        """Where each worker of each engine computes."""
        ...

    def start_refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> Callable[[], list[EngineState]]:
        """See `VllmEngine.refit`; what it returns waits for the states, one an engine."""
        ...

    def control(self, channel: Channel, *, timeout_s: float) -> EngineControl:
        """What a sender in another process steers them with."""
        ...

    def start_adopt(self, *, policy_version: int, draft_version: int | None) -> Callable[[], list[EngineState]]:
        """See `VllmEngine.adopt`; what it returns waits for the states, one an engine."""
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
        """See `WeightChannel.start_export`."""
        policy = self._learner.start_publish(self._directory, policy_version)
        draft = None
        if draft_version is not None:
            draft = self._learner.start_publish_draft(self._directory, draft_version)

        def wait() -> Exported:
            written = policy()
            if draft is not None:
                self._draft = draft()
            return Exported(policy_version=policy_version, policy=written, draft=self._draft)

        return wait

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        """See `WeightChannel.start_delivery`."""
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
        """See `WeightChannel.engines_changed`: whoever is told where the file is reads it."""


class StreamChannel:
    """gloo, NCCL and IPC: the learner's ranks send, and steer the engines while they do."""

    keeps_weights = False

    def __init__(
        self, learner: SendingLearner, engines: ReceivingEngines, channel: Channel, config: RefitConfig
    ) -> None:
        """Join learner and engines; `close` parts them."""
        from slipstream.refit.channel.sender import StreamSettings

        self._learner = learner
        self._engines = engines
        self._channel = channel
        self._timeout_s = config.timeout_s
        self._settings = StreamSettings(channel=channel, bucket_bytes=config.bucket_bytes, timeout_s=config.timeout_s)
        self.engines_changed()

    def engines_changed(self) -> None:
        """See `WeightChannel.engines_changed`: all of them join anew."""
        engines = self._engines.control(self._channel, timeout_s=self._timeout_s)
        self._learner.open_stream(self._settings, engines)

    @property
    def takes_digest(self) -> bool:
        """Of what we send ourselves; vLLM's own transfers count no bytes."""
        return self._channel is Channel.GLOO

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        """See `WeightChannel.start_export`: nothing is written anywhere."""
        del draft_version
        return lambda: Exported(policy_version=policy_version)

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        """See `WeightChannel.start_delivery`: the learner's ranks steer the engines until all has come."""
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
        """Part them."""
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
