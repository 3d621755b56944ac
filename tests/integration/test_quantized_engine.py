"""An engine with weights and inputs in 8 bits: what it holds after each way of a refit, and what its judge computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.drafts.config import DraftConfig, Eagle3Config
from slipstream.drafts.methods import speculative_config
from slipstream.learner.config import LearnerConfig, Packing
from slipstream.refit.channel import open_channel
from slipstream.refit.config import Channel, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL
from slipstream.refit.gate import RefitGate
from slipstream.types import Dtype, Prompt, Quantization
from tests.small import ENGINE, SAMPLING
from tests.unit.learner import families
from tests.unit.learner.policies import random_sequences

pytestmark = pytest.mark.slow

DRAFT = DraftConfig(eagle3=Eagle3Config(aux_hidden_state_layer_ids=(0, 1, 2)), seed=9)
PROMPTS = tuple(Prompt(id=str(i), text="", token_ids=(2, 3 + i, 20, 5 + i), answer="") for i in range(4))


@pytest.mark.parametrize(("family", "num_ranks"), [("qwen2.5", 1), ("llama3", 2)])
def test_an_engine_holds_and_computes_what_the_learner_quantizes(
    family: str, num_ranks: int, tmp_path: Path, ray_session: None
) -> None:
    """The engine loads directories, and takes files and buckets of 8 bits; two ranks round halves of an input apart."""
    from slipstream.drafts.eagle3 import build_draft, save_draft
    from slipstream.workers.engines import start_engine
    from slipstream.workers.learners import start_learner

    old, new, draft = (tmp_path / which for which in ("old", "new", "draft"))
    for seed, path in enumerate((old, new)):
        families.write_model(path, family, seed=seed, hidden_size=128)
    save_draft(build_draft(old, DRAFT), draft)
    config = replace(ENGINE, max_model_len=64, quantization=Quantization.INT8, tensor_parallel_size=num_ranks)
    form, sequences = config.weight_format, [list(tokens) for tokens in random_sequences()]
    refit = RefitConfig(channel=Channel.GLOO, bucket_mib=0.02)
    learner_config = LearnerConfig(dtype=Dtype.FLOAT32, num_threads=1, packing=Packing.ALWAYS)
    with (
        start_learner(learner_config) as learner,
        start_engine(old, config=config, speculative_config=speculative_config(DRAFT, draft, 3)) as engine,
    ):
        from_directory = {}
        for version, path in enumerate((new, old), start=1):
            engine.refit(WeightFiles(policy=path, policy_version=version))
            (from_directory[path],) = engine.start_fingerprints(is_draft=False, turn=ALL)()
        dtypes = engine.weight_dtypes(is_draft=False)
        for name in ("mlp.down_proj", "self_attn.k_proj"):
            assert dtypes[f"model.layers.1.{name}.weight"] == "int8"
        assert dtypes["model.layers.0.mlp.down_proj.weight_scale"] == dtypes["model.embed_tokens.weight"] == "float32"
        assert set(engine.weight_dtypes(is_draft=True).values()) <= {"float32", "int64"}

        learner.load(new, None, sent_as=form)
        for version, channel in enumerate((Channel.SHARED_MEMORY, Channel.GLOO), start=3):
            engine.refit(WeightFiles(policy=old, policy_version=0))
            with open_channel(replace(refit, channel=channel), learner, engine) as opened:
                gate = RefitGate(engine, learner, channel=opened, trains_draft=False, draft=draft, config=refit)
                assert gate.refit(version).num_tensors > len(dtypes)
            assert engine.start_fingerprints(is_draft=False, turn=ALL)() == [from_directory[new]]

        found = np.concatenate(engine.token_logprobs(sequences)[0])
        distances = {}
        for what, how in {"judge": form, "float": None}.items():
            learner.load(new, None, computed_as=how)
            distances[what] = np.abs(found - np.concatenate(learner.token_logprobs(sequences)))
        assert np.median(distances["judge"]) < 1e-5 < 1e-2 < np.median(distances["float"])
        assert distances["judge"].mean() < distances["float"].mean() / 10  # of some tokens a number lay on a border
        sample = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
        assert sample.acceptance is not None and sample.acceptance.num_drafts > 0

        learner.load(new, None)  # which would send its weights as they are, and expects such in the engine
        with (
            open_channel(refit, learner, engine) as opened,
            pytest.raises(RuntimeError, match=r"tensors differ|ranks disagree on .*weight_scale"),
        ):
            RefitGate(engine, learner, channel=opened, trains_draft=False, draft=draft, config=refit).refit(9)
