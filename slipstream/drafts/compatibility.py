"""Does this draft fit this policy? Answered from configs and file headers, before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from slipstream.config import ConfigError, require

_LAYER = "layers.0."
_REQUIRED = (
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    *(f"{_LAYER}{name}_layernorm.weight" for name in ("input", "post_attention")),
    f"{_LAYER}hidden_norm.weight",
    *(f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"{_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
_OPTIONAL = ("d2t", "t2d", "embed_tokens.weight", *(f"{_LAYER}self_attn.{name}_norm.weight" for name in "qk"))


def check_draft(policy: Path, draft: Path, *, max_model_len: int) -> None:
    """Refuse an EAGLE-3 draft that vLLM would load wrongly, or late.

    Raises:
        ConfigError: hidden size, vocabulary, auxiliary layers or positions do not fit; a tensor is missing or extra;
            or head or embeddings equal the policy's, so that vLLM would share them.
    """
    policy_config = _config(policy, "policy.model")
    draft_config = _config(draft, "draft")
    layer = draft_config.get("transformer_layer_config")
    require(isinstance(layer, dict), "draft", "must be an EAGLE-3 draft as speculators saves it", str(draft))
    assert isinstance(layer, dict)
    hidden = policy_config["hidden_size"]
    require(
        layer["hidden_size"] == hidden, "draft hidden_size", f"must equal the policy's {hidden}", layer["hidden_size"]
    )
    vocab = policy_config["vocab_size"]
    require(layer["vocab_size"] == vocab, "draft vocab_size", f"must equal the policy's {vocab}", layer["vocab_size"])
    positions = layer["max_position_embeddings"]
    require(
        positions >= max_model_len,
        "draft max_position_embeddings",
        f"must be >= engine.max_model_len {max_model_len}",
        positions,
        "RoPE would be clamped and acceptance beyond it would collapse",
    )
    ids = draft_config.get("eagle_aux_hidden_state_layer_ids") or []
    num_layers = policy_config["num_hidden_layers"]
    require(
        len(ids) == len(set(ids)) > 0 and all(0 <= i <= num_layers for i in ids),
        "draft eagle_aux_hidden_state_layer_ids",
        f"must be different layers in [0, {num_layers}]",
        ids,
    )
    draft_vocab = draft_config["draft_vocab_size"]
    _check_tensors(policy, draft, hidden=hidden, num_aux=len(ids), draft_vocab=draft_vocab)
    _check_vocabulary_maps(draft / "model.safetensors", vocab=vocab, draft_vocab=draft_vocab)


def _check_tensors(policy: Path, draft: Path, *, hidden: int, num_aux: int, draft_vocab: int) -> None:
    path = draft / "model.safetensors"
    require(path.is_file(), "draft", "must have a model.safetensors", str(draft))
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        missing, extra = sorted(set(_REQUIRED) - names), sorted(names - set(_REQUIRED) - set(_OPTIONAL))
        require(not missing, "draft", "must hold every tensor of an EAGLE-3 layer", f"missing {missing}")
        require(not extra, "draft", "must hold no other tensors", f"extra {extra}")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        require(
            shapes["fc.weight"] == (hidden, num_aux * hidden),
            "draft fc.weight",
            f"must be [{hidden}, {num_aux} aux layers x {hidden}]",
            shapes["fc.weight"],
        )
        require(
            shapes["lm_head.weight"] == (draft_vocab, hidden),
            "draft lm_head.weight",
            f"must be [draft_vocab_size {draft_vocab}, {hidden}]",
            shapes["lm_head.weight"],
        )
        if "d2t" in shapes:
            require(shapes["d2t"] == (draft_vocab,), "draft d2t", f"must be [{draft_vocab}]", shapes["d2t"])
        for name, ours in (("lm_head.weight", "lm_head.weight"), ("embed_tokens.weight", "model.embed_tokens.weight")):
            if name in names:
                _check_not_shared(policy, ours, name, file.get_tensor(name))


def _check_vocabulary_maps(path: Path, *, vocab: int, draft_vocab: int) -> None:
    """`d2t` holds, for each draft id, the policy's id minus the draft id; `t2d` marks the policy's ids that it has."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        maps = {name: file.get_tensor(name).tolist() for name in ("d2t", "t2d") if name in names}
    require(
        "d2t" in maps or draft_vocab == vocab,
        "draft d2t",
        f"must be given where draft_vocab_size {draft_vocab} is not the policy's {vocab}",
        None,
        "every draft token would stand for another one of the policy's",
    )
    targets = [index + shift for index, shift in enumerate(maps["d2t"])] if "d2t" in maps else list(range(vocab))
    outside = [target for target in targets if not 0 <= target < vocab]
    require(not outside, "draft d2t", f"must lead to policy ids in [0, {vocab})", outside[:5])
    require(
        len(set(targets)) == len(targets),
        "draft d2t",
        "must lead to different policy ids",
        f"{len(targets) - len(set(targets))} repeated",
    )
    if "t2d" in maps:
        marked = [index for index, flag in enumerate(maps["t2d"]) if flag]
        require(
            marked == sorted(targets),
            "draft t2d",
            "must mark exactly the policy ids that d2t leads to",
            f"{len(set(marked) ^ set(targets))} ids in one alone",
        )


def _check_not_shared(policy: Path, policy_name: str, name: str, tensor: Any) -> None:
    for shard in policy.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            if policy_name not in file.keys():  # noqa: SIM118  # safe_open is no mapping
                continue
            other = file.get_tensor(policy_name)
            same = other.shape == tensor.shape and bool((other.float() == tensor.float()).all())
            fix = "leave embed_tokens out and train the head: vLLM shares equal modules, and a refit of the draft "
            require(not same, f"draft {name}", "must differ from the policy's", "equal", fix + "overwrites the policy")


def _config(path: Path, field: str) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{field} must be a model directory with a config.json, got {str(path)!r}")
    return json.loads(file.read_text())
