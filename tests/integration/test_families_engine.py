"""An engine serves what the learner exports of a Qwen2.5, with tied embeddings, and of scaled angles, with a draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.drafts.config import DraftConfig, Eagle3Config
from slipstream.drafts.methods import speculative_config
from slipstream.learner.config import LearnerConfig
from slipstream.refit.channel import open_channel
from slipstream.refit.config import Channel, RefitConfig
from slipstream.refit.fingerprint import ALL, file_fingerprints
from slipstream.refit.gate import RefitGate
from slipstream.types import Dtype, Prompt
from tests.small import ENGINE, SAMPLING
from tests.unit.learner import families
from tests.unit.learner.policies import random_sequences

pytestmark = pytest.mark.slow

DRAFT = DraftConfig(eagle3=Eagle3Config(aux_hidden_state_layer_ids=(0, 1, 2)), seed=9)
PROMPTS = tuple(Prompt(id=str(i), text="", token_ids=(2, 3 + i, 20, 5 + i), answer="") for i in range(4))


@pytest.mark.parametrize("name", ["llama3", "linear", "yarn", "qwen2.5"])
def test_an_engine_serves_a_family_as_the_learner_computes_it(name: str, tmp_path: Path, ray_session: None) -> None:
    from slipstream.drafts.eagle3 import build_draft, save_draft
    from slipstream.workers.engines import start_engine
    from slipstream.workers.learners import start_learner

    old, new, exported, draft = (tmp_path / name for name in ("old", "new", "exported", "draft"))
    for seed, path in enumerate((old, new)):
        families.write_model(path, name, seed=seed, hidden_size=128)  # vLLM on a CPU knows no head below 32
    save_draft(build_draft(old, DRAFT), draft)
    config, refit = replace(ENGINE, max_model_len=64), RefitConfig(channel=Channel.SHARED_MEMORY, bucket_mib=0.02)
    sequences = [list(tokens) for tokens in random_sequences()]
    with start_learner(LearnerConfig(dtype=Dtype.FLOAT32, num_threads=1)) as learner:
        learner.load(old, None)
        learner.save_hf(exported, old)  # whose tokenizer files are none
        with start_engine(exported, config=config, speculative_config=speculative_config(DRAFT, draft, 3)) as engine:
            before = engine.token_logprobs(sequences)[0]
            for mine, theirs in zip(learner.token_logprobs(sequences), before, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)
            learner.load(new, None)
            with open_channel(refit, learner, engine) as channel:
                RefitGate(engine, learner, channel=channel, trains_draft=False, draft=draft, config=refit).refit(1)
            dtypes = engine.weight_dtypes(is_draft=False)
            assert engine.start_fingerprints(is_draft=False, turn=ALL)() == [file_fingerprints(new, dtypes)]
            assert any(weight.endswith("k_proj.bias") for weight in dtypes) == (name == "qwen2.5")
            after = engine.token_logprobs(sequences)[0]
            for mine, theirs in zip(learner.token_logprobs(sequences), after, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)
            assert after != before
            sample = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
            assert sample.acceptance is not None and sample.acceptance.num_accepted_tokens > 0
