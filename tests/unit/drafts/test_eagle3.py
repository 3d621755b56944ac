"""EAGLE-3 drafts are built, saved, read from either format, and handed on or trained further."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.drafts.compatibility import check_draft
from slipstream.drafts.config import DraftConfig, DraftInit
from slipstream.drafts.eagle3 import bring_draft, build_draft, save_draft
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.trainer import DraftTrainer
from tests.integration import qwen3_moe
from tests.small import draft_with
from tests.unit.drafts.small import CONFIG, teach
from tests.unit.learner import families

HIDDEN, VOCAB, KNOWN = 32, 16, [2, 3, 5, 6, 7, 8, 9, 15]
SHAPES = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "lm_head.weight": (len(KNOWN), HIDDEN),
    "norm.weight": (HIDDEN,),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
    "midlayer.self_attn.k_proj.weight": (HIDDEN // 2, 2 * HIDDEN),
    "midlayer.self_attn.v_proj.weight": (HIDDEN // 2, 2 * HIDDEN),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "midlayer.mlp.gate_proj.weight": (48, HIDDEN),
    "midlayer.mlp.up_proj.weight": (48, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, 48),
}


def _given(path: Path, **values: Any) -> DraftConfig:
    return replace(CONFIG, init=DraftInit.FROM_HUB, model=str(path), **values)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A draft as github.com/SafeAILab/EAGLE publishes one: config of a Llama, its layer called midlayer, bfloat16."""
    path = tmp_path / "original"
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 8,  # short, as theirs are
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(KNOWN),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "torch_dtype": "bfloat16",
        "transformers_version": "4.28.1",
    }
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() * 0.2 for name, shape in SHAPES.items()}
    tensors["d2t"] = torch.tensor([token - index for index, token in enumerate(KNOWN)])
    tensors["t2d"] = torch.tensor([token in KNOWN for token in range(VOCAB)])
    save_file(tensors, path / "model.safetensors")
    return path


def _edit(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("name", ["qwen2", "llama3", "linear", "yarn", "smollm2", "mistral"])
def test_the_draft_of_a_family_is_a_layer_of_a_llama_with_the_policys_angles(name: str, tmp_path: Path) -> None:
    model = families.write_model(tmp_path / "policy", name)
    draft = build_draft(tmp_path / "policy", CONFIG, token_ids=KNOWN)
    save_draft(draft, tmp_path / "draft")
    check_draft(tmp_path / "policy", tmp_path / "draft", max_model_len=64)
    layer = json.loads((tmp_path / "draft" / "config.json").read_text())["transformer_layer_config"]
    kind = "qwen3" if name == "yarn" else "llama"
    assert (layer["model_type"], layer["attention_bias"], layer["num_hidden_layers"]) == (kind, False, 1)
    assert torch.equal(draft.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert draft.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling


def test_an_original_draft_keeps_its_weights_under_the_names_that_are_trained_here(
    policy: Path, original: Path, tmp_path: Path
) -> None:
    bring_draft(_given(original), policy, tmp_path / "ours", max_model_len=64)
    before, after = (load_file(path / "model.safetensors") for path in (original, tmp_path / "ours"))
    assert {name.replace("midlayer.", "layers.0."): name for name in before}.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name.replace("midlayer.", "layers.0.")], tensor)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert (layer["model_type"], layer["rms_norm_eps"], layer["vocab_size"]) == ("llama", 1e-5, VOCAB)
    assert layer["rope_parameters"]["rope_theta"] == 20000.0
    assert layer["max_position_embeddings"] == 64  # the policy's: theirs would clamp it
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(policy)


def test_an_original_draft_is_trained_further(policy: Path, chats: Chats, original: Path, tmp_path: Path) -> None:
    config = _given(original)
    bring_draft(config, policy, tmp_path / "ours", max_model_len=64)
    trainer = DraftTrainer(policy, config, given=tmp_path / "ours")
    teach(trainer, chats, 20)
    trainer.save(tmp_path / "trained")
    check_draft(policy, tmp_path / "trained", max_model_len=64)


def test_a_draft_of_speculators_is_handed_on_bit_for_bit(policy: Path, draft: Path, tmp_path: Path) -> None:
    bring_draft(_given(draft), policy, tmp_path / "ours", max_model_len=64)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (draft / name).read_bytes()


def test_a_draft_in_several_files_is_read_whole(policy: Path, draft: Path, tmp_path: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    shutil.copy(draft / "config.json", split)
    for index, name in enumerate(tensors):
        save_file({name: tensors[name]}, split / f"model-{index}.safetensors")
    bring_draft(_given(split), policy, tmp_path / "ours", max_model_len=64)
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("norm", ["fc_norm", "norm_output"])
def test_a_brought_draft_keeps_its_norms_and_is_asked_for_no_other(
    norm: str, policy: Path, original: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    asked = draft_with(_given(original), eagle3={norm: True})
    bring = partial(bring_draft, asked, policy, tmp_path / "ours", max_model_len=64)
    rule = "must be false, for draft.model has no such norm, got True; leave it out"
    assert refusal(bring) == f"draft.eagle3.{norm} {rule}"
    _edit(original, **{norm: True})
    if norm == "fc_norm":
        assert "missing ['fc_norm.0.weight', 'fc_norm.1.weight', 'fc_norm.2.weight']" in refusal(bring)
        tensors = load_file(original / "model.safetensors")
        norms = {f"fc_norm.{index}.weight": torch.ones(tensors["norm.weight"].shape) for index in range(3)}
        save_file({**tensors, **norms}, original / "model.safetensors")
    bring()
    assert json.loads((tmp_path / "ours" / "config.json").read_text())[norm] is True


def test_a_brought_draft_is_trained_behind_the_norm_that_it_has_before_its_first_layer(
    policy: Path, chats: Chats, original: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    config = _given(original)
    _edit(original, norm_before_fc=True)
    bring = partial(bring_draft, config, policy, tmp_path / "ours", max_model_len=64)
    assert "missing ['input_norm.weight']" in refusal(bring)
    tensors, losses = load_file(original / "model.safetensors"), []
    for scale in (1.0, 3.0):
        weight = torch.full(tensors["fc.weight"].shape[1:], scale)
        save_file({**tensors, "input_norm.weight": weight}, original / "model.safetensors")
        bring()
        losses.append(DraftTrainer(policy, config, given=tmp_path / "ours").step(chats))
    assert losses[0] != losses[1]


def test_a_config_takes_the_layers_of_a_draft_and_a_draft_that_names_none_vllms(
    policy: Path, original: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    given = draft_with(_given(original), eagle3={"aux_hidden_state_layer_ids": None})
    bring_draft(given, policy, tmp_path / "ours", max_model_len=64)
    assert DraftTrainer(policy, given, given=tmp_path / "ours").layer_ids == (0, 1, 2)
    field = "draft.eagle3.aux_hidden_state_layer_ids"
    other = draft_with(given, eagle3={"aux_hidden_state_layer_ids": (0, 1, 3)})
    bring = partial(bring_draft, other, policy, tmp_path / "ours", max_model_len=64)
    rule = "must be the layers that draft.model reads, [0, 1, 2], got (0, 1, 3); leave it out"
    assert refusal(bring) == f"{field} {rule}"
    _edit(original, eagle_config={})
    assert refusal(bring) == f"{field} must be in [0, 2), the policy's layers, got (-1, 0, 1)"


def test_a_copy_of_the_policys_embeddings_is_left_out_and_others_are_refused(
    policy: Path, original: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    tensors = load_file(original / "model.safetensors")
    tensors["embed_tokens.weight"] = load_file(policy / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors, original / "model.safetensors")
    bring = partial(bring_draft, _given(original), policy, tmp_path / "ours", max_model_len=64)
    bring()
    assert "embed_tokens.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 1
    save_file(tensors, original / "model.safetensors")
    assert refusal(bring) == "draft.model embed_tokens.weight must be the policy's, or left out, got 'others'"


def test_the_policys_mark_of_known_tokens_follows_from_the_drafts_map(
    policy: Path, original: Path, tmp_path: Path
) -> None:
    tensors = load_file(original / "model.safetensors")
    marked = tensors.pop("t2d")
    save_file(tensors, original / "model.safetensors")
    bring_draft(_given(original), policy, tmp_path / "ours", max_model_len=64)
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")["t2d"], marked)


def _pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _other_map(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + 9
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (
            lambda path: (path / "config.json").unlink(),
            "draft.model must be a model directory with a config.json, got ",
        ),
        (_pickled, "draft.model must have weights in *.safetensors files, got "),
        (
            partial(_edit, architectures=["LlamaForCausalLM"]),
            "draft.model must be an EAGLE-3 draft of speculators, or an original one (LlamaForCausalLMEagle3), got ",
        ),
        (partial(_edit, speculators_model_type="dflash"), "draft.model must be an EAGLE-3 draft, got "),
        (partial(_edit, ptd_token_id=5), "draft.model must draft its tokens one after another, got "),
        (
            partial(_edit, rope_scaling={"rope_type": "linear", "factor": 2.0}),
            "draft max_position_embeddings must be >= engine.max_model_len 64, got 16; ",
        ),
        (_other_map, "draft d2t must lead to policy ids in [0, 16), got "),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    policy: Path,
    original: Path,
    tmp_path: Path,
    refusal: Callable[..., str],
    damage: Callable[[Path], object],
    rule: str,
) -> None:
    damage(original)
    bring = partial(bring_draft, _given(original), policy, tmp_path / "ours", max_model_len=64)
    assert refusal(bring).startswith(rule)


def test_a_saved_draft_is_trained_further_from_a_fresh_optimizer(policy: Path, chats: Chats, tmp_path: Path) -> None:
    fresh = DraftTrainer(policy, CONFIG)
    fresh.save(tmp_path / "draft")
    loaded = DraftTrainer(policy, CONFIG, given=tmp_path / "draft")
    assert [loaded.step(chats) for _ in range(3)] == [fresh.step(chats) for _ in range(3)]


def test_a_saved_draft_of_other_layers_is_refused(policy: Path, draft: Path, refusal: Callable[..., str]) -> None:
    other = draft_with(CONFIG, eagle3={"aux_hidden_state_layer_ids": (0, 1, 3)})
    assert (
        refusal(partial(DraftTrainer, policy, other, given=draft))
        == "draft.eagle3.aux_hidden_state_layer_ids must be the layers that the draft reads, [0, 1, 2], got (0, 1, 3); "
        "leave it out"
    )


def test_it_is_a_dense_layer_as_wide_as_the_experts_of_a_token(tmp_path: Path) -> None:
    qwen3_moe.write_model(tmp_path, seed=0, expert_width=48)
    draft = build_draft(tmp_path, draft_with(eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)}))
    layer = draft.config.transformer_layer_config
    assert (layer.model_type, layer.num_hidden_layers, layer.intermediate_size) == ("qwen3", 1, 2 * 48)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 32)
    assert draft.layers[0].mlp.gate_proj.weight.shape == (96, 64)
