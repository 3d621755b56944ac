"""EAGLE-3 drafts are built, saved, read from either format, and handed on or trained further."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.drafts.compatibility import check_draft
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.eagle3 import bring_draft, build_draft, save_draft
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.trainer import DraftTrainer
from tests.integration import qwen3_moe
from tests.small import draft_with
from tests.unit.drafts.small import CONFIG, edit_tensors, teach
from tests.unit.learner import families

Bring = Callable[[DraftConfig], Path]
HIDDEN, VOCAB, KNOWN = 32, 16, [2, 3, 5, 6, 7, 8, 9, 15]
SHAPES = {
    "fc": (HIDDEN, 3 * HIDDEN),
    "lm_head": (len(KNOWN), HIDDEN),
    "norm": (HIDDEN,),
    **{f"midlayer.{name}": (HIDDEN,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
    "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
    "midlayer.self_attn.k_proj": (HIDDEN // 2, 2 * HIDDEN),
    "midlayer.self_attn.v_proj": (HIDDEN // 2, 2 * HIDDEN),
    "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
    "midlayer.mlp.gate_proj": (48, HIDDEN),
    "midlayer.mlp.up_proj": (48, HIDDEN),
    "midlayer.mlp.down_proj": (HIDDEN, 48),
}


def _given(path: Path, **eagle3: Any) -> DraftConfig:
    return draft_with(CONFIG, init="from_hub", model=str(path), eagle3=eagle3)


def _tensors(path: Path) -> dict[str, Any]:
    return load_file(path / "model.safetensors")


def _config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def _edit(path: Path, **values: Any) -> None:
    (path / "config.json").write_text(json.dumps({**_config(path), **values}))


@pytest.fixture
def bring(policy: Path, tmp_path: Path) -> Bring:
    """Makes ours of a draft that a config names."""

    def brought(config: DraftConfig) -> Path:
        bring_draft(config, policy, tmp_path / "ours", max_model_len=64)
        return tmp_path / "ours"

    return brought


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
    rng = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(size, generator=rng).bfloat16() * 0.2 for name, size in SHAPES.items()}
    tensors["d2t"] = torch.tensor([token - index for index, token in enumerate(KNOWN)])
    tensors["t2d"] = torch.tensor([token in KNOWN for token in range(VOCAB)])
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", ["qwen2", "llama3", "linear", "yarn", "smollm2", "mistral"])
def test_the_draft_of_a_family_is_a_layer_of_a_llama_with_the_policys_angles(name: str, tmp_path: Path) -> None:
    model = families.write_model(tmp_path / "policy", name)
    draft = build_draft(tmp_path / "policy", CONFIG, token_ids=KNOWN)
    save_draft(draft, tmp_path / "draft")
    check_draft(tmp_path / "policy", tmp_path / "draft", max_model_len=64)
    layer = _config(tmp_path / "draft")["transformer_layer_config"]
    kind = "qwen3" if name == "yarn" else "llama"
    assert (layer["model_type"], layer["attention_bias"], layer["num_hidden_layers"]) == (kind, False, 1)
    assert torch.equal(draft.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert draft.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling


def test_an_original_draft_keeps_its_weights_under_our_names(policy: Path, original: Path, bring: Bring) -> None:
    ours = bring(_given(original))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in _tensors(original).items()}
    after, config = _tensors(ours), _config(ours)
    assert renamed.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in renamed.items())
    layer = config["transformer_layer_config"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert (layer["model_type"], layer["rms_norm_eps"], layer["vocab_size"]) == ("llama", 1e-5, VOCAB)
    assert layer["rope_parameters"]["rope_theta"] == 20000.0
    assert layer["max_position_embeddings"] == 64  # the policy's: theirs would clamp it
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(policy)
    edit_tensors(original, t2d=None)  # the policy's mark of tokens follows from the draft's map
    assert torch.equal(_tensors(bring(_given(original)))["t2d"], renamed["t2d"])


def test_an_original_draft_is_trained_further(
    policy: Path, chats: Chats, original: Path, bring: Bring, tmp_path: Path
) -> None:
    trainer = DraftTrainer(policy, _given(original), given=bring(_given(original)))
    teach(trainer, chats, 20)
    trainer.save(tmp_path / "trained")
    check_draft(policy, tmp_path / "trained", max_model_len=64)


def test_a_draft_of_speculators_is_handed_on_bit_for_bit_and_in_several_files_read_whole(
    draft: Path, bring: Bring
) -> None:
    ours, tensors = bring(_given(draft)), _tensors(draft)
    for name in ("config.json", "model.safetensors"):
        assert (ours / name).read_bytes() == (draft / name).read_bytes()
    (draft / "model.safetensors").unlink()
    for index, name in enumerate(tensors):
        save_file({name: tensors[name]}, draft / f"model-{index}.safetensors")
    assert _tensors(bring(_given(draft))).keys() == tensors.keys()


@pytest.mark.parametrize("norm", ["fc_norm", "norm_output"])
def test_a_brought_draft_keeps_its_norms_and_is_asked_for_no_other(
    norm: str, original: Path, bring: Bring, refusal: Callable[..., str]
) -> None:
    asked = _given(original, **{norm: True})
    rule = "must be false, for draft.model has no such norm, got True; leave it out"
    assert refusal(bring, config=asked) == f"draft.eagle3.{norm} {rule}"
    _edit(original, **{norm: True})
    if norm == "fc_norm":
        names = [f"fc_norm.{index}.weight" for index in range(3)]
        assert f"missing {names}" in refusal(bring, config=asked)
        edit_tensors(original, **{name: torch.ones(HIDDEN) for name in names})
    assert _config(bring(asked))[norm] is True


def test_a_brought_draft_is_trained_behind_the_norm_that_it_has_before_its_first_layer(
    policy: Path, chats: Chats, original: Path, bring: Bring, refusal: Callable[..., str]
) -> None:
    config = _given(original)
    _edit(original, norm_before_fc=True)
    assert "missing ['input_norm.weight']" in refusal(bring, config=config)
    losses = []
    for scale in (1.0, 3.0):
        edit_tensors(original, **{"input_norm.weight": torch.full((3 * HIDDEN,), scale)})
        losses.append(DraftTrainer(policy, config, given=bring(config)).step(chats))
    assert losses[0] != losses[1]


def test_a_config_takes_the_layers_of_a_draft_and_a_draft_that_names_none_vllms(
    policy: Path, original: Path, bring: Bring, refusal: Callable[..., str]
) -> None:
    given = _given(original, aux_hidden_state_layer_ids=None)
    assert DraftTrainer(policy, given, given=bring(given)).layer_ids == (0, 1, 2)
    field = "draft.eagle3.aux_hidden_state_layer_ids"
    other = _given(original, aux_hidden_state_layer_ids=(0, 1, 3))
    rule = "must be the layers that {} reads, [0, 1, 2], got (0, 1, 3); leave it out"
    assert refusal(bring, config=other) == f"{field} {rule.format('draft.model')}"
    ours = bring(given)
    assert refusal(partial(DraftTrainer, policy, other, given=ours)) == f"{field} {rule.format('the draft')}"
    _edit(original, eagle_config={})
    assert refusal(bring, config=other) == f"{field} must be in [0, 2), the policy's layers, got (-1, 0, 1)"


def test_a_copy_of_the_policys_embeddings_is_left_out_and_others_are_refused(
    policy: Path, original: Path, bring: Bring, refusal: Callable[..., str]
) -> None:
    embeddings = _tensors(policy)["model.embed_tokens.weight"]
    edit_tensors(original, **{"embed_tokens.weight": embeddings})
    assert "embed_tokens.weight" not in _tensors(bring(_given(original)))
    edit_tensors(original, **{"embed_tokens.weight": embeddings + 1})
    message = refusal(bring, config=_given(original))
    assert message == "draft.model embed_tokens.weight must be the policy's, or left out, got 'others'"


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda path: (path / "config.json").unlink(), ".model must be a model directory with a config.json, got "),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            ".model must have weights in *.safetensors files, got ",
        ),
        (
            partial(_edit, architectures=["LlamaForCausalLM"]),
            ".model must be an EAGLE-3 draft of speculators, or an original one (LlamaForCausalLMEagle3), got ",
        ),
        (partial(_edit, speculators_model_type="dflash"), ".model must be an EAGLE-3 draft, got "),
        (partial(_edit, ptd_token_id=5), ".model must draft its tokens one after another, got "),
        (
            partial(_edit, rope_scaling={"rope_type": "linear", "factor": 2.0}),
            " max_position_embeddings must be >= engine.max_model_len 64, got 16; ",
        ),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    original: Path,
    bring: Bring,
    refusal: Callable[..., str],
    damage: Callable[[Path], object],
    rule: str,
) -> None:
    damage(original)
    assert refusal(bring, config=_given(original)).startswith(f"draft{rule}")


def test_it_is_a_dense_layer_as_wide_as_the_experts_of_a_token(tmp_path: Path) -> None:
    qwen3_moe.write_model(tmp_path, seed=0, expert_width=48)
    draft = build_draft(tmp_path, draft_with(eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)}))
    layer = draft.config.transformer_layer_config
    assert (layer.model_type, layer.num_hidden_layers, layer.intermediate_size) == ("qwen3", 1, 2 * 48)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 32)
    assert draft.layers[0].mlp.gate_proj.weight.shape == (96, 64)
