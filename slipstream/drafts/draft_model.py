"""A small language model as draft: where it lies, and whether it speaks the policy's vocabulary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import safe_open

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.learner.config import ScratchConfig
from slipstream.learner.policy_source import locate

_WEIGHTS = "*.safetensors"
_NAMED = 5  # of the words that differ


def check_draft_model(policy: Path, draft: Path, *, max_model_len: int, field: str = "draft") -> None:
    """Refuse a model that cannot draft for this policy.

    Args:
        field: what an error calls the draft.
    Raises:
        ConfigError: no model or no weights, another vocabulary, or positions that end before the longest sequence.
    """
    has_config = (draft / "config.json").is_file()
    require(has_config, field, "must be a model directory with a config.json", str(draft))
    require(any(draft.glob(_WEIGHTS)), field, f"must have weights in {_WEIGHTS} files", str(draft))
    ours, theirs = _config(policy), _config(draft)
    vocab, fix = ours["vocab_size"], "its tokens would stand for other ones of the policy's"
    found = theirs.get("vocab_size")
    require(found == vocab, f"{field} vocab_size", f"must equal the policy's {vocab}", found, fix)
    words = _differing_words(policy, draft)
    require(not words, f"{field} tokenizer", "must give every word the policy's id", f"others for {words}", fix)
    positions = theirs.get("max_position_embeddings", 0)
    rule = f"must be >= engine.max_model_len {max_model_len}"
    fix = "vLLM stops drafting for a whole batch in which one sequence is longer"
    require(positions >= max_model_len, f"{field} max_position_embeddings", rule, positions, fix)


def link_draft_model(config: DraftConfig, policy: Path, directory: Path, *, max_model_len: int) -> int:
    """Check the model that `draft.model` names, and lay links to its files into `directory`; its parameters.

    Raises:
        ConfigError: there is no such model, or see `check_draft_model`.
    """
    assert config.model is not None
    source = locate(config.model, ("*.json", "tokenizer*", _WEIGHTS), field="draft.model")
    check_draft_model(policy, source, max_model_len=max_model_len, field="draft.model")
    directory.mkdir(parents=True, exist_ok=True)
    for path in filter(Path.is_file, source.iterdir()):
        link = directory / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    return num_parameters(directory)


def num_parameters(model: Path) -> int:
    """Elements of all tensors in a model directory."""
    total = 0
    for path in model.glob(_WEIGHTS):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 no mapping
    return total


def scratch_model(config: DraftConfig, policy: Path) -> tuple[ScratchConfig, int, int]:
    """The small Qwen3 that `draft.scratch` describes, and the policy's vocabulary and end of a sequence."""
    ours, shape = _config(policy), config.scratch
    eos = ours["eos_token_id"]
    scratch = ScratchConfig(
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        max_position_embeddings=ours["max_position_embeddings"],
        init_std=shape.init_std,
        num_steps=config.num_steps,
        tokens_per_step=config.tokens_per_step,
        optimizer=shape.optimizer,
        learning_rate=config.learning_rate,
        warmup_steps=min(config.warmup_steps, config.num_steps),
        seed=config.seed,
    )
    return scratch, ours["vocab_size"], eos[0] if isinstance(eos, list) else eos


def _differing_words(policy: Path, draft: Path) -> list[str]:
    """Some words whose ids differ; none where one of the two has no tokenizer file to compare."""
    ours, theirs = _words(policy), _words(draft)
    if not ours or not theirs:
        return []
    return sorted(word for word in {*ours, *theirs} if ours.get(word) != theirs.get(word))[:_NAMED]


def _words(model: Path) -> dict[str, int]:
    """Id by word, of a fast tokenizer's file; empty without one, or where its words have no table."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return {}
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    table = tokenizer["model"].get("vocab")
    added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens", [])}
    return {**table, **added} if isinstance(table, dict) else {}


def _config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())
