"""A MiMo that drafts with its own MTP layer on the real engine: refitted with the policy, and lossless."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.methods import DraftMethod, speculative_config
from slipstream.learner.config import LearnerConfig
from slipstream.losslessness.sampling import Sample, draw
from slipstream.losslessness.verdict import LOSSLESS
from slipstream.refit.channel import open_channel, send
from slipstream.refit.config import Channel, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL, file_fingerprints
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import start_learner
from tests import small
from tests.small import CERTIFICATE, certified, draft_with, gate_of, prompts, require_equal, tokens
from tests.unit.learner import mimo

pytestmark = pytest.mark.slow

ENGINE = replace(small.ENGINE, max_model_len=64, max_num_seqs=32)
SAMPLING = replace(small.SAMPLING, max_response_tokens=32)
CONFIG = draft_with(
    method=DraftMethod.MTP,
    pretrain={"ttt_steps": 3, "num_steps": 20, "optimizer": {"warmup_steps": 2, "learning_rate": 1e-2}},
)
PROMPTS = prompts((2, 3 + i, 20, 5 + i) for i in range(4))


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A learner that holds the policy `new` and taught its MTP layer, an engine of `old`, and one of what was saved."""

    learner: Any
    engine: Any
    fresh: Any
    plain: Any
    root: Path


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Iterator[Ends]:
    root = tmp_path_factory.mktemp("models")
    old, new = (mimo.write_model(root / name, seed=seed) for seed, name in enumerate(("old", "new")))
    with start_learner(LearnerConfig(num_threads=1)) as learner:
        learner.load(new, None)
        learner.start_draft(new, CONFIG)
        learner.hold_draft_chats(mimo.sequences(16), [2] * 16, CONFIG)
        for _ in range(10):
            learner.draft_step(range(16), 1.0)
        learner.save_draft(root / "draft")
        with (
            start_engine(old, config=ENGINE, speculative_config=speculative_config(CONFIG, old, 3)) as engine,
            start_engine(new, config=ENGINE, speculative_config=speculative_config(CONFIG, root / "draft", 3)) as fresh,
            start_engine(new, config=ENGINE) as plain,
        ):
            yield Ends(learner=learner, engine=engine, fresh=fresh, plain=plain, root=root)


@pytest.mark.parametrize("channel", [Channel.SHARED_MEMORY, Channel.GLOO])
def test_policy_and_layer_are_refitted_to_the_last_bit(ends: Ends, channel: Channel) -> None:
    """An engine that started from one directory with both answers as one that started with what the learner saved."""
    old, engine = ends.root / "old", ends.engine
    engine.refit(WeightFiles(policy=old, policy_version=0, draft=old, draft_version=0))
    dtypes = engine.weight_dtypes(is_draft=True)
    assert engine.start_fingerprints(is_draft=True, turn=ALL)() == [file_fingerprints(old, dtypes)]
    before = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    config = RefitConfig(channel=channel, bucket_mib=0.02)
    with open_channel(config, ends.learner, engine) as opened:
        send(opened, 1, draft_version=1)
        assert [(state.policy_version, state.draft_version) for state in engine.states()] == [(1, 1)]
        # Of the policy alone; and both are what the learner has.
        check = gate_of(engine, ends.learner, opened, ends.root / "draft", config).refit(2)
    assert check.num_tensors == len(dtypes) + len(engine.weight_dtypes(is_draft=False))
    ends.fresh.refit(WeightFiles(policy=ends.root / "new", policy_version=2))
    samples = [each.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1) for each in (engine, ends.fresh)]
    require_equal(*samples)
    assert samples[0].acceptance is not None and samples[0].acceptance.num_accepted_tokens > 0
    assert tokens(samples[0]) != tokens(before)


def test_drafting_with_the_layer_is_lossless(ends: Ends) -> None:
    def drawn(engine: Any, seed: int) -> Sample:
        given = prompts((2, 4 + i % 28, 5 + i // 4, 20) for i in range(64))
        return draw(engine, given, config=CERTIFICATE, sampling=SAMPLING, batch=32, seed=seed)

    record = certified(drawn(ends.fresh, 5), drawn(ends.plain, 10_000), ends.learner, CERTIFICATE, sampling=SAMPLING)
    assert record.verdict == LOSSLESS, record.reason
