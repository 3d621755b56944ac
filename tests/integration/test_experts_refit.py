"""A learner whose experts lie on two ranks, and an engine that fuses and packs them: what arrives is exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from slipstream.drafts.eagle3 import build_draft, save_draft
from slipstream.drafts.methods import speculative_config
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.refit.channel import open_channel
from slipstream.refit.config import Channel, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL, differences, file_fingerprints
from slipstream.types import Dtype
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import RemoteLearner, start_learner
from tests.integration import qwen3_moe
from tests.small import ENGINE, PROMPTS, SAMPLING, draft_with, gate_of, require_equal

pytestmark = pytest.mark.slow

LEARNER = LearnerConfig(dtype=Dtype.FLOAT32, parallel=ParallelConfig(data=2, expert=2), num_threads=1)
DRAFT = draft_with(eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)}, seed=9)


@dataclass(frozen=True, kw_only=True)
class Engines:
    """An engine that started with the policy `old`, and one that started with `new`; both speculate with one draft."""

    engine: Any
    fresh: Any
    models: dict[str, Path]


@pytest.fixture(scope="module")
def learner(ray_session: None) -> Iterator[RemoteLearner]:
    with start_learner(LEARNER) as started:
        yield started


@pytest.fixture(
    scope="module", params=[(Dtype.FLOAT32, 32), (Dtype.BFLOAT16, 48)], ids=["float32", "bfloat16, padded experts"]
)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, learner: RemoteLearner
) -> Iterator[Engines]:
    dtype, width = request.param
    root = tmp_path_factory.mktemp("models")
    models = {name: root / name for name in ("old", "new", "draft")}
    for seed, name in enumerate(("old", "new")):
        qwen3_moe.write_model(models[name], seed=seed, expert_width=width)
    save_draft(build_draft(models["old"], DRAFT), models["draft"])
    learner.load(models["new"], None)
    config, drafting = replace(ENGINE, dtype=dtype), speculative_config(DRAFT, models["draft"], 3)
    start = partial(start_engine, config=config, speculative_config=drafting)
    with start(models["old"]) as engine, start(models["new"]) as fresh:
        yield Engines(engine=engine, fresh=fresh, models=models)


@pytest.mark.parametrize("channel", [Channel.SHARED_MEMORY, Channel.GLOO])
def test_a_refitted_engine_equals_one_that_was_loaded_with_the_same_experts(
    engines: Engines, learner: RemoteLearner, channel: Channel
) -> None:
    batch, engine, fresh, models = qwen3_moe.sequences(), engines.engine, engines.fresh, engines.models
    engine.refit(WeightFiles(policy=models["old"], policy_version=0))
    dtypes = engine.weight_dtypes(is_draft=False)
    with safe_open(models["old"] / "model.safetensors", framework="pt") as file:
        assert dtypes.keys() == set(file.keys())  # every expert's three matrices, by their own names
    old, new = (file_fingerprints(models[name], dtypes) for name in ("old", "new"))
    assert differences(old, new)
    assert engine.start_fingerprints(is_draft=False, turn=ALL)() == [old]
    assert fresh.start_fingerprints(is_draft=False, turn=ALL)() == [new]
    before = engine.token_logprobs(batch)

    config = RefitConfig(channel=channel, bucket_mib=0.02)
    with open_channel(config, learner, engine) as opened:
        check = gate_of(engine, learner, opened, models["draft"], config).refit(1)
    assert check.num_tensors == len(dtypes) + len(engine.weight_dtypes(is_draft=True))
    assert engine.start_fingerprints(is_draft=False, turn=ALL)() == [new]
    assert before != engine.token_logprobs(batch) == fresh.token_logprobs(batch)
    require_equal(*(each.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1) for each in (engine, fresh)))
