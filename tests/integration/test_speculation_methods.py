"""Every method of speculation on the real engine: it drafts, is refitted exactly, and its rollouts are the policy's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipstream.drafts.compatibility import require_fit
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.dflash import build_dflash
from slipstream.drafts.eagle3 import save_draft
from slipstream.drafts.methods import DraftMethod, DraftSampling, Verification, speculative_config
from slipstream.engine.protocol import GenerationResult
from slipstream.learner.config import LearnerConfig
from slipstream.losslessness.sampling import Sample, draw
from slipstream.losslessness.verdict import LOSSLESS
from slipstream.refit.channel import open_channel
from slipstream.refit.config import RefitConfig
from slipstream.workers.engines import RemoteEngine, start_engine
from slipstream.workers.learners import RemoteLearner, start_learner
from tests import small
from tests.conftest import _make_policy
from tests.small import CERTIFICATE, certified, draft_with, gate_of, prompts, require_equal, tokens

pytestmark = pytest.mark.slow

ENGINE = replace(small.ENGINE, max_num_seqs=32)
SAMPLING = replace(small.SAMPLING, max_response_tokens=32)
PROMPTS = prompts((2, 10 + i, 20, 30 + i, 20) for i in range(4))
K = 3
CONFIGS = [
    draft_with(method=DraftMethod.NGRAM, ngram={"prompt_lookup_min": 1}),
    draft_with(method=DraftMethod.HISTORY, history={"match_min": 1}),
    DraftConfig(method=DraftMethod.DRAFT_MODEL),
    DraftConfig(method=DraftMethod.DRAFT_MODEL, sampling=DraftSampling.GREEDY),
    DraftConfig(method=DraftMethod.DRAFT_MODEL, verification=Verification.BLOCK),
    draft_with(method=DraftMethod.DFLASH, pretrain={"ttt_steps": K}),
    draft_with(method=DraftMethod.DFLASH, pretrain={"ttt_steps": K}, verification=Verification.BLOCK),
    pytest.param(
        draft_with(method=DraftMethod.SUFFIX, suffix={"min_token_prob": 0.0}),
        marks=pytest.mark.skipif(find_spec("arctic_inference") is None, reason="arctic-inference is not installed"),
    ),
]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of another width, depth and head size than the policy."""
    path = tmp_path_factory.mktemp("draft")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    return _make_policy(path, 2, **shape)


@pytest.fixture(scope="module")
def parallel_draft(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """A random draft of blocks, whose output head is near the policy's."""
    path = tmp_path_factory.mktemp("parallel") / "draft"
    save_draft(build_dflash(models["old"], draft_with(method=DraftMethod.DFLASH, pretrain={"ttt_steps": K})), path)
    return path


REMEMBER = (DraftMethod.SUFFIX, DraftMethod.HISTORY)  # proposals depend on what the engine answered before


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Answers of one method: of an engine before and after a refit through the gate, and of a fresh one.

    No fresh one is started for `REMEMBER`, and for other draws or verification with weights of another of `CONFIGS`.
    """

    method: DraftMethod
    alone: GenerationResult  # to the first prompt, by the engine before the refit
    before: GenerationResult
    after: GenerationResult
    fresh: GenerationResult | None
    greedy: tuple[GenerationResult, ...]  # of the refitted engine: see `_with_histories`
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


@pytest.fixture(
    scope="module", params=CONFIGS, ids=lambda config: "-".join((config.method, config.sampling, config.verification))
)
def seen(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    small_model: Path,
    parallel_draft: Path,
    learner: RemoteLearner,
) -> Seen:
    config: DraftConfig = request.param
    method = config.method
    draft = {DraftMethod.DRAFT_MODEL: small_model, DraftMethod.DFLASH: parallel_draft}.get(method)
    require_fit(config, models["old"], draft, max_model_len=ENGINE.max_model_len)
    told = speculative_config(config, draft, K)
    with (
        start_engine(models["old"], config=ENGINE, speculative_config=told) as engine,
        open_channel(RefitConfig(), learner, engine) as channel,
    ):
        before = _answers(engine)
        alone = engine.generate(PROMPTS[:1], sampling=SAMPLING, group_size=2, seed=1)
        num_checked = gate_of(engine, learner, channel, draft).refit(7).num_tensors
        after, drawn = _answers(engine), _drawn(engine, seed=0)
        greedy = _with_histories(engine) if method is DraftMethod.HISTORY else ()
    fresh, is_variant = None, config.sampling is DraftSampling.GREEDY or config.verification is Verification.BLOCK
    if not is_variant and method not in REMEMBER:
        with start_engine(models["new"], config=ENGINE, speculative_config=told) as engine:
            fresh = _answers(engine)
    answers = {"alone": alone, "before": before, "after": after, "fresh": fresh, "greedy": greedy}
    return Seen(method=method, num_checked=num_checked, drawn=drawn, **answers)


def _answers(engine: RemoteEngine) -> GenerationResult:
    return engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)


def _with_histories(engine: RemoteEngine) -> tuple[GenerationResult, ...]:
    """Answers without a history, with one of the first answers, without one again, and with the first one again."""
    engine.forget()
    first = _greedy_answers(engine)
    histories = engine.histories()
    second = _greedy_answers(engine)
    engine.forget()
    forgotten = _greedy_answers(engine)
    engine.forget()
    engine.recall(histories)
    return first, second, forgotten, _greedy_answers(engine)


def _greedy_answers(engine: RemoteEngine) -> GenerationResult:
    return engine.generate(PROMPTS, sampling=replace(SAMPLING, temperature=0.0), group_size=1, seed=1)


def _drawn(engine: RemoteEngine, *, seed: int) -> Sample:
    given = prompts((2, 4 + i % 50, *PROMPTS[i % 4].token_ids) for i in range(64))
    return draw(engine, given, config=CERTIFICATE, sampling=SAMPLING, batch=32, seed=seed)


def test_it_drafts_and_some_of_it_is_accepted(seen: Seen) -> None:
    for result in filter(None, (seen.before, seen.after, seen.fresh)):
        assert result.acceptance is not None
        assert 0 < result.acceptance.num_accepted_tokens < result.acceptance.num_draft_tokens


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(seen: Seen) -> None:
    if seen.method in REMEMBER:
        pytest.skip("it remembers what the engine answered before")
    assert tokens(seen.alone) == tokens(seen.before)[:2]


def test_a_refitted_engine_answers_as_a_fresh_one(seen: Seen) -> None:
    assert tokens(seen.before) != tokens(seen.after)
    if seen.fresh is not None:
        require_equal(seen.after, seen.fresh)


def test_a_history_shortens_the_second_answer_to_a_prompt_until_it_is_forgotten_and_can_be_kept(seen: Seen) -> None:
    if seen.method is not DraftMethod.HISTORY:
        pytest.skip("it has no history that could be kept")
    first, second, forgotten, recalled = (result.acceptance for result in seen.greedy)
    assert first is not None and second is not None
    assert len({str(tokens(result)) for result in seen.greedy}) == 1
    assert second.mean_acceptance_length > first.mean_acceptance_length
    assert second.num_accepted_tokens > first.num_accepted_tokens
    assert forgotten == first and recalled == second


def test_the_gate_checks_the_policy_and_a_draft_that_has_weights(seen: Seen) -> None:
    # Four layers of eleven tensors, embedding, final norm and head; the draft's two layers and the same three. In place
    # of an embedding a draft of blocks has a fusion of states and their norm.
    num_of_draft = {DraftMethod.DRAFT_MODEL: 25, DraftMethod.DFLASH: 26}.get(seen.method, 0)
    assert seen.num_checked == 47 + num_of_draft
    rollout = seen.after.groups[0].rollouts[0]
    assert (rollout.policy_version, rollout.draft_version) == (7, 0 if num_of_draft else None)


def test_what_it_samples_is_certified_after_a_refit(seen: Seen, baseline: Sample, learner: RemoteLearner) -> None:
    record = certified(seen.drawn, baseline, learner, CERTIFICATE, sampling=SAMPLING)
    assert record.verdict == LOSSLESS, record.reason
