"""The learner's half of a channel that streams: every rank has one, and rank 0's sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.refit.channel.source import WeightSource
from slipstream.refit.config import Channel


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
        """Which of the engines' models the next updates are for."""
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
        """That was all."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """What a sender is opened with."""

    channel: Channel
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What went over a channel."""

    num_bytes: int
    digest: str | None  # of the bytes in their order; None where the channel takes none


class Sender(Protocol):
    """One rank's part in sending. All ranks make the same calls at the same time."""

    def send(self, source: WeightSource, *, is_draft: bool) -> Sent:
        """Bring all of `source` into every engine's policy, or its draft.

        Raises:
            RefitError: an engine failed, died, or took longer than the settings allow.
            ValueError: a weight is not finite.
        """
        ...

    def close(self) -> None:
        """Leave the channel."""
        ...
