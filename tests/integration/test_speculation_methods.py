"""Every method of speculation on the real engine: it drafts, is refitted exactly, and its rollouts are the policy's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.fit import require_fit
from slipstream.drafts.methods import DraftMethod, speculative_config
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.sampling import Sample, Subject, draw
from slipstream.losslessness.verdict import LOSSLESS, certify
from slipstream.policy.config import LearnerConfig
from slipstream.refit.channel.driver import open_channel
from slipstream.refit.config import RefitConfig
from slipstream.refit.fingerprint import ALL, file_fingerprints
from slipstream.refit.gate import RefitGate
from slipstream.rollout.config import EngineConfig, SamplingConfig
from slipstream.rollout.engine import GenerationResult
from slipstream.types import Dtype, Prompt
from slipstream.workers.engines import RemoteEngine, start_engine

pytestmark = pytest.mark.slow

ENGINE = EngineConfig(
    max_model_len=128, max_num_seqs=32, dtype=Dtype.FLOAT32, enforce_eager=True, num_threads=1, kv_cache_gib=0.1
)
SAMPLING = SamplingConfig(temperature=0.8, max_response_tokens=32)
PROMPTS = tuple(Prompt(id=str(i), text="", token_ids=(2, 10 + i, 20, 30 + i, 20), answer="") for i in range(4))
K = 3
CONFIGS = {
    DraftMethod.NGRAM: DraftConfig(method=DraftMethod.NGRAM, prompt_lookup_min=1),
    DraftMethod.SUFFIX: DraftConfig(method=DraftMethod.SUFFIX, suffix_min_token_prob=0.0),
    DraftMethod.DRAFT_MODEL: DraftConfig(method=DraftMethod.DRAFT_MODEL),
}
METHODS = [
    DraftMethod.NGRAM,
    DraftMethod.DRAFT_MODEL,
    pytest.param(
        DraftMethod.SUFFIX,
        marks=pytest.mark.skipif(find_spec("arctic_inference") is None, reason="arctic-inference is not installed"),
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, make_policy: Callable[[Path, int], Path]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    policies = {name: make_policy(root / name, seed) for name, seed in (("old", 0), ("new", 1))}
    drafts = {f"{name}_draft": _small_model(root / f"{name}_draft", seed) for name, seed in (("old", 2), ("new", 3))}
    return policies | drafts


def _small_model(path: Path, seed: int) -> Path:
    """Of another width, depth and head size than the policy."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=3,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def _draft(method: DraftMethod, models: dict[str, Path], name: str = "old") -> Path | None:
    return models[f"{name}_draft"] if method is DraftMethod.DRAFT_MODEL else None


def _tokens(result: GenerationResult) -> list[tuple[int, ...]]:
    return [rollout.token_ids for group in result.groups for rollout in group.rollouts]


def _logprobs(result: GenerationResult) -> np.ndarray:
    return np.concatenate([rollout.rollout_logprobs for group in result.groups for rollout in group.rollouts])


@pytest.mark.parametrize("method", METHODS)
def test_a_refitted_engine_answers_as_a_fresh_one(
    models: dict[str, Path], ray_session: None, method: DraftMethod
) -> None:
    generate = partial(RemoteEngine.generate, prompts=PROMPTS, sampling=SAMPLING, group_size=4, seed=1)

    def start(name: str):
        draft = _draft(method, models, name)
        require_fit(CONFIGS[method], models[name], draft, max_model_len=ENGINE.max_model_len)
        return start_engine(
            models[name], config=ENGINE, speculative_config=speculative_config(CONFIGS[method], draft, K)
        )

    with start("old") as engine:
        before = generate(engine)
        draft = _draft(method, models, "new")
        version = {} if draft is None else {"draft": draft / "model.safetensors", "draft_version": 3}
        engine.refit(models["new"] / "model.safetensors", policy_version=7, **version)
        after = generate(engine)
    with start("new") as engine:
        fresh = generate(engine)
    assert before.acceptance is not None and before.acceptance.num_drafts > 0
    assert after.acceptance is not None and after.acceptance.num_accepted_tokens > 0
    assert _tokens(before) != _tokens(after)
    rollout = after.groups[0].rollouts[0]
    assert (rollout.policy_version, rollout.draft_version) == (7, None if draft is None else 3)
    if method is DraftMethod.SUFFIX:  # it remembers what the engine answered before, so it proposes other tokens
        return
    assert _tokens(after) == _tokens(fresh)
    assert np.array_equal(_logprobs(after), _logprobs(fresh))
    assert after.acceptance == fresh.acceptance


def test_the_gate_checks_the_policy_alone_where_drafts_are_looked_up_and_both_where_a_model_drafts(
    models: dict[str, Path], ray_session: None
) -> None:
    from slipstream.workers.learners import start_learner

    counts = {}
    with start_learner(LearnerConfig(num_threads=1)) as learner:
        learner.load(models["new"], None)
        for method in (DraftMethod.NGRAM, DraftMethod.DRAFT_MODEL):
            draft = _draft(method, models)
            told = speculative_config(CONFIGS[method], draft, K)
            config = RefitConfig()
            with (
                start_engine(models["old"], config=ENGINE, speculative_config=told) as engine,
                open_channel(config, learner, engine) as channel,
            ):
                gate = RefitGate(engine, learner, channel=channel, draft=draft, config=config)
                counts[method] = gate.refit(1).num_tensors
                if draft is not None:
                    dtypes = engine.weight_dtypes(is_draft=True)
                    (held,) = engine.weight_fingerprints(is_draft=True, turn=ALL)
                    assert held == file_fingerprints(draft, dtypes)
    # Four layers of eleven tensors, embedding, final norm and head; the draft's two layers and the same three.
    assert counts == {DraftMethod.NGRAM: 47, DraftMethod.DRAFT_MODEL: 47 + 25}


@pytest.mark.parametrize("method", METHODS)
def test_what_it_samples_is_certified_after_a_refit(
    models: dict[str, Path], ray_session: None, method: DraftMethod
) -> None:
    """The tests of a run's certificate, at the size at which they see a bias of half a token in ten."""
    from slipstream.workers.learners import start_learner

    config = LosslessnessConfig(
        num_tokens=4000,
        num_repeated_prompts=2,
        num_repeats=128,
        num_greedy_prompts=4,
        num_replications=20,
        max_detectable_bias=0.5,
    )
    prompts = [
        Prompt(id=str(i), text="", token_ids=(2, 4 + i % 50, *PROMPTS[i % 4].token_ids), answer="") for i in range(64)
    ]

    def drawn(k: int, start: str, seed: int) -> Sample:
        told = speculative_config(CONFIGS[method], _draft(method, models), k) if k else None
        with start_engine(models[start], config=ENGINE, speculative_config=told) as engine:
            engine.refit(models["new"], policy_version=1)
            return draw(engine, prompts, config=config, sampling=SAMPLING, batch=32, seed=seed)

    speculative, baseline = drawn(K, "old", 0), drawn(0, "new", 10_000)
    with start_learner(LearnerConfig(num_threads=1)) as learner:
        learner.load(models["new"], None)
        record = certify(
            speculative,
            baseline,
            learner,
            config=config,
            sampling=SAMPLING,
            subject=Subject(num_speculative_tokens=K, policy_fingerprint="", draft_fingerprint="", versions={}),
            started_s=0.0,
        )
    assert record.verdict == LOSSLESS, record.reason
