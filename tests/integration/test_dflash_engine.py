"""A DFlash draft in the real engine: shorter drafts by the batch, a cut vocabulary, and copies that the gate reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.dflash import build_dflash
from slipstream.drafts.eagle3 import save_draft
from slipstream.drafts.length import constant
from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import SamplingConfig
from slipstream.records.steps import ScheduleEntry
from slipstream.refit.config import WeightFiles
from slipstream.refit.fingerprint import ALL, Turn, file_fingerprints
from tests import small
from tests.small import PROMPTS, SAMPLING, draft_with, tokens

pytestmark = pytest.mark.slow

K = 4
CONFIG = draft_with(method="dflash", pretrain={"ttt_steps": K})
ENGINE = replace(small.ENGINE, max_model_len=256)
GREEDY = replace(SAMPLING, temperature=0.0)
TABLE = (
    ScheduleEntry(batch_from=1, batch_to=4, num_speculative_tokens=K),
    ScheduleEntry(batch_from=5, batch_to=16, num_speculative_tokens=1),
)


@dataclass(frozen=True)
class Bench:
    """An engine whose draft knows half of the policy's tokens, and the actor that it runs in."""

    engine: Any  # RemoteEngine
    actor: Any
    policy: Path
    draft: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, policy: Path, ray_session: None) -> Iterator[Bench]:
    from tests.faults.faulty_engine import started

    draft = tmp_path_factory.mktemp("dflash") / "draft"
    save_draft(build_dflash(policy, CONFIG, token_ids=range(0, 64, 2)), draft)
    engine, actor = started(policy, ENGINE, speculative_config(CONFIG, draft, K, schedule=TABLE))
    yield Bench(engine, actor, policy, draft)
    engine.close()


def test_drafts_have_the_length_of_the_table_and_any_length_leaves_greedy_tokens(bench: Bench) -> None:
    engine = bench.engine
    many = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    few = engine.generate(PROMPTS, sampling=GREEDY, group_size=1, seed=1)
    engine.draft_by(constant(0))
    none = engine.generate(PROMPTS, sampling=GREEDY, group_size=1, seed=1)
    engine.draft_by(TABLE)
    first, second, *_ = many.acceptance.drafted_by_position
    assert first > 2 * second
    whole = few.acceptance.drafted_by_position
    assert len(whole) == K and whole[0] == whole[-1]
    assert few.acceptance.mean_acceptance_length > 1.0
    assert none.acceptance is None or none.acceptance.num_draft_tokens == 0
    assert tokens(few) == tokens(none)


def test_fingerprints_are_those_of_the_file_and_a_stale_copy_is_an_error(bench: Bench) -> None:
    import ray

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
