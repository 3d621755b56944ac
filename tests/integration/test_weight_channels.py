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
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import start_learner
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


@pytest.fixture(scope="module")
def ends(models: dict[str, Path], ray_session: None) -> Iterator[Ends]:
    draft = speculative_config(DRAFT, models["old_draft"], 3)
    config = LearnerConfig(dtype=Dtype.FLOAT32, parallel=ParallelConfig(pipeline=2), num_threads=1)
    with (
        start_learner(config) as learner,
        start_engine(models["old"], config=ENGINE, speculative_config=draft) as engines,
    ):
        learner.load(models["new"], None)
        learner.start_draft(models["new"], DRAFT)
        yield Ends(learner=learner, engines=engines, models=models)


def require_gloo_as_shared_memory(learner: Any, engines: Any, models: dict[str, Path]) -> None:
    """Refit engines of the old policy and draft over both channels; what they hold and sample is the same."""

    def sample() -> GenerationResult:
        return engines.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)

    old = WeightFiles(policy=models["old"], policy_version=0, draft=models["old_draft"])
    engines.refit(old)
    before, found = sample(), []
    for version, config in enumerate((replace(GLOO, channel=Channel.SHARED_MEMORY), GLOO), start=1):
        engines.refit(old)
        assert tokens(sample()) == tokens(before)
        with open_channel(config, learner, engines) as channel:
            delivery = send(channel, version, draft_version=version)
        assert len(delivery.states) == len(engines.workers)
        for state in delivery.states:
            assert (state.policy_version, state.draft_version) == (version, version)
            assert (state.policy_digest, state.draft_digest) == (delivery.digest, delivery.draft_digest)
        held = [engines.start_fingerprints(is_draft=is_draft, turn=ALL)() for is_draft in (False, True)]
        assert all(each == of_engines[0] for of_engines in held for each in of_engines)
        found.append((sample(), held))
    (shared, held_by_shared), (gloo, held_by_gloo) = found
    assert tokens(shared) != tokens(before)
    require_equal(gloo, shared)
    assert held_by_gloo == held_by_shared


def test_engines_refitted_over_gloo_equal_those_refitted_by_shared_memory(ends: Ends) -> None:
    require_gloo_as_shared_memory(ends.learner, ends.engines, ends.models)


def test_an_engine_that_stands_still_is_named_within_the_deadline(ends: Ends) -> None:
    """Last in this module: the channel breaks. `tests/faults/test_lost_in_a_refit.py` kills an engine."""
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
