"""The channels between a real learner of two pipeline stages and two real engines: what arrives, and who failed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.methods import speculative_config
from slipstream.engine.protocol import GenerationResult
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.refit.channel import open_channel, send
from slipstream.refit.config import Channel, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL
from slipstream.types import Dtype
from slipstream.workers.calls import LostWorkerError
from tests import small
from tests.small import DRAFT, PROMPTS, SAMPLING, require_equal, tokens

pytestmark = pytest.mark.slow

ENGINE = replace(small.ENGINE, num_engines=2)
_STOPPED = (
    r"^engine 1 on [\d.]+ \(stopped\) did not answer within 5 s \(refit\.timeout_s\) during the start of an update"
)
# The policy has 0.6 MB: buckets of 21 kB begin and end inside tensors.
GLOO = RefitConfig(channel=Channel.GLOO, bucket_mib=0.02, timeout_s=60.0)


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A learner that holds the policy `new` and a draft of its own, and engines that started with `old`."""

    learner: Any
    engines: Any
    models: dict[str, Path]

    def back(self) -> None:
        self.engines.refit(WeightFiles(policy=self.models["old"], policy_version=0, draft=self.models["old_draft"]))

    def sample(self) -> GenerationResult:
        return self.engines.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)


@pytest.fixture(scope="module")
def ends(models: dict[str, Path], ray_session: None) -> Iterator[Ends]:
    from slipstream.workers.engines import start_engine
    from slipstream.workers.learners import start_learner

    draft = speculative_config(DRAFT, models["old_draft"], 3)
    config = LearnerConfig(dtype=Dtype.FLOAT32, parallel=ParallelConfig(pipeline=2), num_threads=1)
    with (
        start_learner(config) as learner,
        start_engine(models["old"], config=ENGINE, speculative_config=draft) as engines,
    ):
        learner.load(models["new"], None)
        learner.start_draft(models["new"], DRAFT)
        yield Ends(learner=learner, engines=engines, models=models)


def test_engines_refitted_over_gloo_equal_those_refitted_by_shared_memory(ends: Ends) -> None:
    ends.back()
    before = ends.sample()
    results, digests = {}, {}
    for version, config in enumerate((RefitConfig(channel=Channel.SHARED_MEMORY), GLOO), start=1):
        ends.back()
        assert tokens(ends.sample()) == tokens(before)
        with open_channel(config, ends.learner, ends.engines) as channel:
            delivery = send(channel, version, draft_version=version)
        assert [(state.policy_version, state.draft_version) for state in delivery.states] == [(version, version)] * 2
        assert {state.policy_digest for state in delivery.states} == {delivery.digest}
        assert {state.draft_digest for state in delivery.states} == {delivery.draft_digest}
        results[config.channel], digests[config.channel] = ends.sample(), delivery.digest
        for is_draft in (False, True):
            held = ends.engines.start_fingerprints(is_draft=is_draft, turn=ALL)()
            assert held[0] == held[1]
            results[config.channel, is_draft] = held[0]
    shared, gloo = results[Channel.SHARED_MEMORY], results[Channel.GLOO]
    assert tokens(shared) != tokens(before)
    require_equal(gloo, shared)
    for is_draft in (False, True):
        assert results[Channel.GLOO, is_draft] == results[Channel.SHARED_MEMORY, is_draft]


def test_an_engine_that_stands_still_is_named_within_the_deadline(ends: Ends) -> None:
    """Last but one in this module: the channel breaks."""
    pid = ends.engines.workers[1].pid
    config = RefitConfig(channel=Channel.GLOO, timeout_s=5.0)
    with open_channel(config, ends.learner, ends.engines) as channel:
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        try:
            with pytest.raises(LostWorkerError, match=_STOPPED) as caught:
                send(channel, 3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert time.monotonic() - start < 25.0
        assert caught.value.workers == (ends.engines.workers[1],)


def test_an_engine_that_was_killed_is_named(ends: Ends) -> None:
    """Last in this module: one engine is gone."""
    with open_channel(GLOO, ends.learner, ends.engines) as channel:
        os.kill(ends.engines.workers[1].pid, signal.SIGKILL)
        with pytest.raises(LostWorkerError, match=r"^engine 1 on [\d.]+ died during the start of an update"):
            send(channel, 4)
