"""A draft that somebody else has trained: read from either format that is about, checked, and written in ours.

EAGLE-3 drafts come in two formats. speculators nests the layer's config under `transformer_layer_config`; the original
one (github.com/SafeAILab/EAGLE) has the config of a Llama whose architecture is `LlamaForCausalLMEagle3`, and calls the
layer `midlayer`. vLLM loads both (`model_executor/models/llama_eagle3.py`); what is trained and refitted here is the
first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig

from slipstream.config import require
from slipstream.drafts.compatibility import check_draft
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.eagle3 import vocabulary_maps, write_draft
from slipstream.learner.architecture import Architecture
from slipstream.learner.policy_source import locate

logger = logging.getLogger(__name__)

_FIELD = "draft.model"
_WEIGHTS = "*.safetensors"
_ORIGINAL = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_EMBEDDINGS = "embed_tokens.weight"


def bring_draft(config: DraftConfig, policy: Path, directory: Path, *, max_model_len: int) -> None:
    """Write the draft that `draft.model` names to `directory`, as it is trained and loaded here; no weight changes.

    Raises:
        ConfigError: there is no such draft, it is in no known format, it reads other layers than
            `draft.aux_hidden_state_layer_ids`, it has embeddings of its own, or it does not fit the policy, see
            `check_draft`.
    """
    assert config.model is not None
    source = locate(config.model, ("*.json", _WEIGHTS), field=_FIELD)
    settings, tensors = _settings(source, config.model), _tensors(source, config.model)
    architecture = Architecture.from_hf(policy)
    if "speculators_model_type" in settings:
        ours = _of_speculators(settings, config.model)
    else:
        ours = _of_original(settings, config.model, policy, architecture, num_tokens=config.ttt_steps)
    if not ours.eagle_aux_hidden_state_layer_ids:
        ours.eagle_aux_hidden_state_layer_ids = list(_default_layers(architecture.num_layers))
    ours.speculators_config.verifier = VerifierConfig.from_pretrained(str(policy))
    ids, wanted = ours.eagle_aux_hidden_state_layer_ids, list(config.aux_hidden_state_layer_ids)
    fix = f"set it to {ids}"
    require(ids == wanted, "draft.aux_hidden_state_layer_ids", f"must be the layers that {_FIELD} reads", wanted, fix)
    write_draft(ours, _without_embeddings(_with_both_maps(tensors, architecture.vocab_size), policy), directory)
    check_draft(policy, directory, max_model_len=max_model_len)
    logger.info("draft of %s: %d tensors, vocabulary of %d tokens", config.model, len(tensors), ours.draft_vocab_size)


def _settings(source: Path, model: str) -> dict[str, Any]:
    file = source / "config.json"
    require(file.is_file(), _FIELD, "must have a config.json", model)
    return json.loads(file.read_text())


def _tensors(source: Path, model: str) -> dict[str, Tensor]:
    """All tensors, under the names of speculators."""
    files = sorted(source.glob(_WEIGHTS))
    fix = "other formats are not read, for they can run code: convert the file with safetensors first"
    require(bool(files), _FIELD, f"must have weights in {_WEIGHTS} files", model, fix)
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(file)
    return {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in found.items()}


def _of_speculators(settings: Mapping[str, Any], model: str) -> Eagle3SpeculatorConfig:
    kind = settings["speculators_model_type"]
    require(kind == "eagle3", _FIELD, "must be an EAGLE-3 draft", f"{model}: {kind}")
    return Eagle3SpeculatorConfig.model_validate(dict(settings))


def _of_original(
    settings: Mapping[str, Any], model: str, policy: Path, architecture: Architecture, *, num_tokens: int
) -> Eagle3SpeculatorConfig:
    names = settings.get("architectures") or []
    rule = f"must be an EAGLE-3 draft of speculators, or an original one ({_ORIGINAL[0]})"
    require(any(name in _ORIGINAL for name in names), _FIELD, rule, f"{model}: {names}")
    layer = LlamaConfig(**{name: value for name, value in settings.items() if name not in _NOT_OF_A_LAYER})
    layer.vocab_size = settings.get("target_vocab_size", architecture.vocab_size)
    if not settings.get("rope_scaling"):
        # These positions are only how far tables reach: many drafts say 2,048, and would be clamped there.
        layer.max_position_embeddings = max(layer.max_position_embeddings, architecture.max_position_embeddings)
    eagle = settings.get("eagle_config") or {}
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=settings.get("draft_vocab_size") or layer.vocab_size,
        norm_before_residual=settings.get("norm_before_residual", False),
        norm_before_fc=settings.get("norm_before_fc", eagle.get("norm_before_fc", False)),
        norm_output=settings.get("norm_output", False),
        eagle_aux_hidden_state_layer_ids=settings.get(
            "eagle_aux_hidden_state_layer_ids", eagle.get("eagle_aux_hidden_state_layer_ids")
        ),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(policy)),
        ),
    )


_NOT_OF_A_LAYER = (
    "architectures",
    "auto_map",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "model_type",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "target_hidden_size",
    "target_vocab_size",
    "transformers_version",
)


def _default_layers(num_layers: int) -> tuple[int, int, int]:
    """What a draft reads that does not say. Source: vLLM's `get_eagle3_default_aux_hidden_state_layers`."""
    return 2, num_layers // 2, num_layers - 3


def _with_both_maps(tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """`t2d` follows from `d2t`; training needs both."""
    d2t = tensors.get("d2t")
    if d2t is None or "t2d" in tensors:
        return tensors
    ids = d2t + torch.arange(len(d2t))
    known = ids[(ids >= 0) & (ids < vocab_size)]  # others are for `check_draft` to refuse
    return {**tensors, "t2d": vocabulary_maps(known.tolist(), vocab_size)[0]}


def _without_embeddings(tensors: dict[str, Tensor], policy: Path) -> dict[str, Tensor]:
    """A copy of the policy's embeddings goes: vLLM takes the policy's own, which a refit moves."""
    own = tensors.get(_EMBEDDINGS)
    if own is None:
        return tensors
    from speculators.utils.loading import load_model_layers

    theirs = load_model_layers([_EMBEDDINGS], str(policy))[_EMBEDDINGS]
    same = own.shape == theirs.shape and torch.equal(own.float(), theirs.float())
    require(same, f"{_FIELD} {_EMBEDDINGS}", "must be the policy's, or left out", "others")
    return {name: tensor for name, tensor in tensors.items() if name != _EMBEDDINGS}
