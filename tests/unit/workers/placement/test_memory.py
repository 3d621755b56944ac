"""Layouts that do not divide are refused; bytes of a GPU by part, worked by hand; what the estimate warns of."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.catalog import load_model
from slipstream.config import ConfigError, merge
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import DraftMethod
from slipstream.engine.config import EngineConfig
from slipstream.grpo.config import OptimizerMethod
from slipstream.learner.architecture import QWEN3_MOE, Architecture, Experts
from slipstream.learner.config import LearnerConfig, LoraConfig, ParallelConfig, Recompute, ScratchConfig, ShapeConfig
from slipstream.recipe import load_recipe
from slipstream.refit.config import Channel
from slipstream.types import Dtype, Quantization
from slipstream.workers.placement import memory
from slipstream.workers.placement.memory import MemoryEstimate
from tests.small import draft_with
from tests.unit.learner.test_weights import ARCH
from tests.unit.refusals import overrides, refused, rows

SPLIT = {
    "placement": {"mode": "split", "nodes": 8, "generation_nodes": 6, "training_nodes": 2},
    "learner": {"parallel": {"data": 2}},
    "engine": {"num_engines": 24},
}
IN_TURN = {"placement": {"memory": "in_turn"}}
PLAIN = {  # a learner that splits neither activations nor its optimizer, and a draft that knows all tokens
    "learner": {
        "parallel": {"tensor": 4, "data": 8, "sequence_parallel": False},
        "distributed_optimizer": False,
        "logprob_chunk_tokens": None,
    },
    "draft": {"eagle3": {"vocab_size": None}},
}
EAGLE3 = draft_with(eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)})


def _refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe("qwen3_8b", overrides=merge(PLAIN, changes))
    return str(caught.value)


def _estimate(**changes: Any) -> MemoryEstimate:
    found = load_recipe("qwen3_8b", overrides=merge(PLAIN, changes)).memory()
    assert found is not None
    return found


def _tiny(**changes: Any) -> Architecture:
    """h 4, A 4, K 2, f 6, V 8, two layers."""
    sizes = {"hidden_size": 4, "num_layers": 2, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 6}
    return replace(ARCH, **sizes, **changes)


# A layer: matrices 4 x (2*4 + 2*2 + 3*6) = 120, norms 2*4 + 2*2 = 12; tables 8*4 = 32 each; final norm 4.
LAYER, TABLE, NORM = 132, 32, 4


def _learner(**parallel: int | bool) -> LearnerConfig:
    return LearnerConfig(
        max_tokens_per_microbatch=10,
        dtype=Dtype.BFLOAT16,
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
    )


def _learned(learner: LearnerConfig, arch: Any = None, **how: Any) -> dict[str, float]:
    """Bytes of a learner of the tiny policy, by part."""
    return memory.learner_memory(arch or _tiny(), learner, **{"has_reference": False, **how})


def _served(engine: EngineConfig, longest_k: int = 0) -> tuple[Any, float]:
    """Bytes of an engine of the tiny policy on a GPU of 4 MB, by part, and those of a token in its cache."""
    return memory.engine_memory(_tiny(), engine, gpu_bytes=4e6, longest_k=longest_k, draft=EAGLE3)


def _engine(**values: float | int | None) -> EngineConfig:
    return EngineConfig(max_model_len=100, max_num_seqs=2, **values)  # type: ignore[arg-type]


NAMED = {"SPLIT": tuple(f"{name}={json.dumps(values)}" for name, values in SPLIT.items())}


@rows(
    """
learner.parallel={tensor: 16, data: 2}
    learner.parallel.tensor must divide the policy's 8 key-value heads, got 16
learner.parallel={pipeline: 8, data: 1}
    learner.parallel.pipeline must divide the policy's 36 layers, got 8
learner.parallel={tensor: 4, context: 4, data: 2}
    learner.parallel.context must divide the 2 key-value heads that learner.parallel.tensor 4 leaves each rank, got 4;
    attention splits whole heads over these ranks: lower it, or tensor
learner.parallel={tensor: 1, data: 32, expert: 4}
    learner.parallel.expert must be 1 for a policy without experts, got 4
placement.nodes=3 + learner.parallel.data=3 + engine={num_engines: 1, tensor_parallel_size: 12}
    engine.tensor_parallel_size must divide the policy's 32 query heads, got 12
refit.channel=nccl
    refit.channel must join two processes on one GPU, got 'nccl'; set auto, or ipc
SPLIT + refit.channel=ipc
    refit.channel must join processes on different GPUs, got 'ipc'; set auto, or nccl
placement.nodes=2 + learner.parallel.data=2 + engine.num_engines=8 + refit.channel=shared_memory
    refit.channel must cross 2 nodes, got 'shared_memory'; set auto, or ipc
learner.parallel={tensor: 1, data: 32} + simulator.hardware=h100
    learner.parallel.tensor must split the learner further: weights, gradients and optimizer take 147.4 GB beside the
    engine's weights of 16.4 GB, a H100 SXM has 80.0 GB, got 1; raise it or pipeline, or set
    learner.distributed_optimizer
"""
)
def test_a_layout_that_cannot_be_is_refused_with_the_recipe(given: str, expected: str) -> None:
    """Of the last one: 8.19e9 parameters at 18 bytes, beside 16.4 GB of the engine's own weights."""
    assert _refusal(overrides(given, NAMED)) == expected


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    adamw = "policy.scratch.optimizer.method=adamw + grpo.optimizer.method=adamw + learner.parallel.tensor=3"
    shape = "policy.scratch.shape={num_attention_heads: 3, num_query_groups: 3, ffn_hidden_size: 384}"
    assert refused(f"{adamw} + {shape}") == "learner.parallel.tensor must divide the policy's 64 vocabulary, got 3"


def test_the_fastest_channel_that_the_placement_allows_is_taken_unless_another_one_is_named() -> None:
    one_node = {"placement": {"nodes": 1}, "learner": {"parallel": {"data": 1}}, "engine": {"num_engines": 4}}
    load_recipe("qwen3_8b", overrides=merge(PLAIN, {**one_node, "refit": {"channel": "shared_memory"}}))
    chosen = {"auto": load_recipe("qwen3_8b"), "split": load_recipe("qwen3_8b", overrides=merge(PLAIN, SPLIT))}
    assert [recipe.refit_channel for recipe in chosen.values()] == [Channel.IPC, Channel.NCCL]
    assert load_recipe("qwen3_8b", overrides={"refit": {"channel": "gloo"}}).refit_channel is Channel.GLOO


def test_an_engine_divides_the_policy_and_may_copy_key_value_heads_evenly(tmp_path: Path) -> None:
    def of_eight(num_query_groups: int, ffn_hidden_size: int) -> dict[str, Any]:
        heads = {"num_query_groups": num_query_groups, "num_attention_heads": 24 if num_query_groups == 6 else 32}
        scratch = ScratchConfig(shape=ShapeConfig(num_layers=2, ffn_hidden_size=ffn_hidden_size, **heads))
        dense = Architecture.from_scratch(scratch, vocab_size=64, eos_token_id=1)
        (tmp_path / "config.json").write_text(json.dumps(dense.to_hf(Dtype.BFLOAT16)))
        engine = {"tensor_parallel_size": 8, "num_engines": 4}
        learner = {"parallel": {"tensor": 1, "data": 32}}
        return {"policy": {"model": str(tmp_path)}, "learner": learner, "engine": engine, "simulator": None}

    field = "engine.tensor_parallel_size must"
    assert _refusal(of_eight(8, 100)) == f"{field} divide the policy's 100 ffn hidden size, got 8"
    message = f"{field} divide the policy's 6 key-value heads, or be a multiple of them, got 8"
    assert _refusal(of_eight(6, 96)) == message
    load_recipe("qwen3_8b", overrides=merge(PLAIN, of_eight(2, 96)))  # four workers have each of the two heads


@pytest.mark.parametrize(
    ("arch", "parallel", "stage", "expected"),
    [
        (_tiny(), {}, 0, 2 * LAYER + 2 * TABLE + NORM),
        (_tiny(), {"pipeline": 2}, 0, LAYER + TABLE),
        (_tiny(), {"pipeline": 2}, 1, LAYER + TABLE + NORM),
        (_tiny(), {"tensor": 2}, 0, 2 * (60 + 12) + TABLE + NORM),
        (_tiny(tie_word_embeddings=True), {}, 0, 2 * LAYER + TABLE + NORM),
        (_tiny(tie_word_embeddings=True), {"pipeline": 2}, 1, LAYER + TABLE + NORM),  # a copy
    ],
)
def test_parameters_of_a_stage(arch: Architecture, parallel: dict[str, int], stage: int, expected: float) -> None:
    assert memory.stage_parameters(arch, _learner(**parallel), stage) == expected
    assert memory.num_parameters(arch) == arch.num_parameters()


def test_activations_and_logits_of_a_token() -> None:
    # b (4h + 4f + 4A + 3K) = 2 (16 + 24 + 16 + 6), (b + 12) V = 14 * 8
    assert memory.activation_bytes(_tiny(), _learner()) == 124
    assert memory.activation_bytes(_tiny(), _learner(tensor=2)) == 2 * (16 + 46 / 2)
    assert memory.activation_bytes(_tiny(), _learner(tensor=2, sequence_parallel=True)) == 62
    assert memory.logit_bytes(_tiny(), _learner()) == 112
    assert memory.logit_bytes(_tiny(), _learner(tensor=2)) == 56


def _sharded(**parallel: int) -> LearnerConfig:
    return replace(_learner(**parallel), distributed_optimizer=True)


SIZE, MUON = 2 * LAYER + 2 * TABLE + NORM, {"method": OptimizerMethod.MUON}
LORA = {"lora": LoraConfig(rank=1), "has_reference": True}
NO_OTHERS = {"base weights": None, "orthogonalization": None}
FLOAT32 = LearnerConfig(max_tokens_per_microbatch=10, dtype=Dtype.FLOAT32)


@pytest.mark.parametrize(
    ("learner", "how", "parts"),
    [
        # Masters and two moments in bfloat16; in float32 it is its own master.
        (_learner(), {}, {"weights": 2 * SIZE, "gradients": 4 * SIZE, "optimizer": 12 * SIZE, "reference": None}),
        (_learner(), {}, {"activations": 10 * 2 * 124, "logits": 10 * 112, **NO_OTHERS}),
        (_learner(), {"has_reference": True}, {"weights": 2 * SIZE, "reference": 2 * SIZE}),
        (FLOAT32, {}, {"weights": 4 * SIZE, "gradients": 4 * SIZE, "optimizer": 8 * SIZE, "logits": 10 * (4 + 12) * 8}),
        # Context-parallel ranks hold a part of the tokens and of a split optimizer, and all weights.
        (_learner(context=2), {}, {"activations": 5 * 2 * 124, "logits": 5 * 112, "optimizer": 12 * SIZE}),
        (_learner(context=2), {}, {"weights": 2 * SIZE, "gradients": 4 * SIZE}),
        (_sharded(context=2, data=2), {}, {"activations": 5 * 2 * 124, "logits": 5 * 112, "optimizer": 3 * SIZE}),
        # The fuller stage counts. First: two micro-batches in flight, 2 * 10 * 124; last: one, 1240, and logits 1120.
        (_learner(pipeline=2), {}, {"activations": 2480, "logits": 0}),
        (_learner(pipeline=2), {"arch": _tiny(vocab_size=80)}, {"logits": 11_200}),
        # Recomputing. Full: b h = 8, and the layer in hand 124 in all; selective: b (4h + 3A + 3K) = 2 (16 + 12 + 6).
        (replace(_learner(), recompute=Recompute.FULL), {}, {"activations": 10 * (2 * 8 + 124 - 8)}),
        (replace(_learner(), recompute=Recompute.SELECTIVE), {}, {"activations": 10 * (2 * 68 + 124 - 68)}),
        (replace(_learner(), recompute=Recompute.NONE), {}, {"activations": 10 * 2 * 124}),
        # Chunks of three tokens, and a split optimizer.
        (replace(_sharded(data=4), logprob_chunk_tokens=3), {}, {"logits": 3 * 112, "optimizer": 3 * SIZE}),
        (replace(_learner(), logprob_chunk_tokens=30), {}, {"logits": 10 * 112}),
        # Muon keeps one moment of a matrix, of which there are 240 elements, and works where the activations were:
        # twice gate and up at once, 2 x 48 elements of 4 + 5 x 2 bytes each.
        (_learner(), MUON, {"optimizer": 4 * (2 * SIZE - 240) + 4 * SIZE, "orthogonalization": None}),
        (replace(_learner(), max_tokens_per_microbatch=1), MUON, {"orthogonalization": 1344 - (2 * 124 + 112)}),
        # Two tensor-parallel ranks hold 180 elements each, 120 in matrices; four data-parallel ranks share them.
        (_sharded(tensor=2, data=4), MUON, {"optimizer": (4 * (2 * 180 - 120) + 4 * 180) / 4}),
        # Adapters alone have gradients and moments, and keep the matrices below them. A layer: seven matrices of 4 + 4,
        # 2 + 4, 2 + 4, 4 + 4, 6 + 4, 6 + 4, 6 + 4 rows and columns, 120 elements.
        (_learner(), LORA, {"weights": 2 * (SIZE + 2 * 58), "base weights": 2 * 2 * 120, "reference": None}),
        (_learner(), LORA, {"gradients": 4 * 2 * 58, "optimizer": 12 * 2 * 58, "activations": 10 * 2 * 124}),
        (_learner(), LORA, {"logits": 10 * 112}),
        (_learner(tensor=2), LORA, {"base weights": 2 * 2 * 60, "gradients": 4 * 2 * (30 / 2 + 7 * 4)}),
    ],
)
def test_bytes_of_a_learner_by_part(learner: LearnerConfig, how: Any, parts: dict[str, float | None]) -> None:
    found = _learned(learner, **how)
    assert {part: found.get(part) for part in parts} == parts


def test_muon_works_on_as_many_elements_as_a_batch_or_on_gate_and_up_of_a_layer_at_once() -> None:
    assert memory.muon_bytes(_tiny(), _sharded(tensor=2, data=4)) == 96 * (4 / 2 + 10)
    # Gate and up of a layer of Qwen3-8B have more elements than a batch: 24,576 x 4,096 at once.
    assert memory.muon_bytes(load_model("qwen3-8b"), _learner()) == 24_576 * 4_096 * 14


def test_an_engines_cache_takes_what_is_left_of_its_share() -> None:
    parts, per_token = _served(_engine(gpu_memory_utilization=0.5), 3)
    # Draft: 3 * 16 + 2*4*(4+4) + 4*4 + 3*4*6 + 4*8 = 48 + 64 + 16 + 72 + 32
    assert (parts["engine weights"], parts["draft"]) == (664, 464)
    assert parts["engine activations"] == 16_384 * 2 * (8 + 18)  # the sampler's 2 * 4 * 8 * 12 is less
    assert sum(parts.values()) == 2e6
    assert per_token == 2 * 3 * 2 * 2  # keys and values, two layers and the draft's, K, bytes


def test_an_engine_without_a_draft_takes_a_named_cache_as_it_is_and_splits_over_ranks() -> None:
    parts, per_token = _served(_engine(kv_cache_gib=1.0))
    assert (parts["draft"], parts["KV cache"], per_token) == (0, 2**30, 16)
    two = _engine(tensor_parallel_size=2)
    parts, per_token = _served(two)
    assert (parts["engine weights"], per_token) == (332, 16)  # one key-value head is copied
    eight, _ = _served(replace(two, quantization=Quantization.FP8))
    # Two layers of 4 * (2*4 + 2*2) + 3*4*6 = 120 elements, a byte less each, over two ranks.
    assert parts["engine weights"] - eight["engine weights"] == 120
    parts, per_token = _served(two, 1)
    assert (parts["draft"], parts["engine activations"], per_token) == (232, 16_384 * 2 * 17, 24)


def test_a_draft_that_learns_beside_the_policy_holds_copies_of_its_tables_and_what_an_update_needs() -> None:
    online = {"when": "always", "ttt_steps": 2}
    draft = draft_with(EAGLE3, online=online, eagle3={"tokens_per_row": 10, "loss_chunk_tokens": 3})
    # 232 trained; embedding and output layer of 8*4. A token has its states 4*4, and a pass 6*4 + 2*4 + 2*2 + 4*6.
    found = memory.online_draft_memory(_tiny(), draft, freed=1000)
    assert found["online draft"] == 4 * (232 + 64)
    assert found["draft training"] == 4 * 3 * 232
    assert found["draft activations"] == 4 * (10 * (16 + 2 * 60) + 3 * 7 * 8) - 1000
    assert "draft activations" not in memory.online_draft_memory(_tiny(), draft, freed=1e6)
    cut = memory.online_draft_memory(_tiny(), draft_with(draft, eagle3={"vocab_size": 5}), freed=0)
    # 220 trained, with an output layer of 5*4; the policy's whole output layer, and its rows of the draft.
    assert cut["online draft"] == 4 * (220 + 64 + 20)


def test_the_plan_counts_an_online_draft_and_the_staging_of_a_refit_on_shared_gpus() -> None:
    plain, online = _estimate(), _estimate(draft={"online": {"when": "always"}})
    assert {"online draft", "draft training"} == online.learner.keys() - plain.learner.keys()
    assert online.refit_bytes - plain.refit_bytes == online.engine["draft"]  # it is sent with the policy
    table = 151_936 * 4096 * 2
    assert (plain.learner["refit"], plain.engine["engine refit"]) == (3 * table, 2 * table)
    turns = _estimate(**IN_TURN, draft={"online": {"when": "always"}}).kinds
    assert "online draft" in turns["generating"]
    assert "draft training" not in turns["generating"]
    assert "refit" not in _estimate(**SPLIT).learner


def test_a_draft_model_is_counted_whole_trained_or_given_as_transformers_reads_its_config(tmp_path: Path) -> None:
    values = {"vocab_size": 8, "num_hidden_layers": 3, "intermediate_size": 5}

    def given(**more: object) -> tuple[float, float]:
        (tmp_path / "config.json").write_text(json.dumps(values | more))
        return memory.draft_sizes(_tiny(), DraftConfig(method=DraftMethod.DRAFT_MODEL, model=str(tmp_path)), 1)

    sizes = {"hidden_size": 2, "num_attention_heads": 1, "head_dim": 4}
    shape = ShapeConfig(num_layers=3, num_query_groups=1, ffn_hidden_size=5, **sizes)
    trained = draft_with(method=DraftMethod.DRAFT_MODEL, draft_model={"shape": shape})
    # A layer: 2 x (2*4 + 2*4 + 3*5) = 62, norms 2*2 + 2*4 = 12; two tables of 8*2; the final norm 2.
    assert memory.draft_sizes(_tiny(), trained, 1) == given(**sizes) == (3 * 74 + 2 * 16 + 2, 3 * 4)
    wide = {"hidden_size": 5, "num_attention_heads": 2}
    least = given(**wide)
    assert least[1] == 3 * 2 * 2  # as many key-value heads as query heads, of 5 // 2
    assert given(**wide, num_key_value_heads=2, head_dim=None, tie_word_embeddings=False) == least
    assert given(**wide, num_key_value_heads=1)[1] == 3 * 1 * 2
    assert given(**wide, tie_word_embeddings=True)[0] == least[0] - 8 * 5


def test_a_draft_that_is_looked_up_holds_nothing_and_one_of_the_hub_is_not_counted() -> None:
    for method in (DraftMethod.NGRAM, DraftMethod.SUFFIX):
        assert memory.draft_sizes(_tiny(), DraftConfig(method=method), 1) == (0.0, 0.0)
    away = DraftConfig(method=DraftMethod.DRAFT_MODEL, model="org/small")
    assert memory.draft_sizes(_tiny(), away, 1) == (0.0, 0.0)
    known = load_recipe("qwen3_8b")
    given = {"learner": known.learner, "engine": known.engine, "layout": known.layout, "draft": away}
    found = memory.estimate(load_model("qwen3-8b"), "gb200", **given, longest_k=3, has_reference=False)
    assert list(found.warnings()) == ["draft.model org/small is not at hand: its memory is not counted"]


def test_the_8b_model_needs_what_its_code_was_read_to_need() -> None:
    shape = load_model("qwen3-8b")
    learner = replace(_learner(tensor=4, data=8), max_tokens_per_microbatch=16_384)
    found = _learned(learner, shape)
    # 8.19e9 parameters; 18 bytes each over 4 ranks; 66 KB a token and layer; (2 + 12) x 151,936 / 4 bytes a token.
    assert _estimate().refit_bytes == 2 * 8_190_735_360  # the published size of Qwen3-8B
    assert found["weights"] + found["gradients"] + found["optimizer"] == pytest.approx(37e9, rel=0.01)
    assert memory.activation_bytes(shape, learner) == 67_072
    assert found["activations"] == pytest.approx(40e9, rel=0.02)
    assert found["logits"] == pytest.approx(9e9, rel=0.04)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.booleans())
def test_more_ranks_never_need_more_each(tensor: int, pipeline: int, is_sequence_parallel: bool) -> None:
    shape = load_model("qwen3-8b")

    def total(tensor: int, pipeline: int) -> float:
        sequence = is_sequence_parallel and tensor > 1
        learner = _learner(tensor=tensor, pipeline=pipeline, sequence_parallel=sequence)
        return sum(_learned(replace(learner, max_tokens_per_microbatch=4096), shape).values())

    assert total(2 * tensor, pipeline) < total(tensor, pipeline)
    assert total(tensor, 2 * pipeline) <= total(tensor, pipeline)


def test_a_split_gpu_has_the_engines_share_for_its_micro_batch_and_chunked_logits_do_not_grow() -> None:
    alone, together = _estimate(**SPLIT), _estimate()
    # Alone, a micro-batch has the engine's share too: 83.7 GB at (67,072 x 36 + 14 x 37,984) bytes a token,
    # and no refit stages five copies of the largest tensor there.
    more = alone.max_microbatch_tokens - together.max_microbatch_tokens
    assert more == pytest.approx((0.45 * 186e9 + 5 * 151_936 * 4096 * 2) / (67_072 * 36 + 14 * 37_984), abs=1)
    chunked = _estimate(learner={"logprob_chunk_tokens": 1024})
    assert chunked.learner["logits"] == pytest.approx(together.learner["logits"] / 16)
    grown = sum((chunked.learner | chunked.engine).values()) - chunked.learner["activations"]
    assert chunked.max_microbatch_tokens == int((0.95 * 186e9 - grown) / (67_072 * 36))


def test_the_longest_micro_batch_is_that_beside_a_draft_whose_update_needs_more_than_activations() -> None:
    changes: dict[str, Any] = {"draft": {"online": {"when": "always"}}}
    few = {"max_tokens_per_microbatch": 10_240, "recompute": "full", "logprob_chunk_tokens": 256}
    longest = _estimate(**changes, learner=few).max_microbatch_tokens
    for tokens, is_enough in ((longest, True), (longest + 1, False)):
        found = _estimate(**changes, learner={**few, "max_tokens_per_microbatch": tokens})
        assert (sum((found.learner | found.engine).values()) <= found.usable) is is_enough
    none = replace(found, hardware=replace(found.hardware, memory_bytes=1.0))
    assert none.max_microbatch_tokens == 0


def test_a_run_in_turn_keeps_weights_beside_the_engine_and_no_cache_beside_the_learner() -> None:
    kinds = _estimate(**IN_TURN, grpo={"loss": {"kl_coefficient": 0.1}}).kinds
    own = [part for part in kinds["generating"] if not part.startswith(("engine", "draft"))]
    assert own == ["weights", "reference", "refit", "KV cache"]
    assert "KV cache" not in kinds["training"]


@rows(
    """
learner.max_tokens_per_microbatch=20_000
    GPU: 185.7 GB are more than the 176.7 GB to give: lower learner.max_tokens_per_microbatch to 16940, or
    engine.gpu_memory_utilization or engine.kv_cache_gib, or split further
SPLIT + learner.max_tokens_per_microbatch=60_000
    training GPU: 213.6 GB are more than the 176.7 GB to give: lower learner.max_tokens_per_microbatch to 47460, or
    split further
engine.gpu_memory_utilization=0.12
    an engine's cache holds 2,791 tokens, less than one sequence of engine.max_model_len 12,288: raise
    engine.gpu_memory_utilization or engine.tensor_parallel_size
SPLIT + engine.kv_cache_gib=160.0 + placement.logical_gpus=true
    generation GPU: 193.7 GB are more than the 176.7 GB to give: lower engine.gpu_memory_utilization or
    engine.kv_cache_gib, or split further
"""
)
def test_what_may_not_fit_is_a_warning_with_the_field_to_change(given: str, expected: str) -> None:
    assert list(_estimate(**overrides(given, NAMED)).warnings()) == [expected]
    for fitting in ({}, {"learner": {"max_tokens_per_microbatch": 16_940}}):
        assert list(_estimate(**fitting).warnings()) == []


def test_an_engine_whose_weights_do_not_fit_is_refused(refusal: Callable[..., str]) -> None:
    found = _estimate()
    whole = replace(found, engine={**found.engine, "engine weights": 200e9})
    assert refusal(whole.require_states) == (
        "engine.tensor_parallel_size must split the engine's weights further: 200.0 GB, a GB200 has 186.0 GB, got 1; "
        "raise it, and lower engine.num_engines with it"
    )


def test_a_mixture_of_experts_is_placed_without_its_memory(tmp_path: Path) -> None:
    scratch = ScratchConfig(shape=ShapeConfig(num_layers=2, num_attention_heads=32, num_query_groups=8))
    experts = Experts(num_experts=8, num_experts_per_token=2, ffn_hidden_size=32, normalizes_chosen=True)
    dense = Architecture.from_scratch(scratch, vocab_size=64, eos_token_id=1)
    config = replace(dense, family=QWEN3_MOE, experts=experts).to_hf(Dtype.BFLOAT16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    dealt = {"policy": {"model": str(tmp_path)}, "learner": {"parallel": {"tensor": 1, "data": 32, "expert": 4}}}
    assert load_recipe("qwen3_8b", overrides=merge(PLAIN, dealt)).memory() is None
    for parallel, rule in (
        ({"tensor": 1, "data": 32, "expert": 16}, "expert must divide the policy's 8 experts, got 16"),
        ({"tensor": 4, "data": 8}, "tensor must be 1 for a mixture of experts, got 4; deal the"),
    ):
        assert _refusal({**dealt, "learner": {"parallel": parallel}}).startswith(f"learner.parallel.{rule}")
    message = "engine.tensor_parallel_size must be 1 for a mixture of experts, got 4"
    assert _refusal({**dealt, "engine": {"tensor_parallel_size": 4, "num_engines": 8}}) == message


def test_without_gpus_known_hardware_or_a_dense_shape_nothing_is_estimated() -> None:
    assert load_recipe("tiny").memory() is None
    assert load_recipe("qwen3_8b", overrides={"simulator": None}).memory() is None
    for others in ({"simulator": {"model": "qwen3-30b-a3b"}}, {"policy": {"model": "Qwen/Qwen3-0.6B"}}):
        assert load_recipe("qwen3_8b", overrides=others).memory() is None
    assert load_recipe("qwen3_8b", overrides={"policy": {"model": "own/qwen3-8b-tuned"}}).memory() is not None


def _lines(**changes: Any) -> list[str]:
    """The table for users."""
    recipe = load_recipe("qwen3_8b", overrides=changes)
    found = recipe.memory()
    assert found is not None
    return memory.memory_text(found, recipe.refit_channel).splitlines()


def test_memory_that_is_had_in_turn_has_a_column_for_each_turn() -> None:
    assert _lines(**IN_TURN) == [
        "part                generating, GB  training, GB",
        "------------------  --------------  ------------",
        "weights             8.2             8.2",
        "gradients           -               16.4",
        "optimizer           -               3.1",
        "activations         -               50.1",
        "logits              -               1.1",
        "refit               3.7             3.7",
        "engine weights      16.4            16.4",
        "draft               0.8             0.8",
        "engine activations  3.7             3.7",
        "KV cache            62.8            -",
        "engine refit        2.5             2.5",
        "runtime (assumed)   9.3             9.3",
        "together            107.4           115.3",
        "GB200 has           186.0           186.0",
        "",
        "longest micro-batch that fits: 39,490 tokens",
        "an engine's cache holds 414,283 tokens of context, 33 of the longest sequences",
        "a refit moves 16.4 GB into each of 32 engines, 524.2 GB in all, by ipc",
        "while engines generate, 3.1 GB of each GPU's optimizer wait in host memory: 12.3 GB a node",
    ]
    beside = _lines(**IN_TURN, draft={"online": {"when": "always"}})[-1]  # two moments of a draft of 0.4 B
    assert beside == "while engines generate, 6.3 GB of each GPU's optimizer wait in host memory: 25.1 GB a node"


def test_memory_of_split_gpus_has_a_column_for_each_kind() -> None:
    lines = _lines(**merge(PLAIN, {**SPLIT, "grpo": {"loss": {"kl_coefficient": 0.1}}}))
    assert lines[0] == "part                training GPU, GB  generation GPU, GB"
    assert lines[5] == "reference           4.1               -"
    assert "engine weights      -                 16.4" in lines
    assert "together            98.5              93.0" in lines  # 89.2 and 83.7 beside 9.3
    assert "GB200 has           186.0             186.0" in lines
    assert lines[-1].endswith("by nccl")
