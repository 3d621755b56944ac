"""An engine serves what the learner exports of several families, with a draft, as they are and in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.drafts.eagle3 import build_draft, save_draft
from slipstream.drafts.methods import speculative_config
from slipstream.learner.config import LearnerConfig, Packing
from slipstream.refit.channel import open_channel
from slipstream.refit.config import Channel, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL, file_fingerprints
from slipstream.types import Dtype, Quantization
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import RemoteLearner, start_learner
from tests.small import ENGINE, SAMPLING, draft_with, gate_of, prompts
from tests.unit.learner import families
from tests.unit.learner.policies import random_sequences

pytestmark = pytest.mark.slow

DRAFT = draft_with(eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)}, seed=9)
CONFIG = replace(ENGINE, max_model_len=64)
REFIT = RefitConfig(channel=Channel.SHARED_MEMORY, bucket_mib=0.02)
PROMPTS = prompts((2, 3 + i, 20, 5 + i) for i in range(4))
SEQUENCES = [list(tokens) for tokens in random_sequences()]


@pytest.fixture(scope="module")
def learner(ray_session: None) -> Iterator[RemoteLearner]:
    with start_learner(LearnerConfig(dtype=Dtype.FLOAT32, num_threads=1, packing=Packing.ALWAYS)) as started:
        yield started


def _models(directory: Path, family: str) -> tuple[Path, Path, Path]:
    """Two policies of a family, and a draft of theirs."""
    old, new, draft = (directory / name for name in ("old", "new", "draft"))
    for seed, path in enumerate((old, new)):
        families.write_model(path, family, seed=seed, hidden_size=128)  # vLLM on a CPU knows no head below 32
    save_draft(build_draft(old, DRAFT), draft)
    return old, new, draft


@pytest.mark.parametrize("family", ["llama3", "linear", "yarn", "qwen2.5"])
def test_an_engine_serves_a_family_as_the_learner_computes_it(
    family: str, tmp_path: Path, learner: RemoteLearner
) -> None:
    """Qwen2.5 with tied embeddings, the others with scaled angles."""
    old, new, draft = _models(tmp_path, family)
    learner.load(old, None)
    learner.save_hf(tmp_path / "exported", old)  # whose tokenizer files are none
    drafting = speculative_config(DRAFT, draft, 3)
    with start_engine(tmp_path / "exported", config=CONFIG, speculative_config=drafting) as engine:

        def require_logprobs() -> list[list[float]]:
            found = engine.token_logprobs(SEQUENCES)[0]
            for mine, theirs in zip(learner.token_logprobs(SEQUENCES), found, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)
            return found

        before = require_logprobs()
        learner.load(new, None)
        with open_channel(REFIT, learner, engine) as channel:
            gate_of(engine, learner, channel, draft, REFIT).refit(1)
        dtypes = engine.weight_dtypes(is_draft=False)
        assert engine.start_fingerprints(is_draft=False, turn=ALL)() == [file_fingerprints(new, dtypes)]
        assert any(weight.endswith("k_proj.bias") for weight in dtypes) == (family == "qwen2.5")
        assert require_logprobs() != before
        sample = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
        assert sample.acceptance is not None and sample.acceptance.num_accepted_tokens > 0


@pytest.mark.parametrize(("family", "num_ranks"), [("qwen2.5", 1), ("llama3", 2)])
def test_an_engine_holds_and_computes_what_the_learner_quantizes(
    family: str, num_ranks: int, tmp_path: Path, learner: RemoteLearner
) -> None:
    """The engine loads directories, and takes files and buckets of 8 bits; two ranks round halves of an input apart."""
    old, new, draft = _models(tmp_path, family)
    config = replace(CONFIG, quantization=Quantization.INT8, tensor_parallel_size=num_ranks)
    with start_engine(old, config=config, speculative_config=speculative_config(DRAFT, draft, 3)) as engine:
        from_directory = {}
        for version, path in enumerate((new, old), start=1):
            engine.refit(WeightFiles(policy=path, policy_version=version))
            from_directory[path] = engine.start_fingerprints(is_draft=False, turn=ALL)()
        dtypes = engine.weight_dtypes(is_draft=False)
        for name in ("mlp.down_proj", "self_attn.k_proj"):
            assert dtypes[f"model.layers.1.{name}.weight"] == "int8"
        assert dtypes["model.layers.0.mlp.down_proj.weight_scale"] == dtypes["model.embed_tokens.weight"] == "float32"
        assert set(engine.weight_dtypes(is_draft=True).values()) <= {"float32", "int64"}

        learner.load(new, None, sent_as=config.weight_format)
        gloo = replace(REFIT, channel=Channel.GLOO)
        for version, refit in enumerate((REFIT, gloo), start=3):
            engine.refit(WeightFiles(policy=old, policy_version=0))
            with open_channel(refit, learner, engine) as channel:
                assert gate_of(engine, learner, channel, draft, refit).refit(version).num_tensors > len(dtypes)
            assert engine.start_fingerprints(is_draft=False, turn=ALL)() == from_directory[new]

        found = np.concatenate(engine.token_logprobs(SEQUENCES)[0])
        distances = {}
        for what, how in {"judge": config.weight_format, "float": None}.items():
            learner.load(new, None, computed_as=how)
            distances[what] = np.abs(found - np.concatenate(learner.token_logprobs(SEQUENCES)))
        assert np.median(distances["judge"]) < 1e-5 < 1e-2 < np.median(distances["float"])
        assert distances["judge"].mean() < distances["float"].mean() / 10  # of some tokens a number lay on a border
        sample = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
        assert sample.acceptance is not None and sample.acceptance.num_drafts > 0

        learner.load(new, None)  # which would send its weights as they are, and expects such in the engine
        refused = pytest.raises(RuntimeError, match=r"tensors differ|ranks disagree on .*weight_scale")
        with open_channel(gloo, learner, engine) as channel, refused:
            gate_of(engine, learner, channel, draft, gloo).refit(9)
