"""Every method of speculation on the real engine: it drafts, is refitted exactly, and its rollouts are the policy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from slipstream.drafts.compatibility import require_fit
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import DraftMethod, speculative_config
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.learner.config import LearnerConfig
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.sampling import Sample, Subject, draw
from slipstream.losslessness.verdict import LOSSLESS, certify
from slipstream.refit.channel import open_channel
from slipstream.refit.config import RefitConfig
from slipstream.refit.gate import RefitGate
from slipstream.types import Dtype, Prompt
from slipstream.workers.engines import RemoteEngine, start_engine
from slipstream.workers.learners import RemoteLearner, start_learner

pytestmark = pytest.mark.slow

ENGINE = EngineConfig(
    max_model_len=128, max_num_seqs=32, dtype=Dtype.FLOAT32, enforce_eager=True, num_threads=1, kv_cache_gib=0.1
)
SAMPLING = SamplingConfig(temperature=0.8, max_response_tokens=32)
PROMPTS = tuple(Prompt(id=str(i), text="", token_ids=(2, 10 + i, 20, 30 + i, 20), answer="") for i in range(4))
K = 3
CERTIFICATE = LosslessnessConfig(
    num_tokens=3000,
    num_repeated_prompts=2,
    num_repeats=128,
    num_greedy_prompts=4,
    num_replications=20,
    max_detectable_bias=0.5,  # of so few tokens
)
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
    return {**policies, "draft": _small_model(root / "draft", 2)}


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


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one method did: an engine that was refitted through the gate, and a fresh one of the new policy."""

    method: DraftMethod
    before: GenerationResult
    after: GenerationResult
    fresh: GenerationResult
    num_checked: int  # tensors that the gate compared
    drawn: Sample  # by the refitted engine


@pytest.fixture(scope="module")
def learner(models: dict[str, Path], ray_session: None) -> Iterator[RemoteLearner]:
    with start_learner(LearnerConfig(num_threads=1)) as learner:
        learner.load(models["new"], None)
        yield learner


@pytest.fixture(scope="module")
def baseline(models: dict[str, Path], ray_session: None) -> Sample:
    with start_engine(models["new"], config=ENGINE) as engine:
        return _drawn(engine, seed=10_000)


@pytest.fixture(scope="module", params=METHODS)
def seen(request: pytest.FixtureRequest, models: dict[str, Path], learner: RemoteLearner) -> Seen:
    method: DraftMethod = request.param
    draft = models["draft"] if method is DraftMethod.DRAFT_MODEL else None
    require_fit(CONFIGS[method], models["old"], draft, max_model_len=ENGINE.max_model_len)
    told, refit = speculative_config(CONFIGS[method], draft, K), RefitConfig()
    with (
        start_engine(models["old"], config=ENGINE, speculative_config=told) as engine,
        open_channel(refit, learner, engine) as channel,
    ):
        before = _answers(engine)
        gate = RefitGate(engine, learner, channel=channel, trains_draft=False, draft=draft, config=refit)
        num_checked = gate.refit(7).num_tensors
        after, drawn = _answers(engine), _drawn(engine, seed=0)
    with start_engine(models["new"], config=ENGINE, speculative_config=told) as engine:
        fresh = _answers(engine)
    return Seen(method=method, before=before, after=after, fresh=fresh, num_checked=num_checked, drawn=drawn)


def _answers(engine: RemoteEngine) -> GenerationResult:
    return engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)


def _drawn(engine: RemoteEngine, *, seed: int) -> Sample:
    prompts = [
        Prompt(id=str(i), text="", token_ids=(2, 4 + i % 50, *PROMPTS[i % 4].token_ids), answer="") for i in range(64)
    ]
    return draw(engine, prompts, config=CERTIFICATE, sampling=SAMPLING, batch=32, seed=seed)


def _tokens(result: GenerationResult) -> list[tuple[int, ...]]:
    return [rollout.token_ids for group in result.groups for rollout in group.rollouts]


def _logprobs(result: GenerationResult) -> np.ndarray:
    return np.concatenate([rollout.rollout_logprobs for group in result.groups for rollout in group.rollouts])


def test_it_drafts_and_some_of_it_is_accepted(seen: Seen) -> None:
    for result in (seen.before, seen.after, seen.fresh):
        assert result.acceptance is not None
        assert 0 < result.acceptance.num_accepted_tokens < result.acceptance.num_draft_tokens


def test_a_refitted_engine_answers_as_a_fresh_one(seen: Seen) -> None:
    assert _tokens(seen.before) != _tokens(seen.after)
    if seen.method is DraftMethod.SUFFIX:
        pytest.skip("it remembers what the engine answered before, so it proposes other tokens than a fresh one")
    assert _tokens(seen.after) == _tokens(seen.fresh)
    assert np.array_equal(_logprobs(seen.after), _logprobs(seen.fresh))
    assert seen.after.acceptance == seen.fresh.acceptance


def test_the_gate_checks_the_policy_and_a_draft_that_has_weights(seen: Seen) -> None:
    # Four layers of eleven tensors, embedding, final norm and head; the draft's two layers and the same three.
    has_model = seen.method is DraftMethod.DRAFT_MODEL
    assert seen.num_checked == 47 + (25 if has_model else 0)
    rollout = seen.after.groups[0].rollouts[0]
    assert (rollout.policy_version, rollout.draft_version) == (7, 0 if has_model else None)


def test_what_it_samples_is_certified_after_a_refit(seen: Seen, baseline: Sample, learner: RemoteLearner) -> None:
    record = certify(
        seen.drawn,
        baseline,
        learner,
        config=CERTIFICATE,
        sampling=SAMPLING,
        subject=Subject(num_speculative_tokens=K, policy_fingerprint="", draft_fingerprint="", versions={}),
        started_s=0.0,
    )
    assert record.verdict == LOSSLESS, record.reason
