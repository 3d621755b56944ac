"""Checks that a draft fits its policy, made from configs and file headers before an engine starts."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from safetensors import safe_open

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import TRAITS, DraftMethod, require_package
from slipstream.learner.architecture import num_positions

_AROUND = ("fc.weight", "lm_head.weight", "norm.weight")  # the layers of a draft on hidden states
_IN_LAYER = (
    *(f"{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
_QK_NORMS = tuple(f"self_attn.{name}_norm.weight" for name in "qk")
_HIDDEN_NORM = "hidden_norm.weight"
_REQUIRED = (*_AROUND, *(f"layers.0.{name}" for name in (*_IN_LAYER, _HIDDEN_NORM)))
_OPTIONAL = ("d2t", "t2d", "embed_tokens.weight", *(f"layers.0.{name}" for name in _QK_NORMS))
_MTP_PREFIX = "model.mtp_layers."
_WEIGHTS = "*.safetensors"


def require_fit(config: DraftConfig, policy: Path, draft: Path | None, *, max_model_len: int) -> None:
    """Reject a draft that vLLM would load wrongly, or would reject only when it starts.

    Args:
        draft: directory of the draft; None where the method has no weights of its own.
    Raises:
        ConfigError: the draft does not fit, or the method's package is not installed.
    """
    require_package(config.method)
    if not TRAITS[config.method].has_weights:
        return
    assert draft is not None
    match config.method:
        case DraftMethod.EAGLE3:
            check_draft(policy, draft, max_model_len=max_model_len)
        case DraftMethod.DFLASH:
            check_dflash(policy, draft, max_model_len=max_model_len)
        case DraftMethod.MTP:
            check_mtp(policy, draft)
        case _:
            check_draft_model(policy, draft, max_model_len=max_model_len)


def check_draft(policy: Path, draft: Path, *, max_model_len: int) -> None:
    """Reject an EAGLE-3 draft that vLLM would load wrongly, or would reject only when it starts."""
    draft_config = read_config(draft, "draft")
    layer = draft_config.get("transformer_layer_config")
    require(isinstance(layer, dict), "draft", "must be an EAGLE-3 draft as speculators saves it", str(draft))
    ids = draft_config.get("eagle_aux_hidden_state_layer_ids") or []
    norms = [f"fc_norm.{index}.weight" for index in range(len(ids)) if draft_config.get("fc_norm")]
    norms += ["input_norm.weight"] if draft_config.get("norm_before_fc") else []
    _check_reader(policy, draft, ids, {*_REQUIRED, *norms}, max_model_len=max_model_len)


def check_dflash(policy: Path, draft: Path, *, max_model_len: int) -> None:
    """Reject a DFlash draft that vLLM would load or run otherwise than it was trained."""
    config = read_config(draft, "draft")
    kind, fix = config.get("speculators_model_type"), "DFlash 2 and DSpark need vLLM's second model runner"
    require(kind == "dflash", "draft", "must be a DFlash draft as speculators saves it", kind, fix)
    is_whole, fix = config.get("sliding_window_non_causal"), "vLLM would make all layers causal, and accept less"
    require(is_whole is True, "draft sliding_window_non_causal", "must be true", is_whole, fix)
    mask, vocab = config.get("mask_token_id"), read_config(policy, "policy.model")["vocab_size"]
    rule = f"must be an id of the policy's {vocab} tokens"
    require(mask is not None and 0 <= mask < vocab, "draft mask_token_id", rule, mask)
    layers = range(config["transformer_layer_config"]["num_hidden_layers"])
    inside = {f"layers.{index}.{name}" for index in layers for name in (*_IN_LAYER, *_QK_NORMS)}
    ids = config.get("aux_hidden_state_layer_ids") or []
    _check_reader(policy, draft, ids, {*_AROUND, _HIDDEN_NORM, *inside}, max_model_len=max_model_len)


def _check_reader(policy: Path, draft: Path, ids: list[int], required: Set[str], *, max_model_len: int) -> None:
    """Check a draft that reads the policy's hidden states after the layers `ids`."""
    policy_config, draft_config = read_config(policy, "policy.model"), read_config(draft, "draft")
    layer = draft_config["transformer_layer_config"]
    hidden, vocab, num_layers = (policy_config[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers"))
    for name, own in (("hidden_size", hidden), ("vocab_size", vocab)):
        require(layer[name] == own, f"draft {name}", f"must equal the policy's {own}", layer[name])
    positions, rule = num_positions(layer), f"must be >= engine.max_model_len {max_model_len}"
    fix = "RoPE would be clamped and acceptance beyond it would collapse"
    require(positions >= max_model_len, "draft max_position_embeddings", rule, positions, fix)
    are_layers = len(ids) == len(set(ids)) > 0 and all(0 <= i <= num_layers for i in ids)
    rule = f"must be different layers in [0, {num_layers}]"
    name = "eagle_aux_hidden_state_layer_ids"
    require(are_layers, f"draft {name if name in draft_config else name.removeprefix('eagle_')}", rule, ids)
    draft_vocab = draft_config["draft_vocab_size"]
    _check_tensors(policy, draft, (hidden, len(ids), draft_vocab), required)
    _check_vocabulary_maps(draft / "model.safetensors", vocab=vocab, draft_vocab=draft_vocab)


def _check_tensors(policy: Path, draft: Path, sizes: tuple[int, int, int], required: Set[str]) -> None:
    """Check names and shapes; sizes are the hidden one, the number of auxiliary layers and the draft's vocabulary."""
    hidden, num_aux, draft_vocab = sizes
    path = draft / "model.safetensors"
    require(path.is_file(), "draft", "must have a model.safetensors", str(draft))
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        missing, extra = sorted(required - names), sorted(names - required - set(_OPTIONAL))
        require(not missing, "draft", "must hold every tensor of its layers", f"missing {missing}")
        require(not extra, "draft", "must hold no other tensors", f"extra {extra}")
        for name, shape, rule in (
            ("fc.weight", (hidden, num_aux * hidden), f"[{hidden}, {num_aux} aux layers x {hidden}]"),
            ("lm_head.weight", (draft_vocab, hidden), f"[draft_vocab_size {draft_vocab}, {hidden}]"),
            ("d2t", (draft_vocab,), f"[{draft_vocab}]"),
        ):
            found = tuple(file.get_slice(name).get_shape()) if name in names else shape  # `d2t` is optional
            require(found == shape, f"draft {name}", f"must be {rule}", found)
        for name in names & {"lm_head.weight", "embed_tokens.weight"}:
            for ours in ("lm_head.weight", "model.embed_tokens.weight"):  # tied embeddings are the output layer
                _check_not_shared(policy, ours, name, file.get_tensor(name))


def _check_vocabulary_maps(path: Path, *, vocab: int, draft_vocab: int) -> None:
    """Check `d2t` (policy id minus draft id, by draft id) and `t2d` (flag by policy id) against each other."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        maps = {name: file.get_tensor(name).tolist() for name in ("d2t", "t2d") if name in names}
    rule = f"must be given where draft_vocab_size {draft_vocab} is not the policy's {vocab}"
    fix = "every draft token would stand for another one of the policy's"
    require("d2t" in maps or draft_vocab == vocab, "draft d2t", rule, None, fix)
    targets = [index + shift for index, shift in enumerate(maps.get("d2t", [0] * vocab))]
    outside = [target for target in targets if not 0 <= target < vocab]
    require(not outside, "draft d2t", f"must lead to policy ids in [0, {vocab})", outside[:5])
    repeated = len(targets) - len(set(targets))
    require(not repeated, "draft d2t", "must lead to different policy ids", f"{repeated} repeated")
    if "t2d" in maps:
        wrong = {index for index, flag in enumerate(maps["t2d"]) if flag} ^ set(targets)
        rule = "must mark exactly the policy ids that d2t leads to"
        require(not wrong, "draft t2d", rule, f"{len(wrong)} ids in one alone")


def _check_not_shared(policy: Path, policy_name: str, name: str, tensor: Any) -> None:
    for shard in policy.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            if policy_name not in file.keys():  # noqa: SIM118  # safe_open is no mapping
                continue
            other = file.get_tensor(policy_name)
            same = other.shape == tensor.shape and bool((other.float() == tensor.float()).all())
            fix = "leave embed_tokens out and train the head: vLLM shares equal modules, and a refit of the draft "
            require(not same, f"draft {name}", "must differ from the policy's", "equal", fix + "overwrites the policy")


def read_config(path: Path, field: str) -> dict[str, Any]:
    """Read the config of a model directory; an error that there is none names `field`."""
    file = path / "config.json"
    require(file.is_file(), field, "must be a model directory with a config.json", str(path))
    return json.loads(file.read_text())


def check_draft_model(policy: Path, draft: Path, *, max_model_len: int, field: str = "draft") -> None:
    """Reject a model that cannot draft for this policy; the error calls the draft `field`."""
    ours, theirs = read_config(policy, "policy.model"), read_config(draft, field)
    require(any(draft.glob(_WEIGHTS)), field, f"must have weights in {_WEIGHTS} files", str(draft))
    vocab, fix = ours["vocab_size"], "its tokens would stand for other ones of the policy's"
    found = theirs.get("vocab_size")
    require(found == vocab, f"{field} vocab_size", f"must equal the policy's {vocab}", found, fix)
    ids, others = _words(policy), _words(draft)
    differing = {word for word, _ in ids.items() ^ others.items()} if ids and others else ()
    words = sorted(differing)[:5]
    require(not words, f"{field} tokenizer", "must give every word the policy's id", f"others for {words}", fix)
    positions = num_positions({"max_position_embeddings": 0, **theirs})
    rule = f"must be >= engine.max_model_len {max_model_len}"
    fix = "vLLM stops drafting for a whole batch in which one sequence is longer"
    require(positions >= max_model_len, f"{field} max_position_embeddings", rule, positions, fix)


def _words(model: Path) -> dict[str, int]:
    """Read the ids of a fast tokenizer's words; empty without a tokenizer file or without a word table."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return {}
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    table = tokenizer["model"].get("vocab")
    added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens", [])}
    return {**table, **added} if isinstance(table, dict) else {}


def check_mtp(policy: Path, draft: Path) -> None:
    """Reject a policy without an MTP layer, and a directory that does not hold the layer of this policy."""
    wanted = tensor_shapes(policy, prefix=_MTP_PREFIX)
    require(bool(wanted), "draft.method", "mtp needs a policy with an MTP layer", str(policy), "such as a MiMo")
    found = tensor_shapes(draft, prefix=_MTP_PREFIX)
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    rule = "must hold the MTP layer of the policy: the same tensors of the same shapes"
    require(not wrong, "draft", rule, f"{len(wrong)} others, such as {wrong[:1]}", f"see {draft}")


def tensor_shapes(model: Path, *, prefix: str = "") -> dict[str, list[int]]:
    """Read the shapes of a model's tensors whose names begin with `prefix`."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(model.glob(_WEIGHTS)):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118 no mapping
            shapes.update({name: list(opened.get_slice(name).get_shape()) for name in names})
    return shapes
