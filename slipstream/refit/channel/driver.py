"""What the refit gate asks of a channel, and the channels as a driver holds them.

A driver moves no weights: it tells the learner's ranks and the engines to.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
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


class WeightChannel(Protocol):
    """Brings the learner's present weights to every engine."""

    def send(self, policy_version: int, *, draft_version: int | None = None) -> Delivery:
        """Send the policy as `policy_version`, and the learner's draft if a version of it is named.

        Raises:
            RefitError: an engine failed, died or did not take them in time.
            ValueError: a weight is not finite.
        """
        ...

    def send_again(self, *, with_draft: bool) -> Delivery | None:
        """Send what was sent last, although the learner has moved on; None: it is nowhere but in the engines."""
        ...

    def engines_changed(self) -> None:
        """Some engines are new, and have not joined."""
        ...


class SendingLearner(Protocol):
    """The learner's ranks, as far as channels need them; each call is made on all ranks."""

    def locations(self) -> list[Location]:
        """Where each rank computes, rank 0 first."""
        ...

    def weight_bytes(self) -> int:
        """Size of the policy as it is sent."""
        ...

    def publish(self, directory: Path, version: int) -> Snapshot:
        """Write the policy where engines on this host find it."""
        ...

    def publish_draft(self, directory: Path, version: int) -> Snapshot:
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

    def refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> list[EngineState]:
        """See `VllmEngine.refit`; one state an engine."""
        ...

    def control(self, channel: Channel, *, timeout_s: float) -> EngineControl:
        """What a sender in another process steers them with."""
        ...

    def adopt(self, *, policy_version: int, draft_version: int | None) -> list[EngineState]:
        """See `VllmEngine.adopt`; one state an engine."""
        ...


class SharedMemoryChannel:
    """Versioned files in one host's memory: the learner writes, the engines read."""

    def __init__(self, learner: SendingLearner, engines: ReceivingEngines, directory: Path) -> None:
        """The caller removes `directory`.

        Raises:
            ConfigError: its file system has no room for two versions.
        """
        require_space(directory, learner.weight_bytes())
        self._learner = learner
        self._engines = engines
        self._directory = directory
        self._sent: Snapshot | None = None
        self._sent_draft: Snapshot | None = None

    def send(self, policy_version: int, *, draft_version: int | None = None) -> Delivery:
        """See `WeightChannel.send`."""
        self._sent = self._learner.publish(self._directory, policy_version)
        if draft_version is not None:
            self._sent_draft = self._learner.publish_draft(self._directory, draft_version)
        return self._hand_over(self._sent, None if draft_version is None else self._sent_draft)

    def send_again(self, *, with_draft: bool) -> Delivery | None:
        """See `WeightChannel.send_again`: the files stay until the version after the next is written."""
        if self._sent is None:
            return None
        return self._hand_over(self._sent, self._sent_draft if with_draft else None)

    def _hand_over(self, policy: Snapshot, draft: Snapshot | None) -> Delivery:
        states = self._engines.refit(
            Path(policy.path),
            policy_version=policy.version,
            draft=None if draft is None else Path(draft.path),
            draft_version=0 if draft is None else draft.version,
        )
        return Delivery(
            states=states,
            digest=policy.digest,
            draft_digest=None if draft is None else draft.digest,
            num_bytes=policy.num_bytes + (0 if draft is None else draft.num_bytes),
            origin=policy.path,
        )

    def engines_changed(self) -> None:
        """See `WeightChannel.engines_changed`: whoever is told where the file is reads it."""


class StreamChannel:
    """gloo, NCCL and IPC: the learner's ranks send, and steer the engines while they do."""

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

    def send(self, policy_version: int, *, draft_version: int | None = None) -> Delivery:
        """See `WeightChannel.send`."""
        sent = self._learner.stream(is_draft=False, timeout_s=self._timeout_s)
        draft = None if draft_version is None else self._learner.stream(is_draft=True, timeout_s=self._timeout_s)
        return Delivery(
            states=self._engines.adopt(policy_version=policy_version, draft_version=draft_version),
            digest=sent.digest,
            draft_digest=None if draft is None else draft.digest,
            num_bytes=sent.num_bytes + (0 if draft is None else draft.num_bytes),
            origin=f"the {self._channel.value} channel",
        )

    def send_again(self, *, with_draft: bool) -> Delivery | None:
        """See `WeightChannel.send_again`: what streams leaves nothing behind."""
        del with_draft

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
