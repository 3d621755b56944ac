"""What each method of speculation holds in an engine, worked by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from slipstream.drafts.config import DraftConfig, DraftScratchConfig
from slipstream.drafts.methods import DraftMethod
from slipstream.engine.config import EngineConfig
from slipstream.workers.placement.memory import NOTHING_PROPOSED, Proposer, engine_memory
from slipstream.workers.placement.proposer import proposer
from tests.unit.workers.placement.test_memory import Tiny

SCRATCH = DraftScratchConfig(
    hidden_size=2, num_layers=3, num_attention_heads=1, num_query_groups=1, head_dim=4, ffn_hidden_size=5
)
# A layer: 2 x (2*4 + 2*4 + 3*5) = 62, norms 2*2 + 2*4 = 12; two tables of 8*2; the final norm 2.
PARAMETERS = 3 * 74 + 2 * 16 + 2


def test_eagle3_is_one_layer_of_the_policys_heads() -> None:
    found = proposer(Tiny(), DraftConfig(aux_hidden_state_layer_ids=(0, 1, 2)))
    # 3 * 16 + 2*4*(4+4) + 4*4 + 3*4*6 + 4*8 = 48 + 64 + 16 + 72 + 32
    assert (found.parameters, found.num_layers, found.num_query_groups, found.head_dim) == (232, 1, 1, 2)


def test_a_draft_model_is_counted_whole_whether_trained_or_given(tmp_path: Path) -> None:
    values = {
        "vocab_size": 8,
        "hidden_size": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    trained = DraftConfig(method=DraftMethod.DRAFT_MODEL, scratch=SCRATCH)
    given = DraftConfig(method=DraftMethod.DRAFT_MODEL, model=str(tmp_path))
    for config in (trained, given):
        found = proposer(Tiny(), config)
        assert (found.parameters, found.num_layers, found.num_query_groups, found.head_dim) == (PARAMETERS, 3, 1, 4)
    engine = EngineConfig(max_model_len=100, max_num_seqs=2, kv_cache_gib=1.0)
    memory = engine_memory(Tiny(), engine, gpu_bytes=4e6, longest_k=1, proposer=proposer(Tiny(), trained))
    # Keys and values in bfloat16: two layers of 2, and the draft's three of 4.
    assert (memory.draft, memory.kv_bytes_per_token) == (2 * PARAMETERS, 2 * 2 * (2 * 2 + 3 * 4))


def test_what_a_draft_models_config_leaves_out_is_what_transformers_takes_for_it(tmp_path: Path) -> None:
    values = {
        "vocab_size": 8,
        "hidden_size": 5,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 5,
    }

    def found(**more: object) -> Proposer:
        (tmp_path / "config.json").write_text(json.dumps(values | more))
        return proposer(Tiny(), DraftConfig(method=DraftMethod.DRAFT_MODEL, model=str(tmp_path)))

    least = found()
    assert (least.num_query_groups, least.head_dim) == (2, 2)
    assert found(num_key_value_heads=2, head_dim=None, tie_word_embeddings=False) == least
    assert found(num_key_value_heads=1).num_query_groups == 1
    assert found(tie_word_embeddings=True).parameters == least.parameters - 8 * 5


def test_what_is_looked_up_holds_nothing() -> None:
    for method in (DraftMethod.NGRAM, DraftMethod.SUFFIX):
        assert proposer(Tiny(), DraftConfig(method=method)) == NOTHING_PROPOSED


def test_a_draft_model_of_the_hub_cannot_be_planned(refusal: Callable[..., str]) -> None:
    config = DraftConfig(method=DraftMethod.DRAFT_MODEL, model="org/small")
    assert refusal(proposer, shape=Tiny(), config=config) == (
        "draft.model must be at hand for the memory to be planned, got 'org/small'; "
        "give its directory, or leave out the section `simulator`: only the layout is checked then"
    )
