"""Joining a channel that streams: which sender a rank of the learner becomes."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.refit.channel.sender import EngineControl, Sender, Sent, StreamSettings
from slipstream.refit.channel.source import WeightSource
from slipstream.refit.config import Channel


class Follower:
    """A rank that sends nothing itself and takes part in the gathering of what rank 0 sends."""

    def send(self, source: WeightSource, *, is_draft: bool) -> Sent:
        """Go through the weights."""
        del is_draft
        for _ in source:
            pass
        return Sent(num_bytes=0, digest=None)

    def close(self) -> None:
        """Nothing is open."""


def open_sender(
    settings: StreamSettings, *, engines: EngineControl, sources: Sequence[WeightSource], rank: int, address: str
) -> Sender:
    """Join the channel with the engines.

    Args:
        sources: of every model whose weights will travel, the policy's first.
        address: of this rank's host, which the engines' hosts can reach.
    """
    if settings.channel is Channel.IPC:
        from slipstream.refit.channel import vllm

        return vllm.open_ipc(settings, engines=engines, sources=sources, rank=rank)
    for source in sources:
        source.metas()  # collective, so on all ranks or on none: one that gathered alone would wait for ever
    if rank > 0:
        return Follower()
    if settings.channel is Channel.NCCL:
        from slipstream.refit.channel import vllm

        return vllm.open_nccl(settings, engines=engines, source=sources[0], address=address)
    from slipstream.refit.channel import gloo

    assert settings.channel is Channel.GLOO, settings.channel
    return gloo.GlooSender(settings, engines=engines, address=address)
