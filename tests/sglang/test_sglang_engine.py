"""A real SGLang engine on this machine's CPU: `make test-sglang`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from scipy.stats import chisquare
from transformers import Qwen3ForCausalLM

from slipstream.engine.config import Backend, SamplingConfig
from slipstream.engine.protocol import group_requests
from slipstream.engine.sglang_engine import PYTHON, SglangEngine
from slipstream.refit.config import WeightFiles
from slipstream.refit.fingerprint import ALL, Turn, file_fingerprints
from slipstream.types import FinishReason, Prompt
from tests.small import ENGINE, PROMPTS, SAMPLING, exact_logprobs

pytestmark = pytest.mark.skipif(not os.environ.get(PYTHON), reason="needs SGLang's environment: make test-sglang")

CONFIG = replace(ENGINE, backend=Backend.SGLANG, max_num_seqs=64, kv_cache_gib=0.05)
GREEDY = replace(SAMPLING, temperature=0.0)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory, make_policy: Callable[[Path, int], Path]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("policies")
    return {name: make_policy(root / name, seed) for name, seed in (("old", 0), ("new", 1))}


@pytest.fixture(scope="module")
def engine(policies: dict[str, Path]) -> Iterator[SglangEngine]:
    engine = SglangEngine(policies["old"], config=CONFIG)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def old_policy(engine: SglangEngine, policies: dict[str, Path]) -> None:
    """Each test begins with the same weights, whichever run before it."""
    engine.refit(WeightFiles(policy=policies["old"], policy_version=0))


def sampled(
    engine: SglangEngine, prompts: Sequence[Prompt] = PROMPTS, *, sampling: SamplingConfig, size: int = 2, seed: int = 7
) -> list[Any]:
    """Rollouts of all prompts in a row."""
    requests = group_requests(prompts, group_size=size, seed=seed)
    return [each for _, group in engine.generate(requests, sampling=sampling).groups for each in group.rollouts]


def logits_after(policy: Path, sequence: tuple[int, ...]) -> torch.Tensor:
    """Logits of transformers after each token of `sequence`."""
    with torch.no_grad():
        return loaded(policy)(torch.tensor([sequence])).logits[0].double()


@cache
def loaded(policy: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(policy)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING])
def test_logprobs_are_those_of_transformers_at_the_temperature(
    engine: SglangEngine, policies: dict[str, Path], sampling: SamplingConfig
) -> None:
    differences = []
    for number, rollout in enumerate(sampled(engine, sampling=sampling)):
        prompt = PROMPTS[number // 2].token_ids
        if sampling is GREEDY:
            logits = logits_after(policies["old"], (*prompt, *rollout.token_ids))[len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == list(rollout.token_ids)
        exact = exact_logprobs(loaded(policies["old"]), prompt, rollout.token_ids, sampling.temperature or 1.0)
        differences.append(np.abs(exact - rollout.rollout_logprobs).max())
    assert 0 < max(differences) < 2e-5


def test_first_tokens_are_drawn_from_the_policys_distribution(engine: SglangEngine, policies: dict[str, Path]) -> None:
    """A chi-square test over the tokens that are expected 5 times or more, the others together."""
    one = replace(SAMPLING, max_response_tokens=1)
    num = 2000
    counts = Counter(each.token_ids[0] for each in sampled(engine, PROMPTS[:1], sampling=one, size=num))
    logits = logits_after(policies["old"], PROMPTS[0].token_ids)[-1]
    expected = num * (logits / one.temperature).softmax(-1).numpy()
    is_common = expected >= 5
    found = np.array([counts[token] for token in range(len(expected))])
    rows = [(found[is_common], expected[is_common]), (found[~is_common].sum(), expected[~is_common].sum())]
    seen, wanted = (np.append(rows[0][side], rows[1][side]) for side in (0, 1))
    assert is_common.sum() > 10
    assert chisquare(seen, wanted).pvalue > 1e-3


def test_a_rollout_depends_on_its_seed_and_not_on_its_batch(engine: SglangEngine) -> None:
    together = [each.token_ids for each in sampled(engine, sampling=SAMPLING, size=4)]
    alone = [each.token_ids for prompt in PROMPTS for each in sampled(engine, (prompt,), sampling=SAMPLING, size=4)]
    assert together == alone
    assert together != [each.token_ids for each in sampled(engine, sampling=SAMPLING, size=4, seed=8)]
    assert len(set(together[:4])) > 1


def test_a_response_ends_with_its_stop_token_or_at_its_limit(engine: SglangEngine) -> None:
    rollouts = sampled(engine, sampling=replace(SAMPLING, temperature=1.5), size=32)
    stops = engine._stop_token_ids
    ended = [each for each in rollouts if each.finish_reason is FinishReason.STOP]
    assert 0 < len(ended) < len(rollouts)
    assert all(each.token_ids[-1] in stops and not set(each.token_ids[:-1]) & set(stops) for each in ended)
    assert all(len(each.rollout_logprobs) == len(each.token_ids) for each in rollouts)


def test_a_refit_is_exact_and_the_old_policy_comes_back(engine: SglangEngine, policies: dict[str, Path]) -> None:
    before = engine.state()
    first = [each.rollout_logprobs for each in sampled(engine, sampling=GREEDY)]
    state = engine.refit(WeightFiles(policy=policies["new"] / "model.safetensors", policy_version=3))
    content = (policies["new"] / "model.safetensors").read_bytes()
    assert (state.policy_version, state.policy_digest) == (3, xxhash.xxh3_64(content).hexdigest())
    assert state.num_prefix_cache_resets == before.num_prefix_cache_resets + 1
    dtypes = engine.weight_dtypes(is_draft=False)
    assert len(dtypes) > 30
    new = file_fingerprints(policies["new"], dtypes)
    assert new.keys() == dtypes.keys()
    assert engine.weight_fingerprints(is_draft=False, turn=ALL) == new
    turn = Turn(index=1, count=4)
    chosen = {name: value for name, value in new.items() if turn.takes(name)}
    assert engine.weight_fingerprints(is_draft=False, turn=turn) == chosen
    assert [each.rollout_logprobs for each in sampled(engine, sampling=GREEDY)] != first
    engine.refit(WeightFiles(policy=policies["old"], policy_version=4))
    assert engine.weight_fingerprints(is_draft=False, turn=ALL) == file_fingerprints(policies["old"], dtypes)
    assert [each.rollout_logprobs for each in sampled(engine, sampling=GREEDY)] == first


def test_logprobs_of_given_tokens_are_those_of_transformers(engine: SglangEngine, policies: dict[str, Path]) -> None:
    sequence = (2, 10, 20, 30, 40, 50)
    (found,) = engine.token_logprobs([sequence])
    assert np.allclose(found, exact_logprobs(loaded(policies["old"]), sequence[:1], sequence[1:]), atol=2e-5)


def test_a_refused_refit_is_an_error(engine: SglangEngine, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must hold a safetensors file"):
        engine.refit(WeightFiles(policy=tmp_path, policy_version=1))
