"""The policy that the chain starts from: resolved and checked, or trained here from random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import ConfigError, require
from slipstream.data.tokenizer import write_tokenizer
from slipstream.policy.architecture import Architecture
from slipstream.policy.config import OptimizerConfig, ScratchConfig
from slipstream.policy.pretrain import Document, pretrain
from slipstream.records import PolicyRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.recipe import Recipe

_CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer*")
_WEIGHTS = "*.safetensors"


def write_policy_tokenizer(recipe: Recipe, directory: Path) -> None:
    """Write the tokenizer of the recipe's policy before there is a policy: of a hub id only small files are fetched.

    Raises:
        ConfigError: what `resolve` would refuse by the model's configs.
    """
    scratch = recipe.policy.scratch
    if scratch is not None:
        write_tokenizer(directory, max_length=scratch.max_position_embeddings)
        return
    _, tokenizer = _check_configs(_locate(recipe.policy.model, _CONFIG_FILES), recipe)
    tokenizer.save_pretrained(str(directory))


def resolve(recipe: Recipe, directory: Path) -> PolicyRecord:
    """Check a hub id or local directory by its configs alone and lay links to its files into `directory`.

    Raises:
        ConfigError: no such model, not a dense Qwen3, no chat template, no end-of-sequence token, no weights, a
            context shorter than `engine.max_model_len`, or fewer layers than the draft reads.
    """
    start = time.perf_counter()
    source = _locate(recipe.policy.model, (*_CONFIG_FILES, _WEIGHTS))
    architecture, _ = _check_configs(source, recipe)
    require(any(source.glob(_WEIGHTS)), "policy.model", f"must have weights in {_WEIGHTS} files", recipe.policy.model)
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in (*_CONFIG_FILES, _WEIGHTS):
        for path in source.glob(pattern):
            link = directory / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    return PolicyRecord(
        model=recipe.policy.model,
        architecture="Qwen3ForCausalLM",
        num_parameters=architecture.num_parameters(),
        vocab_size=architecture.vocab_size,
        max_position_embeddings=architecture.max_position_embeddings,
        eos_token_id=architecture.eos_token_id,
        pretrain_steps=0,
        pretrain_loss=0.0,
        pretrain_losses=(),
        elapsed_s=time.perf_counter() - start,
    )


def train_from_scratch(
    recipe: Recipe,
    directory: Path,
    *,
    tokenizer_dir: Path,
    documents: Callable[[PreTrainedTokenizerBase], Iterable[Document]],
    on_step: Callable[[int, float], None],
) -> PolicyRecord:
    """Train the recipe's own policy with Megatron-Core on `documents` and write it in HF format with its tokenizer."""
    from transformers import AutoTokenizer

    from slipstream.loop import workers

    scratch = recipe.policy.scratch
    assert scratch is not None, "the recipe's own policy has an architecture"
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    with workers.session(), workers.start_learner(recipe.learner) as learner:
        num_parameters = learner.call(
            "create",
            scratch,
            len(tokenizer),
            tokenizer.eos_token_id,
            OptimizerConfig(method=scratch.optimizer, learning_rate=scratch.learning_rate),
        )
        losses = pretrain(learner, documents(tokenizer), scratch, on_step)
        learner.call("save_hf", directory, tokenizer_dir)
    return _record(scratch, tokenizer, num_parameters, losses, time.perf_counter() - start)


def _record(
    scratch: ScratchConfig,
    tokenizer: PreTrainedTokenizerBase,
    num_parameters: int,
    losses: list[float],
    elapsed_s: float,
) -> PolicyRecord:
    assert isinstance(tokenizer.eos_token_id, int)
    return PolicyRecord(
        model="scratch",
        architecture="Qwen3ForCausalLM",
        num_parameters=num_parameters,
        vocab_size=len(tokenizer),
        max_position_embeddings=scratch.max_position_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pretrain_steps=scratch.num_steps,
        pretrain_loss=losses[-1] if losses else 0.0,
        pretrain_losses=tuple(losses),
        elapsed_s=elapsed_s,
    )


def _check_configs(source: Path, recipe: Recipe) -> tuple[Architecture, PreTrainedTokenizerBase]:
    """Architecture and tokenizer in `source`, both of them such as the recipe needs."""
    from transformers import AutoTokenizer

    architecture = Architecture.from_hf(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    require(tokenizer.chat_template is not None, "policy.model", "must have a chat template", recipe.policy.model)
    require(tokenizer.eos_token_id is not None, "policy.model", "must have an end-of-sequence token", None)
    context, length = architecture.max_position_embeddings, recipe.engine.max_model_len
    require(length <= context, "engine.max_model_len", f"must be <= the policy's {context} positions", length)
    layers = recipe.draft.aux_hidden_state_layer_ids
    rule = f"must be < {architecture.num_layers}, the policy's number of layers"
    require(layers[-1] < architecture.num_layers, "draft.aux_hidden_state_layer_ids", rule, layers)
    return architecture, tokenizer


def _locate(model: str, patterns: Sequence[str]) -> Path:
    """The local directory of a model: itself, or the hub's snapshot, of which files like `patterns` are downloaded."""
    path = Path(model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"policy.model must be a local directory or a reachable hub id, got {model!r}: {error}"
        ) from error
