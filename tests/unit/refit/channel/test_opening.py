"""What opening a channel asks of each learner rank: gathering is collective, so all of them gather, or none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from slipstream.refit.channel.opening import open_sender
from slipstream.refit.channel.sender import Sender, StreamSettings
from slipstream.refit.channel.source import WeightSource
from slipstream.refit.config import Channel
from tests.unit.refit.channel.test_gloo import ThreadEngines

SETTINGS = StreamSettings(channel=Channel.GLOO, bucket_bytes=64, timeout_s=5.0)


class Passes:
    """Weights that count how often somebody went through all of them."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        yield "norm", torch.ones(3)
        self.num += 1


def opened(passes: Passes, *, rank: int) -> tuple[Sender, WeightSource]:
    source = WeightSource(passes, model="policy")
    sender = open_sender(SETTINGS, engines=ThreadEngines(1), sources=[source], rank=rank, address="127.0.0.1")
    return sender, source


def test_ranks_go_through_the_weights_equally_often_as_they_open_a_channel_and_as_they_send() -> None:
    first, second = Passes(), Passes()
    (sender, source), (follower, followed) = opened(first, rank=0), opened(second, rank=1)
    assert first.num == second.num

    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(sender.send, source, is_draft=False)
        assert follower.send(followed, is_draft=False).num_bytes == 0
        assert sent.result(20).num_bytes == 12
    assert first.num == second.num
    sender.close()
    follower.close()


def test_what_a_draft_consists_of_is_gathered_by_every_rank_as_well() -> None:
    for rank in (0, 1):
        policy, draft = Passes(), Passes()
        sources = [WeightSource(policy, model="policy"), WeightSource(draft, model="draft")]
        sender = open_sender(SETTINGS, engines=ThreadEngines(1), sources=sources, rank=rank, address="127.0.0.1")
        assert (policy.num, draft.num) == (1, 1)
        sender.close()
