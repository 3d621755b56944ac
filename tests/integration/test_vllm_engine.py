"""The real engine: reproducible, refitted exactly, its sampler fixed, and drafts that do not fit refused."""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import EngineConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.refit.config import WeightFiles
from slipstream.refit.fingerprint import ALL, held_whole, part_fingerprints
from slipstream.workers.engines import start_engine
from tests.small import DRAFT, ENGINE, PROMPTS, SAMPLING, prompts, require_equal, require_logprobs_of, tokens

pytestmark = pytest.mark.slow

REPEATED = prompts((2, 10 + i, *range(20, 20 + i)) for i in range(8))
LONG = prompts((2, *((7 * i + 3 * j) % 60 + 4 for j in range(90))) for i in range(4))


def start(models: dict[str, Path], name: str, k: int, config: EngineConfig = ENGINE) -> AbstractContextManager[Any]:
    draft = speculative_config(DRAFT, models[f"{name}_draft"], k) if k else None
    return start_engine(models[name], config=config, speculative_config=draft)


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], ray_session: None) -> Iterator[Any]:
    """An engine with three draft tokens that holds the old policy and draft; tests refit it in their order."""
    with start(models, "old", 3) as started:
        yield started


def generated(engine: Any, *, seed: int = 1) -> GenerationResult:
    return engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=seed)


def shared_tokens(process: Any) -> int:
    """Prompt tokens that an engine has taken from its cache, by vLLM's counter."""
    return sum(each.value for each in process._llm.get_metrics() if each.name == "vllm:prefix_cache_hits")


def test_a_group_shares_all_whole_blocks_of_its_prompt_with_a_draft_too(engine: Any) -> None:
    """Two blocks of 32 tokens; vLLM's own settings share none of them on a CPU."""
    prompt = prompts([(2, *(4 + 7 * i % 60 for i in range(69)))])
    (before,) = engine._crew.ask("a count", lambda actor: actor.__ray_call__.remote(shared_tokens))
    engine.generate(prompt, sampling=SAMPLING, group_size=4, seed=0)
    (after,) = engine._crew.ask("a count", lambda actor: actor.__ray_call__.remote(shared_tokens))
    assert after - before == 3 * 64


def test_rollout_logprobs_are_the_policys_at_the_sampling_temperature(engine: Any, models: dict[str, Path]) -> None:
    result = generated(engine)
    assert result.acceptance is not None and result.acceptance.num_drafts > 0
    require_logprobs_of(models["old"], result, temperature=SAMPLING.temperature)


def test_an_engine_says_what_vllm_chose_and_counts_what_a_full_cache_preempts(
    engine: Any, models: dict[str, Path]
) -> None:
    facts = engine.facts()
    num_tokens = facts.pop("KV cache tokens")
    assert facts == {"attention": "CPU_ATTN", "model runner": "V1", "CUDA graphs": "NONE"}
    assert generated(engine).num_preemptions == 0
    # A token has 1 KiB in four layers of one head of 32: the cache holds about 600 tokens.
    with start(models, "old", 0, replace(ENGINE, max_model_len=256, kv_cache_gib=0.0006)) as small:
        assert int(small.facts()["KV cache tokens"]) < int(num_tokens)
        long = replace(SAMPLING, max_response_tokens=200)
        result = small.generate(PROMPTS, sampling=long, group_size=16, seed=1)
    assert result.num_preemptions > 0
    assert len(tokens(result)) == 64


def test_one_engine_and_three_draw_the_same_rollouts(engine: Any, models: dict[str, Path]) -> None:
    """Whatever the order, the batch and the engine: two slots an engine make the three of them pull from the queue.

    Of such an engine vLLM takes at most 2 x 128 tokens a step, less than three of the long prompts. A seeded request
    whose prompt is computed in chunks would end it on a CPU.
    """
    one = engine.generate(REPEATED, sampling=SAMPLING, group_size=2, seed=1)
    with start(models, "old", 3, replace(ENGINE, num_engines=3, max_num_seqs=2)) as engines:
        three = engines.generate(REPEATED[::-1], sampling=SAMPLING, group_size=2, seed=1)
        assert len(set(tokens(engines.generate(LONG, sampling=SAMPLING, group_size=4, seed=1)))) == 16
    assert [group.prompt for group in three.groups] == list(REPEATED[::-1])
    assert tokens(one) == tokens(replace(three, groups=three.groups[::-1]))
    assert len(set(tokens(one))) == 16  # no two rollouts of a group share their draws
    assert one.engine_idle_fraction == 0.0
    assert 0.0 < three.engine_idle_fraction < 1.0
    assert one.acceptance == three.acceptance is not None


def test_an_engine_gives_its_cache_back_as_far_as_a_cpu_lets_it_is_refitted_and_goes_on(
    engine: Any, models: dict[str, Path]
) -> None:
    """vLLM's CPU worker refuses the last call alone: all before it, the completed pause above all, is vLLM's own."""
    before = generated(engine)
    resets = engine.states()[0].num_prefix_cache_resets
    with pytest.raises(RuntimeError, match="Selective discard is not supported on CPU"):
        engine.sleep()
    engine.sleep()  # it sleeps already
    (state,) = engine.refit(WeightFiles(policy=models["old"] / "model.safetensors", policy_version=1))
    assert (state.policy_version, state.num_prefix_cache_resets) == (1, resets + 1)
    assert engine.start_fingerprints(is_draft=False, turn=ALL)()[0]
    require_equal(generated(engine), before)


def test_refit_of_policy_and_draft_equals_a_fresh_engine(engine: Any, models: dict[str, Path]) -> None:
    before, again, other = generated(engine), generated(engine), generated(engine, seed=2)
    assert tokens(before) == tokens(again)
    assert tokens(before) != tokens(other)
    files = {name: path / "model.safetensors" for name, path in models.items()}
    engine.refit(WeightFiles(policy=files["new"], policy_version=7, draft=files["new_draft"], draft_version=3))
    refitted = generated(engine)
    with start(models, "new", 3) as started:
        fresh = generated(started)
    assert tokens(refitted) != tokens(before)
    require_equal(refitted, fresh)
    first = refitted.groups[0].rollouts[0]
    assert (first.policy_version, first.draft_version) == (7, 3)


@pytest.mark.parametrize("module", ["vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"])
def test_weights_are_read_under_either_of_vllms_model_runners(module: str) -> None:
    from slipstream.engine.vllm_plugin import EngineProbe

    runner_of_vllm = importlib.import_module(module).GPUModelRunner

    def runner(draft: torch.nn.Module | None) -> Any:
        """As much of a runner as both kinds have: one holds the draft as `drafter`, the other as `speculator`."""
        return SimpleNamespace(get_model=lambda: policy, get_draft_model=lambda: draft)

    assert all(callable(getattr(runner_of_vllm, name)) for name in ("get_model", "get_draft_model"))
    policy = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4, bias=False)})
    draft = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(3, bias=False)})})
    probe = EngineProbe()
    probe.model_runner = runner(draft)
    probe.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle3"))
    assert probe.weight_dtypes(False) == {"norm.weight": "float32"}
    assert probe.weight_fingerprints(True, ALL) == part_fingerprints([held_whole("norm.weight", torch.ones(3))])
    probe.vllm_config.speculative_config.method = "draft_model"
    assert probe.weight_dtypes(True) == {"model.norm.weight": "float32"}
    probe.model_runner = runner(None)
    with pytest.raises(LookupError, match="the engine drafts without a model"):
        probe.weight_dtypes(True)
