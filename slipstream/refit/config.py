"""Settings of how weights travel and how a refit is checked; its errors; the state that an engine reports about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slipstream.config import require


class RefitError(RuntimeError):
    """An engine does not hold what the learner published: going on would train on another policy's rollouts."""


class ChannelBrokeError(RefitError):
    """Somebody else left a channel, or stood still: whoever raises this is not to blame."""


class Channel(StrEnum):
    """Ways of weights from the learner to the engines; `slipstream.refit.channel` chooses one."""

    AUTO = "auto"  # what fits where learner and engines run: see `channel.choice.resolve`
    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    NCCL = "nccl"
    IPC = "ipc"


@dataclass(frozen=True, kw_only=True)
class RefitConfig:
    """Settings of the way that weights take, and of the number of tensors that each refit compares.

    Versions, cache resets and the digest of the bytes are checked every time. Where the channel takes no digest, every
    refit compares every tensor.
    """

    channel: Channel = Channel.AUTO
    bucket_mib: float = 256.0  # of weights that are on their way at once; two buckets a process are held
    timeout_s: float = 600.0  # of one transfer: an engine that takes longer counts as dead
    check_every_steps: int = 1  # each tensor, whole layers in turn; the first refit compares all of them
    max_probe_difference: float = 0.1  # nats a token, where an engine hides its tensors and only its logprobs show

    def __post_init__(self) -> None:
        require(self.bucket_mib > 0, "refit.bucket_mib", "must be > 0", self.bucket_mib)
        require(self.timeout_s > 0, "refit.timeout_s", "must be > 0", self.timeout_s)
        require(self.check_every_steps >= 1, "refit.check_every_steps", "must be >= 1", self.check_every_steps)
        require(self.max_probe_difference > 0, "refit.max_probe_difference", "must be > 0", self.max_probe_difference)

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket."""
        return max(1, int(self.bucket_mib * 2**20))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """Versions that an engine says it holds, and the number of times that it forgot its cached prefixes."""

    policy_version: int
    policy_digest: str  # of the bytes that the last refit read; empty before the first, and where none are counted
    draft_version: int | None
    draft_digest: str = ""  # the same of the draft
    num_prefix_cache_resets: int
