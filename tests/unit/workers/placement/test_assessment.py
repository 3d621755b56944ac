"""A recipe that does not fit its GPUs, or does not divide, is refused with the field to change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import ConfigError
from slipstream.learner.architecture import Architecture, Experts
from slipstream.learner.config import ScratchConfig
from slipstream.recipe import load_recipe
from slipstream.refit.config import Channel
from slipstream.simulator.cost.models import load_model
from slipstream.types import Dtype
from slipstream.workers.placement.assessment import PublishedShape, assess

SPLIT = {
    "placement": {"mode": "split", "nodes": 8, "generation_nodes": 6, "training_nodes": 2},
    "learner": {"parallel": {"data": 2}},
    "engine": {"num_engines": 24},
}


def _refusal(overrides: dict[str, Any], recipe: str = "qwen3_8b") -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"learner": {"parallel": {"tensor": 16, "data": 2}}},
            "learner.parallel.tensor must divide the policy's 8 key-value heads, got 16",
        ),
        (
            {"learner": {"parallel": {"pipeline": 8, "data": 1}}},
            "learner.parallel.pipeline must divide the policy's 36 layers, got 8",
        ),
        (
            {
                "placement": {"nodes": 3},
                "learner": {"parallel": {"data": 3}},
                "engine": {"num_engines": 1, "tensor_parallel_size": 12},
            },
            "engine.tensor_parallel_size must divide the policy's 32 query heads, got 12",
        ),
        (
            {"learner": {"parallel": {"data": 7}}},
            "learner.parallel must multiply to the 32 GPUs that placement gives the learner, got 28; change tensor, "
            "pipeline or data, or placement.nodes",
        ),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(overrides: dict[str, Any], message: str) -> None:
    assert _refusal(overrides) == message


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    scratch = {"num_attention_heads": 3, "num_query_groups": 3, "ffn_hidden_size": 384, "optimizer": "adamw"}
    overrides = {
        "policy": {"scratch": scratch},
        "grpo": {"optimizer": {"method": "adamw"}},
        "learner": {"parallel": {"tensor": 3}},
    }
    assert _refusal(overrides, "tiny") == "learner.parallel.tensor must divide the policy's 64 vocabulary, got 3"


def test_a_mixture_of_experts_is_planned_without_its_memory(tmp_path: Path) -> None:
    scratch = ScratchConfig(num_layers=2, num_attention_heads=32, num_query_groups=8)
    experts = Experts(num_experts=8, num_experts_per_token=2, ffn_hidden_size=32, normalizes_chosen=True)
    dense = Architecture.from_scratch(scratch, vocab_size=64, eos_token_id=1)
    config = replace(dense, experts=experts).to_hf(Dtype.BFLOAT16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    dealt = {"policy": {"model": str(tmp_path)}, "learner": {"parallel": {"tensor": 1, "data": 32, "expert": 4}}}
    assert _refusal(dealt) == (
        f"policy.model must be dense for the memory to be planned, got {str(tmp_path)!r}; leave out the section "
        "`simulator`: only the layout is checked then"
    )
    load_recipe("qwen3_8b", overrides={**dealt, "simulator": None})
    for learner, message in (
        ({"tensor": 1, "data": 32, "expert": 16}, "learner.parallel.expert must divide the policy's 8 experts, got 16"),
        ({"tensor": 4, "data": 8}, "learner.parallel.tensor must be 1 for a mixture of experts, got 4; deal the"),
    ):
        assert _refusal({**dealt, "learner": {"parallel": learner}}).startswith(message)
    engine = {"tensor_parallel_size": 4, "num_engines": 8}
    message = "engine.tensor_parallel_size must be 1 for a mixture of experts, got 4"
    assert _refusal({**dealt, "engine": engine}) == message


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_query_groups": 8, "ffn_hidden_size": 100}, "must divide the policy's 100 ffn hidden size, got 8"),
        (
            {"num_query_groups": 6, "ffn_hidden_size": 96},
            "must divide the policy's 6 key-value heads, or be a multiple of them, got 8",
        ),
    ],
)
def test_an_engine_that_does_not_divide_the_policy_is_refused(
    tmp_path: Path, shape: dict[str, int], message: str
) -> None:
    assert _refusal(_with_engines_of_eight(tmp_path, **shape)) == f"engine.tensor_parallel_size {message}"


def test_an_engine_may_copy_key_value_heads_evenly(tmp_path: Path) -> None:
    overrides = _with_engines_of_eight(tmp_path, num_query_groups=2, ffn_hidden_size=96)
    load_recipe("qwen3_8b", overrides=overrides)  # four workers have each of the two heads


def _with_engines_of_eight(directory: Path, **shape: int) -> dict[str, Any]:
    heads = 24 if shape["num_query_groups"] == 6 else 32
    scratch = ScratchConfig(num_layers=2, num_attention_heads=heads, **shape)  # type: ignore[arg-type]
    dense = Architecture.from_scratch(scratch, vocab_size=64, eos_token_id=1)
    (directory / "config.json").write_text(json.dumps(dense.to_hf(Dtype.BFLOAT16)))
    return {
        "policy": {"model": str(directory)},
        "learner": {"parallel": {"tensor": 1, "data": 32}},
        "engine": {"tensor_parallel_size": 8, "num_engines": 4},
        "simulator": None,
    }


def test_experts_are_not_dealt_where_there_are_none() -> None:
    message = _refusal({"learner": {"parallel": {"tensor": 1, "data": 32, "expert": 4}}})
    assert message == "learner.parallel.expert must be 1 for a policy without experts, got 4"


def test_split_without_generation_nodes_is_refused() -> None:
    message = _refusal({"placement": {"mode": "split", "training_nodes": 8}})
    assert message == "placement.generation_nodes must be >= 1 with mode 'split', got 0"


def test_a_micro_batch_that_does_not_fit_names_the_one_that_does() -> None:
    overrides = {"learner": {"max_tokens_per_microbatch": 20_000}}
    assert _refusal(overrides) == (
        "learner.max_tokens_per_microbatch must be at most 19053 to fit, got 20000; the learner needs 95.8 GB beside "
        "the engine's 83.7 GB, a GB200 has 176.7 GB to give"
    )
    load_recipe("qwen3_8b", overrides={"learner": {"max_tokens_per_microbatch": 19_053}})


def test_an_engine_that_takes_too_much_is_told_how_much_it_may() -> None:
    # Lower, the micro-batch could shrink to one whole sequence first.
    overrides = {"engine": {"gpu_memory_utilization": 0.475}, "simulator": {"hardware": "h200"}}
    assert _refusal(overrides) == (
        "engine.gpu_memory_utilization must be at most 0.34 to fit, got 0.475; the learner needs 85.1 GB beside the "
        "engine's 67.0 GB, a H200 SXM has 133.9 GB to give"
    )  # (133.95 - 85.14) / 141 = 0.346
    # A cache of a named size leaves the field without a say: then the micro-batch shrinks.
    assert _refusal({**overrides, "engine": {"kv_cache_gib": 40.0}}).startswith(
        "learner.max_tokens_per_microbatch must be at most 10942 to fit, got 16384; "
    )


def test_a_learner_alone_on_its_gpu_is_compared_without_the_engine() -> None:
    learner = {**SPLIT["learner"], "max_tokens_per_microbatch": 60_000}
    assert _refusal({**SPLIT, "learner": learner}) == (
        "learner.max_tokens_per_microbatch must be at most 47460 to fit, got 60000; the learner needs 213.6 GB, a "
        "GB200 has 176.7 GB to give"
    )
    # 125 GB fit alone, and would not beside the engine's 84.
    load_recipe("qwen3_8b", overrides={**SPLIT, "learner": {**learner, "max_tokens_per_microbatch": 30_000}})


def test_an_engine_must_keep_a_cache_of_one_sequence_beside_the_learner() -> None:
    # The learner leaves 23.0 GB of 133.9: more than the 21.9 GB without a cache, less than with 12,288 tokens of one.
    overrides = {
        "engine": {"gpu_memory_utilization": 0.475},
        "learner": {"max_tokens_per_microbatch": 25_147},
        "simulator": {"hardware": "h200"},
    }
    assert _refusal(overrides).startswith(
        "learner.parallel.tensor must be larger to fit, got 4; the learner needs 111.0"
    )
    # With 16,250 tokens it leaves 49.2 of 141 GB, which is 0.3490: rounded down, or it would not fit.
    tight = {**overrides, "learner": {"max_tokens_per_microbatch": 16_250}}
    assert _refusal(tight).startswith("engine.gpu_memory_utilization must be at most 0.34 to fit, got 0.475; ")


def test_a_learner_too_large_for_a_gpu_must_be_split_further() -> None:
    overrides = {"learner": {"parallel": {"tensor": 1, "data": 32}}, "simulator": {"hardware": "h100"}}
    assert _refusal(overrides) == (
        "learner.parallel.tensor must be larger to fit, got 1; the learner needs 282.5 GB beside the engine's 36.0 GB, "
        "a H100 SXM has 76.0 GB to give"
    )


def test_an_engine_without_room_for_one_sequence_is_refused() -> None:
    message = _refusal({"engine": {"gpu_memory_utilization": 0.12}})
    assert message == (
        "engine.gpu_memory_utilization must leave a key-value cache of one sequence of engine.max_model_len 12288 "
        "tokens, got 0.12; it holds 2791: raise it to 0.13, or raise engine.tensor_parallel_size 1"
    )


def test_a_cache_that_no_share_of_the_gpu_would_hold_is_told_of_tensor_parallelism_alone() -> None:
    assert _refusal({**SPLIT, "engine": {"num_engines": 24, "kv_cache_gib": 0.5}}).endswith(
        "got 0.5; it holds 3542: raise engine.tensor_parallel_size 1"
    )
    # 151,552 bytes a token: one sequence of 700,000 takes 106 GB of 80; 32.0 less 21.9 GB hold this many.
    longest = {"engine": {"gpu_memory_utilization": 0.4, "max_model_len": 700_000}, "simulator": {"hardware": "h100"}}
    assert _refusal(longest).endswith("it holds 66663: raise engine.tensor_parallel_size 1")


def test_a_model_of_experts_has_no_published_shape() -> None:
    with pytest.raises(ConfigError) as caught:
        PublishedShape.of(load_model("qwen3-30b-a3b"))
    assert str(caught.value) == "simulator.model must be dense to be planned, got 'Qwen3-30B-A3B'"


def test_a_named_cache_larger_than_the_gpu_is_refused() -> None:
    assert _refusal({**SPLIT, "engine": {"num_engines": 24, "kv_cache_gib": 160.0}}) == (
        "engine.kv_cache_gib must leave a GB200 176.7 GB for the engine, which takes 193.7 GB, got 160.0; 21.9 GB of "
        "it are no cache"
    )


def test_split_gpus_hold_one_role_each_and_refit_over_nccl() -> None:
    found = assess(load_recipe("qwen3_8b", overrides=SPLIT))
    assert found is not None
    assert (found.is_colocated, found.channel) == (False, Channel.NCCL)
    together = assess(load_recipe("qwen3_8b"))
    assert together is not None
    assert together.channel is Channel.IPC
    # Alone, a micro-batch has the engine's share too: 83.7 GB at (67,072 x 36 + 14 x 37,984) bytes a token.
    more = found.max_microbatch_tokens - together.max_microbatch_tokens
    assert more == pytest.approx(0.45 * 186e9 / (67_072 * 36 + 14 * 37_984), abs=1)


def test_a_channel_that_the_placement_rules_out_is_refused_with_the_recipe() -> None:
    assert _refusal({"refit": {"channel": "nccl"}}) == (
        "refit.channel must join two processes on one GPU, got 'nccl'; set auto, or ipc"
    )
    assert _refusal({**SPLIT, "refit": {"channel": "ipc"}}) == (
        "refit.channel must join processes on different GPUs, got 'ipc'; set auto, or nccl"
    )
    assert _refusal({"refit": {"channel": "shared_memory"}}) == (
        "refit.channel must cross 8 nodes, got 'shared_memory'; set auto, or ipc"
    )
    one_node = {"placement": {"nodes": 1}, "learner": {"parallel": {"data": 1}}, "engine": {"num_engines": 4}}
    two_nodes = {"placement": {"nodes": 2}, "learner": {"parallel": {"data": 2}}, "engine": {"num_engines": 8}}
    load_recipe("qwen3_8b", overrides={**one_node, "refit": {"channel": "shared_memory"}})
    assert _refusal({**two_nodes, "refit": {"channel": "shared_memory"}}).startswith("refit.channel must cross 2 nodes")
    over_gloo = assess(load_recipe("qwen3_8b", overrides={"refit": {"channel": "gloo"}}))
    assert over_gloo is not None
    assert over_gloo.channel is Channel.GLOO


@pytest.mark.parametrize(("placement", "channel"), [({}, "nccl"), ({}, "ipc"), (SPLIT, "ipc"), ({}, "shared_memory")])
def test_a_channel_is_refused_with_the_recipe_whether_or_not_the_hardware_is_known(
    placement: dict[str, Any], channel: str
) -> None:
    def refused(known: dict[str, Any]) -> bool:
        try:
            load_recipe("qwen3_8b", overrides={**placement, **known, "refit": {"channel": channel}})
        except ConfigError as error:
            assert str(error).startswith("refit.channel must "), error
            return True
        return False

    assert refused({}) == refused({"simulator": None}) == (channel != "ipc" or bool(placement))


@pytest.mark.parametrize("channel", ["nccl", "ipc"])
def test_without_gpus_no_channel_between_gpus_is_taken(channel: str) -> None:
    placement = {"nodes": 1, "gpus_per_node": 0}
    for known in ({}, {"simulator": None}):
        assert _refusal({"placement": placement, **known, "refit": {"channel": channel}}) == (
            f"refit.channel must do without CUDA: placement.gpus_per_node is 0, got '{channel}'; set auto"
        )


def test_chunked_logits_leave_room_for_a_larger_micro_batch() -> None:
    whole = assess(load_recipe("qwen3_8b"))
    chunked = assess(load_recipe("qwen3_8b", overrides={"learner": {"logprob_chunk_tokens": 1024}}))
    assert whole is not None
    assert chunked is not None
    assert chunked.learner.logits == pytest.approx(whole.learner.logits / 16)
    # What is left of the GPU, 176.7 GB, beside all that does not grow, by 67,072 x 36 bytes a token.
    grown = chunked.learner.total - chunked.learner.activations + chunked.engine.total
    assert chunked.max_microbatch_tokens == int((0.95 * 186e9 - grown) / (67_072 * 36))


def test_what_is_moved_is_the_whole_policy_in_the_learners_type() -> None:
    found = assess(load_recipe("qwen3_8b"))
    assert found is not None
    assert found.refit_bytes == 2 * 8_190_735_360  # the published size of Qwen3-8B


def test_a_loss_with_a_reference_needs_its_weights_once_more() -> None:
    without = assess(load_recipe("qwen3_8b"))
    beside = assess(load_recipe("qwen3_8b", overrides={"grpo": {"loss": {"kl_coefficient": 0.1}}}))
    assert without is not None
    assert beside is not None
    assert beside.learner.total == without.learner.total + without.learner.weights


def test_a_cache_holds_whole_sequences() -> None:
    found = assess(load_recipe("qwen3_8b"))
    assert found is not None
    num_tokens = found.num_longest_sequences * 12_288
    assert num_tokens <= found.engine.kv_tokens < num_tokens + 12_288
    assert found.engine.kv_tokens % 12_288  # else it would hold them to the last token


IN_TURN = {"placement": {"memory": "in_turn"}}


def test_in_turn_a_micro_batch_has_the_room_of_the_engines_cache() -> None:
    shared, turns = assess(load_recipe("qwen3_8b")), assess(load_recipe("qwen3_8b", overrides=IN_TURN))
    assert shared is not None
    assert turns is not None
    assert (turns.learner, turns.engine) == (shared.learner, shared.engine)
    # 61.8 GB at (67,072 x 36 + 14 x 37,984) bytes a token.
    more = turns.max_microbatch_tokens - shared.max_microbatch_tokens
    assert more == pytest.approx(shared.engine.kv_cache / (67_072 * 36 + 14 * 37_984), abs=1)
    longest = {"learner": {"max_tokens_per_microbatch": turns.max_microbatch_tokens}}
    load_recipe("qwen3_8b", overrides={**IN_TURN, **longest})
    longer = {"learner": {"max_tokens_per_microbatch": turns.max_microbatch_tokens + 1}}
    assert _refusal({**IN_TURN, **longer}) == (
        f"learner.max_tokens_per_microbatch must be at most {turns.max_microbatch_tokens} to fit, got "
        f"{turns.max_microbatch_tokens + 1}; the learner needs 154.8 GB beside the engine's 21.9 GB, a GB200 has "
        "176.7 GB to give"
    )


def test_a_smaller_cache_leaves_a_learner_no_room_where_the_cache_goes_anyway() -> None:
    h100 = {"learner": {"parallel": {"tensor": 1, "data": 32}}, "simulator": {"hardware": "h100"}}
    assert _refusal({**IN_TURN, **h100}) == (
        "learner.parallel.tensor must be larger to fit, got 1; the learner needs 282.5 GB beside the engine's 21.9 GB, "
        "a H100 SXM has 76.0 GB to give"
    )


def test_in_turn_an_engine_leaves_room_for_the_learners_weights() -> None:
    # 140 GiB of cache are 150.3 GB, beside the 21.9 that are none; a rank of data parallelism alone has all weights.
    wide = {"learner": {"parallel": {"tensor": 1, "data": 32}, "distributed_optimizer": True}}
    cache = {"engine": {"kv_cache_gib": 140.0}, "refit": {"channel": "gloo"}}
    assert _refusal({**IN_TURN, **wide, **cache}) == (
        "engine.kv_cache_gib must leave a GB200 room for the learner's weights beside the engine, got 140.0; 172.2 GB "
        "and 16.4 GB are more than the 176.7 GB it has to give"
    )
    # Weights and their reference in float32 leave 10.5 GB of 76.0, which are 0.131 of 80.
    learner = {**wide["learner"], "dtype": "float32"}
    both = {"learner": learner, "grpo": {"loss": {"kl_coefficient": 0.1}}, "simulator": {"hardware": "h100"}}
    share = {"engine": {"gpu_memory_utilization": 0.475}, "refit": {"channel": "gloo"}}
    assert _refusal({**IN_TURN, **both, **share}) == (
        "engine.gpu_memory_utilization must leave a H100 SXM room for the learner's weights beside the engine, got "
        "0.475; 38.0 GB and 65.5 GB are more than the 76.0 GB it has to give: lower it to 0.13"
    )


@given(
    tokens=st.integers(10_240, 60_000),
    tensor=st.sampled_from([1, 2, 4, 8]),
    utilization=st.floats(0.14, 0.475),
    kl=st.sampled_from([0.0, 0.1]),
    hardware=st.sampled_from(["gb200", "h200", "h100"]),
)
def test_whoever_works_in_turn_needs_no_more_than_whoever_shares(
    tokens: int, tensor: int, utilization: float, kl: float, hardware: str
) -> None:
    overrides = {
        "learner": {"max_tokens_per_microbatch": tokens, "parallel": {"tensor": tensor, "data": 32 // tensor}},
        "engine": {"gpu_memory_utilization": utilization},
        "grpo": {"loss": {"kl_coefficient": kl}},
        "simulator": {"hardware": hardware},
    }
    try:
        shared = assess(load_recipe("qwen3_8b", overrides=overrides))
    except ConfigError:
        return  # it does not fit: in turn it may
    turns = assess(load_recipe("qwen3_8b", overrides={**overrides, **IN_TURN}))
    assert shared is not None
    assert turns is not None
    assert turns.beside_training + turns.learner.total <= shared.beside_training + shared.learner.total
    assert turns.learner.kept + turns.engine.total <= shared.learner.total + shared.engine.total
    assert turns.max_microbatch_tokens >= shared.max_microbatch_tokens
    assert turns.num_longest_sequences == shared.num_longest_sequences


def test_without_gpus_or_without_known_hardware_nothing_is_assessed() -> None:
    assert assess(load_recipe("tiny")) is None
    assert assess(load_recipe("qwen3_8b", overrides={"simulator": None})) is None
