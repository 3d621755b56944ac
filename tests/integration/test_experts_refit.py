"""A learner whose experts lie on two ranks, and an engine that fuses and packs them: what arrives is exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from slipstream.drafts.methods import speculative_config
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.refit.channel import open_channel
from slipstream.refit.config import Channel, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL, differences, file_fingerprints
from slipstream.refit.gate import RefitGate
from slipstream.types import Dtype
from tests.integration import qwen3_moe
from tests.small import ENGINE, PROMPTS, SAMPLING, draft_with, require_equal

pytestmark = pytest.mark.slow

LEARNER = LearnerConfig(dtype=Dtype.FLOAT32, parallel=ParallelConfig(data=2, expert=2), num_threads=1)
DRAFT = draft_with(eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)}, seed=9)


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A learner that holds the policy `new`, an engine that started with `old`, and one that started with `new`.

    Both engines speculate with one draft.
    """

    learner: Any
    engine: Any
    fresh: Any
    models: dict[str, Path]


@pytest.fixture(
    scope="module", params=[(Dtype.FLOAT32, 32), (Dtype.BFLOAT16, 48)], ids=["float32", "bfloat16, padded experts"]
)
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Iterator[Ends]:
    from slipstream.drafts.eagle3 import build_draft, save_draft
    from slipstream.workers.engines import start_engine
    from slipstream.workers.learners import start_learner

    dtype, width = request.param
    root = tmp_path_factory.mktemp("models")
    models = {name: root / name for name in ("old", "new")}
    for seed, path in enumerate(models.values()):
        qwen3_moe.write_model(path, seed=seed, expert_width=width)
    models["draft"] = root / "draft"
    save_draft(build_draft(models["old"], DRAFT), models["draft"])
    draft = speculative_config(DRAFT, models["draft"], 3)
    config = replace(ENGINE, dtype=dtype)
    with (
        start_learner(LEARNER) as learner,
        start_engine(models["old"], config=config, speculative_config=draft) as engine,
        start_engine(models["new"], config=config, speculative_config=draft) as fresh,
    ):
        learner.load(models["new"], None)
        yield Ends(learner=learner, engine=engine, fresh=fresh, models=models)


@pytest.mark.parametrize("channel", [Channel.SHARED_MEMORY, Channel.GLOO])
def test_a_refitted_engine_equals_one_that_was_loaded_with_the_same_experts(ends: Ends, channel: Channel) -> None:
    batch = qwen3_moe.sequences()
    ends.engine.refit(WeightFiles(policy=ends.models["old"], policy_version=0))
    dtypes = ends.engine.weight_dtypes(is_draft=False)
    with safe_open(ends.models["old"] / "model.safetensors", framework="pt") as file:
        assert dtypes.keys() == set(file.keys())  # every expert's three matrices, by their own names
    old, new = (file_fingerprints(ends.models[name], dtypes) for name in ("old", "new"))
    assert ends.engine.start_fingerprints(is_draft=False, turn=ALL)() == [old]
    assert ends.fresh.start_fingerprints(is_draft=False, turn=ALL)() == [new]
    before = ends.engine.token_logprobs(batch)

    config = RefitConfig(channel=channel, bucket_mib=0.02)
    with open_channel(config, ends.learner, ends.engine) as opened:
        gate = RefitGate(
            ends.engine, ends.learner, channel=opened, trains_draft=False, draft=ends.models["draft"], config=config
        )
        check = gate.refit(1)
    assert check.num_tensors == len(dtypes) + len(ends.engine.weight_dtypes(is_draft=True))
    assert ends.engine.start_fingerprints(is_draft=False, turn=ALL)() == [new]
    assert differences(old, new)
    after = ends.engine.token_logprobs(batch)
    assert after == ends.fresh.token_logprobs(batch)
    assert after != before
    require_equal(*(e.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1) for e in (ends.engine, ends.fresh)))
