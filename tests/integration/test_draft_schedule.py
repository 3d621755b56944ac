"""Drafts in the real engine whose length follows the running batch: of EAGLE-3, and of DFlash with a cut vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from slipstream.drafts.dflash import build_dflash
from slipstream.drafts.eagle3 import save_draft
from slipstream.drafts.length import constant
from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import ScheduleEntry
from slipstream.refit.config import WeightFiles
from slipstream.refit.fingerprint import ALL, Turn, file_fingerprints
from slipstream.workers.engines import start_engine
from tests import small
from tests.faults.faulty_engine import started
from tests.small import DRAFT, PROMPTS, draft_with, prompts, require_logprobs_of, tokens

pytestmark = pytest.mark.slow

K = 4
DFLASH = draft_with(method="dflash", pretrain={"ttt_steps": K})
ENGINE = replace(small.ENGINE, max_model_len=256)
SAMPLING = replace(small.SAMPLING, temperature=1.0)
GREEDY = replace(SAMPLING, temperature=0.0)


def drafted(result: GenerationResult) -> tuple[int, ...]:
    assert result.acceptance is not None
    return result.acceptance.drafted_by_position


def table(last_long: int) -> tuple[ScheduleEntry, ...]:
    """Drafts of K tokens up to that batch, and of one token in larger ones."""
    return (
        ScheduleEntry(batch_from=1, batch_to=last_long, num_speculative_tokens=K),
        ScheduleEntry(batch_from=last_long + 1, batch_to=16, num_speculative_tokens=1),
    )


def start(models: dict[str, Path]) -> AbstractContextManager[Any]:
    """The engine that drafts by the table; it is kept idle, for the next one who starts such an engine."""
    config = replace(ENGINE, num_kept_idle=1)
    draft = speculative_config(DRAFT, models["old_draft"], K, schedule=table(2))
    return start_engine(models["old"], config=config, speculative_config=draft)


def test_the_length_follows_the_running_batch_and_another_can_be_set_for_a_while(
    models: dict[str, Path], ray_session: None
) -> None:
    with start(models) as engine:
        (process,) = [each.pid for each in engine.workers]
        many = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
        few = engine.generate(PROMPTS[:1], sampling=SAMPLING, group_size=2, seed=1)
        greedy = engine.generate(PROMPTS, sampling=GREEDY, group_size=1, seed=1)
        alone = engine.generate(PROMPTS[:2], sampling=SAMPLING, group_size=1, seed=3)
        engine.draft_by(constant(0))
        none = engine.generate(PROMPTS, sampling=GREEDY, group_size=1, seed=1)
        sampled = engine.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=1)
        engine.draft_by(table(2))
        again = engine.generate(PROMPTS[:2], sampling=SAMPLING, group_size=1, seed=3)
        engine.draft_by(constant(0))
    with start(models) as engine:
        assert [each.pid for each in engine.workers] == [process]
        handed_on = engine.generate(PROMPTS[:2], sampling=SAMPLING, group_size=1, seed=3)

    first, second, *_ = drafted(many)
    assert first > 10 * second  # only what is drafted once two are left is longer than 1
    assert drafted(few)[3] > 0
    assert few.acceptance is not None and few.acceptance.num_draft_tokens == sum(drafted(few))
    assert [time.num_running for time in many.running][-1] == 16
    assert sum(time.num_tokens for time in many.running) == sum(map(len, tokens(many))) - 16  # but the prompts' step
    # Without drafts: no draft was verified, and nothing else is drawn.
    assert none.acceptance is not None and none.acceptance.num_drafts == 0
    assert tokens(none) == tokens(greedy)
    require_logprobs_of(models["old"], sampled, temperature=SAMPLING.temperature)
    # The draft's own cache has no hole: what comes after is as if nothing had been switched.
    assert tokens(handed_on) == tokens(again) == tokens(alone)
    assert handed_on.acceptance == again.acceptance == alone.acceptance


def test_prompts_that_were_cached_without_drafts_are_drafted_for_as_any_other(
    models: dict[str, Path], ray_session: None
) -> None:
    """Prompts of more than a block of the prefix cache: at length 0 the draft's cache is filled all the same."""
    long = prompts((2, *((7 * i + 3 * j) % 60 + 4 for j in range(200))) for i in range(2))
    with start(models) as engine:
        engine.draft_by(constant(0))
        engine.generate(long, sampling=SAMPLING, group_size=2, seed=1)
        engine.draft_by(constant(K))
        cached = engine.generate(long, sampling=SAMPLING, group_size=2, seed=2)
        engine.refit(WeightFiles(policy=models["old"], policy_version=0))  # forgets what is cached
        fresh = engine.generate(long, sampling=SAMPLING, group_size=2, seed=2)
        engine.close()
    assert cached.acceptance is not None and cached.acceptance.num_accepted_tokens > 0
    assert tokens(cached) == tokens(fresh)
    assert cached.acceptance == fresh.acceptance


@dataclass(frozen=True)
class Bench:
    """An engine whose draft knows half of the policy's tokens, and the actor that it runs in."""

    engine: Any  # RemoteEngine
    actor: Any
    policy: Path
    draft: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, policy: Path, ray_session: None) -> Iterator[Bench]:
    draft = tmp_path_factory.mktemp("dflash") / "draft"
    save_draft(build_dflash(policy, DFLASH, token_ids=range(0, 64, 2)), draft)
    engine, actor = started(policy, ENGINE, speculative_config(DFLASH, draft, K, schedule=table(4)))
    yield Bench(engine, actor, policy, draft)
    engine.close()


def test_blocks_have_the_length_of_the_table_and_any_length_leaves_greedy_tokens(bench: Bench) -> None:
    engine = bench.engine
    many = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    few = engine.generate(PROMPTS, sampling=GREEDY, group_size=1, seed=1)
    engine.draft_by(constant(0))
    none = engine.generate(PROMPTS, sampling=GREEDY, group_size=1, seed=1)
    engine.draft_by(table(4))
    first, second, *_ = drafted(many)
    assert first > 2 * second
    whole = drafted(few)
    assert len(whole) == K and whole[0] == whole[-1]
    assert few.acceptance.mean_acceptance_length > 1.0
    assert none.acceptance is None or none.acceptance.num_draft_tokens == 0
    assert tokens(few) == tokens(none)


def test_fingerprints_are_those_of_the_file_and_a_stale_copy_is_an_error(bench: Bench) -> None:
    engine = bench.engine
    dtypes = engine.weight_dtypes(is_draft=True)
    (held,) = engine.start_fingerprints(is_draft=True, turn=ALL)()
    assert held == file_fingerprints(bench.draft, dtypes)
    assert {"d2t", "hidden_norm.weight", "layers.1.self_attn.v_proj.weight"} <= held.keys()
    assert "mask_embedding" not in held
    for copy, row, name, layer in (
        ("_fused_kv_weight", -1, "layers.1.self_attn.v_proj.weight", 1),
        ("_fused_kv_weight", 0, "layers.0.self_attn.k_proj.weight", 0),
        ("_k_norm_weights", 1, "layers.1.self_attn.k_norm.weight", 1),
    ):
        ray.get(bench.actor.flip_copy.remote(copy, row))
        with pytest.raises(RuntimeError, match=f"{name} must be one tensor in all layers that share it, got two"):
            engine.start_fingerprints(is_draft=True, turn=ALL)()
        other = Turn(index=1 - layer, count=2)
        assert engine.start_fingerprints(is_draft=True, turn=other)()[0].keys() < held.keys()
        ray.get(bench.actor.flip_copy.remote(copy, row))
    assert engine.start_fingerprints(is_draft=True, turn=ALL)() == [held]


def test_a_refit_brings_a_draft_with_its_copies(bench: Bench, tmp_path: Path) -> None:
    """As the engine of a certificate gets both: one that was kept may have had another draft, of other tokens."""

    def sample(sampling: SamplingConfig) -> list[tuple[int, ...]]:
        return tokens(bench.engine.generate(PROMPTS, sampling=sampling, group_size=2, seed=1))

    sampled, greedy = sample(SAMPLING), sample(GREEDY)
    other = draft_with(method="dflash", pretrain={"ttt_steps": K}, seed=7)
    save_draft(build_dflash(bench.policy, other, token_ids=range(1, 64, 2)), tmp_path / "draft")
    for draft in (tmp_path / "draft", bench.draft):
        bench.engine.refit(WeightFiles(policy=bench.policy, policy_version=1, draft=draft))
        dtypes = bench.engine.weight_dtypes(is_draft=True)
        assert bench.engine.start_fingerprints(is_draft=True, turn=ALL)() == [file_fingerprints(draft, dtypes)]
        assert (sample(SAMPLING) == sampled) == (draft == bench.draft)  # drafts are probabilistic
        assert sample(GREEDY) == greedy
