"""Build, read, convert and save one-layer EAGLE-3 drafts through speculators, in the format that vLLM loads.

Pretrained drafts come in two formats. speculators nests the layer's config under `transformer_layer_config`. The
original format (github.com/SafeAILab/EAGLE) has the config of a Llama with architecture `LlamaForCausalLMEagle3`, and
calls the layer `midlayer`. vLLM loads both (`model_executor/models/llama_eagle3.py`). Slipstream trains and refits the
format of speculators, and converts the other one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.utils.loading import load_model_layers
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from slipstream.config import require
from slipstream.drafts.compatibility import check_draft, read_config
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.passes import ATTENTION
from slipstream.learner.architecture import Architecture, aux_layer_ids
from slipstream.learner.policy_source import locate
from slipstream.storage import replaced_directory

logger = logging.getLogger(__name__)

AnyDraft: TypeAlias = Any
"""An `Eagle3DraftModel` or a `DFlashDraftModel`, whose decorator hides its type: they read the policy's states."""

_FIELD = "draft.model"
_ARCHITECTURES = {"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel"}
_WEIGHTS = "*.safetensors"
_ORIGINAL = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_EMBEDDINGS = "embed_tokens.weight"
_OF_A_MODEL = ("architectures", "auto_map", "eagle_config", "model_type", "target_vocab_size", "transformers_version")
_NOT_OF_A_LAYER = {*_OF_A_MODEL, *Eagle3SpeculatorConfig.__annotations__}

# Frozen copies of the policy's tensors. vLLM takes the policy's embeddings where the draft has none, and only training
# needs the verifier's. A saved draft with the policy's embeddings or head would share the policy's modules in vLLM, and
# a refit of the draft would overwrite the policy.
_NOT_SAVED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_HEAD_NOISE = 0.02
_LAYERS = ("qwen3", "llama")  # model types of the decoder layers that speculators and vLLM have
_LAYER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "initializer_range",
    "eos_token_id",
    "dtype",
)


def build_draft(policy: Path, config: DraftConfig, *, token_ids: Sequence[int] | None = None) -> Eagle3DraftModel:
    """Build a fresh draft with a random layer and an output head near, but never equal to, the policy's.

    Args:
        token_ids: ids of the policy's vocabulary that the draft knows, ascending; None keeps all.
    """
    layers = config.eagle3.aux_hidden_state_layer_ids or aux_layer_ids(None, Architecture.from_hf(policy).num_layers)
    model = fresh_draft(
        Eagle3DraftModel,
        layer_config(policy),
        policy,
        token_ids,
        seed=config.seed,
        norm_before_residual=True,
        fc_norm=config.eagle3.fc_norm,
        norm_output=config.eagle3.norm_output,
        ttt_steps=config.pretrain.ttt_steps,
        target_layer_ids=list(layers),
    )
    return trainable(model, ATTENTION)


def fresh_draft(
    kind: Any, layer: PretrainedConfig, policy: Path, token_ids: Sequence[int] | None, *, seed: int, **own: Any
) -> AnyDraft:
    """Build a draft of the class `kind` of speculators, which takes the arguments `own`, as `build_draft` says."""
    t2d, d2t = (None, None) if token_ids is None else vocabulary_maps(token_ids, layer.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_training_args(
            layer,
            t2d=t2d,
            d2t=d2t,
            draft_vocab_size=layer.vocab_size if d2t is None else len(d2t),
            verifier_name_or_path=str(policy),
            draft_attn_impl="sdpa",  # the default, flex attention, requires a GPU
            **own,
        ).float()
        head = model.lm_head.weight.data
        head.add_(torch.randn_like(head) * head.std() * _HEAD_NOISE)
    return model


def vocabulary_maps(token_ids: Sequence[int], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return `t2d` [vocabulary], which flags `token_ids`, and `d2t` [draft vocabulary], policy id minus draft id."""
    ids = torch.tensor(token_ids)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return t2d, ids - torch.arange(len(ids))


def load_draft(draft: Path, policy: Path, config: DraftConfig) -> Eagle3DraftModel:
    """Load the saved EAGLE-3 draft in the directory `draft` to train it further for `policy`."""
    saved = read_config(draft, "draft")
    is_eagle3 = saved.get("speculators_model_type") == "eagle3"
    require(is_eagle3, "draft", "must be an EAGLE-3 draft as speculators saves it", str(draft))
    _require_layers(config, saved["eagle_aux_hidden_state_layer_ids"], "the draft")
    saved["transformer_layer_config"]["_attn_implementation"] = "sdpa"
    settings = Eagle3SpeculatorConfig.model_validate(saved)
    settings.speculators_config.verifier = VerifierConfig.from_pretrained(str(policy))
    tensors = load_file(draft / "model.safetensors")
    with torch.random.fork_rng(devices=[]):
        model = Eagle3DraftModel(settings)
    model.load_vocab_mappings(tensors.get("t2d"), tensors.get("d2t"))
    model.load_verifier_weights()
    missing, extra = model.float().load_state_dict(tensors, strict=False)
    assert not extra and set(missing) <= set(_NOT_SAVED), (missing, extra)
    return trainable(model, ATTENTION)


def _require_layers(config: DraftConfig, ids: Sequence[int], whose: str) -> None:
    """Reject layers of a config that are not those which a draft reads; a config need not name any."""
    given, rule = config.eagle3.aux_hidden_state_layer_ids, f"must be the layers that {whose} reads, {list(ids)}"
    fits = given is None or list(given) == list(ids)
    require(fits, "draft.eagle3.aux_hidden_state_layer_ids", rule, given, "leave it out")


def trainable(model: AnyDraft, attention: str) -> Any:
    """Prepare a draft of speculators for training, with the attention that `transformers` has under this name."""
    model.lm_head.weight.requires_grad_(True)
    # The learner's states are already past the final norm, which speculators would apply once more.
    model.verifier_norm = torch.nn.Identity()
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = attention
    return model


def layer_config(policy: Path, *, num_layers: int = 1, is_qwen3: bool = False) -> PretrainedConfig:
    """Config of decoder layers: a Qwen3's for a Qwen3 policy or if `is_qwen3`, a Llama's for every other.

    For a mixture of experts the layer is dense and as wide as a token's experts.

    Source: EAGLE-3 (arXiv 2503.01840), whose drafts are dense layers.
    """
    layer = AutoConfig.from_pretrained(policy)
    if layer.model_type not in (_LAYERS[:1] if is_qwen3 else _LAYERS):
        known, is_sparse = layer.to_dict(), layer.model_type == "qwen3_moe"
        width = layer.num_experts_per_tok * layer.moe_intermediate_size if is_sparse else layer.intermediate_size
        sizes = {name: known[name] for name in _LAYER_FIELDS if name in known}
        layer = (Qwen3Config if is_sparse or is_qwen3 else LlamaConfig)(intermediate_size=width, **sizes)
    layer.num_hidden_layers = num_layers
    layer.layer_types = ["full_attention"] * num_layers
    return layer


def draft_ids(d2t_D: Tensor) -> Tensor:
    """[D] policy id of each token of a cut draft vocabulary."""
    return torch.arange(len(d2t_D), device=d2t_D.device) + d2t_D


def draft_tensors(model: AnyDraft) -> dict[str, Tensor]:
    """Return the draft's tensors under the names that vLLM loads."""
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items() if name not in _NOT_SAVED}


def save_draft(model: AnyDraft, path: Path) -> None:
    """Write config and weights to the directory `path` atomically."""
    write_draft(model.config, draft_tensors(model), path)


def write_draft(settings: SpeculatorModelConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a draft in the format that vLLM loads to the directory `path` atomically."""
    config = settings.to_dict()
    config.pop("auto_map", None)
    config["architectures"] = [_ARCHITECTURES[settings.speculators_model_type]]
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    with replaced_directory(path) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=1, default=str))
        save_file(on_host, partial / "model.safetensors", metadata={"format": "pt"})


def bring_draft(config: DraftConfig, policy: Path, directory: Path, *, max_model_len: int) -> None:
    """Convert the pretrained draft that `draft.model` names into `directory`, if it fits; no weight changes."""
    assert config.model is not None
    source = locate(config.model, ("*.json", _WEIGHTS), field=_FIELD)
    settings, tensors = read_config(source, _FIELD), _tensors(source, config.model)
    architecture = Architecture.from_hf(policy)
    if "speculators_model_type" in settings:
        kind = settings["speculators_model_type"]
        require(kind == "eagle3", _FIELD, "must be an EAGLE-3 draft", f"{config.model}: {kind}")
        ours = Eagle3SpeculatorConfig.model_validate(settings)
    else:
        ours = _of_original(settings, config.model, policy, architecture, num_tokens=config.pretrain.ttt_steps)
    if not ours.eagle_aux_hidden_state_layer_ids:
        ours.eagle_aux_hidden_state_layer_ids = list(aux_layer_ids(None, architecture.num_layers))
    ours.speculators_config.verifier = VerifierConfig.from_pretrained(str(policy))
    _require_layers(config, ours.eagle_aux_hidden_state_layer_ids, _FIELD)
    for norm in ("fc_norm", "norm_output"):
        fits = getattr(ours, norm) or not getattr(config.eagle3, norm)
        require(fits, f"draft.eagle3.{norm}", f"must be false, for {_FIELD} has no such norm", True, "leave it out")
    write_draft(ours, _without_embeddings(_with_both_maps(tensors, architecture.vocab_size), policy), directory)
    check_draft(policy, directory, max_model_len=max_model_len)
    logger.info("draft %s: %d tensors, a vocabulary of %d tokens", config.model, len(tensors), ours.draft_vocab_size)


def _tensors(source: Path, model: str) -> dict[str, Tensor]:
    """Read all tensors under the names of speculators."""
    files = sorted(source.glob(_WEIGHTS))
    fix = "other formats are not read, for they can run code: convert the file with safetensors first"
    require(bool(files), _FIELD, f"must have weights in {_WEIGHTS} files", model, fix)
    named = (each for file in files for each in load_file(file).items())
    return {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in named}


def _of_original(
    settings: Mapping[str, Any], model: str, policy: Path, architecture: Architecture, *, num_tokens: int
) -> Eagle3SpeculatorConfig:
    names = settings.get("architectures") or []
    rule = f"must be an EAGLE-3 draft of speculators, or an original one ({_ORIGINAL[0]})"
    require(any(name in _ORIGINAL for name in names), _FIELD, rule, f"{model}: {names}")
    rule, fix = "must draft its tokens one after another", "a P-EAGLE draft drafts them in one pass"
    require("ptd_token_id" not in settings, _FIELD, rule, f"{model}: ptd_token_id", fix)
    layer = LlamaConfig(**{name: value for name, value in settings.items() if name not in _NOT_OF_A_LAYER})
    layer.vocab_size = settings.get("target_vocab_size", architecture.vocab_size)
    if not settings.get("rope_scaling"):
        # These positions only size tables: many drafts say 2,048 and would be clamped there.
        layer.max_position_embeddings = max(layer.max_position_embeddings, architecture.num_positions)
    norms = {name: settings.get(name, False) for name in ("norm_before_residual", "fc_norm", "norm_output")}
    either = {**(settings.get("eagle_config") or {}), **settings}  # some drafts have these values in a section
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=settings.get("draft_vocab_size") or layer.vocab_size,
        **norms,
        norm_before_fc=either.get("norm_before_fc", False),
        eagle_aux_hidden_state_layer_ids=either.get("eagle_aux_hidden_state_layer_ids"),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(policy)),
        ),
    )


def _with_both_maps(tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Derive `t2d` from `d2t` where it is missing, for training needs both."""
    d2t = tensors.get("d2t")
    if d2t is None or "t2d" in tensors:
        return tensors
    ids = draft_ids(d2t)
    known = ids[(ids >= 0) & (ids < vocab_size)]  # `check_draft` rejects the others
    return {**tensors, "t2d": vocabulary_maps(known.tolist(), vocab_size)[0]}


def _without_embeddings(tensors: dict[str, Tensor], policy: Path) -> dict[str, Tensor]:
    """Drop a copy of the policy's embeddings: vLLM uses the policy's own, which a refit updates."""
    own = tensors.get(_EMBEDDINGS)
    if own is None:
        return tensors
    theirs = load_model_layers([_EMBEDDINGS], str(policy))[_EMBEDDINGS]
    same = own.shape == theirs.shape and torch.equal(own.float(), theirs.float())
    require(same, f"{_FIELD} {_EMBEDDINGS}", "must be the policy's, or left out", "others")
    return {name: tensor for name, tensor in tensors.items() if name != _EMBEDDINGS}
