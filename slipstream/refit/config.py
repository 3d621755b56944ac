"""Settings of how weights travel and how a refit is checked; its errors; the state that an engine reports about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from slipstream.config import Checked, PositiveFloat, PositiveInt


class RefitError(RuntimeError):
    """An engine does not hold what the learner published: going on would train on another policy's rollouts."""


class ChannelBrokeError(RefitError):
    """Somebody else left a channel, or stood still: whoever raises this is not to blame."""


class Channel(StrEnum):
    """Ways of weights from the learner to the engines; `slipstream.refit.channel` chooses one."""

    AUTO = "auto"  # what fits where learner and engines run: see `channel.resolve`
    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    NCCL = "nccl"
    IPC = "ipc"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """Format of 8-bit weights in an engine, which `slipstream.refit.quantization` computes."""

    dtype: str  # torch's name of the values' type
    largest: float  # largest magnitude of a weight's value
    largest_input: float  # the same of an input's value
    num_ranks: int = 1  # of an engine: each rounds its own slice of an input that is split over them


class RefitConfig(Checked, path="refit"):
    """Settings of the way that weights take, and of the number of tensors that each refit compares.

    Versions, cache resets and the digest of the bytes are checked every time. Where the channel takes no digest, every
    refit compares every tensor.
    """

    channel: Channel = Channel.AUTO
    """Way of the weights from learner to engines; `auto` takes the fastest that the placement allows. Set for tests."""
    bucket_mib: PositiveFloat = 256.0
    """Weights on their way at once, in MiB; each process holds two buckets. Set it lower where memory is short."""
    timeout_s: PositiveFloat = 600.0
    """Seconds of one transfer, after which an engine counts as dead. Set it higher for slow networks."""
    check_every_steps: PositiveInt = 1
    """Steps in which every tensor is compared once, whole layers in turn; the first refit compares all of them."""

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket."""
        return max(1, int(self.bucket_mib * 2**20))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Weights of the policy, and of the draft if it changes: each a safetensors file with the names of the Hugging Face
    checkpoint, or a directory of such files.
    """

    policy: Path
    policy_version: int
    draft: Path | None = None
    draft_version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """Versions that an engine says it holds, and the number of times that it forgot its cached prefixes."""

    policy_version: int
    policy_digest: str  # of the bytes that the last refit read; empty before the first, and where none are counted
    draft_version: int | None
    draft_digest: str = ""  # the same of the draft
    num_prefix_cache_resets: int
