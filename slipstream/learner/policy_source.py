"""Source of the initial policy: a local directory, a hub id, or pretraining of random weights.

A directory and a hub id are checked by their configs alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import ConfigError, require
from slipstream.data.tokenizer import write_tokenizer
from slipstream.learner.architecture import MIMO, Architecture, aux_layer_ids, require_routes
from slipstream.learner.config import PolicyConfig, ScratchConfig
from slipstream.records.files import write_atomic
from slipstream.records.stages import PolicyRecord
from slipstream.storage import safetensors_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer*")
_WEIGHTS = "*.safetensors"

Document = tuple[Sequence[int], int]
"""Token ids, and the index of the first token that has a loss (0: all of them)."""
Step = Callable[..., float]
"""`lm_step` of a policy in this or another process: takes sequences, the starts of their loss and `learning_rate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Requirements of a run on its policy."""

    max_model_len: int  # in tokens, of the longest sequence
    draft_layer_ids: Sequence[int] | None  # layers whose hidden states the draft reads; None for the default ones
    mtp: bool = False  # the policy must have an MTP layer
    routes: bool = False  # the policy must have routers, whose routes are replayed


def write_policy_tokenizer(policy: PolicyConfig, needs: Needs, directory: Path) -> None:
    """Write the tokenizer of a policy before the policy exists, and check its model's configs as `resolve` does."""
    if policy.scratch is not None:
        write_tokenizer(directory, max_length=policy.scratch_positions)
        return
    _, tokenizer = _check_configs(locate(policy.model, _CONFIG_FILES), policy, needs)
    tokenizer.save_pretrained(str(directory))


def config_files(model: str) -> list[Path]:
    """Config and tokenizer files of a local directory or hub id."""
    source = locate(model, _CONFIG_FILES)
    return sorted({path for pattern in _CONFIG_FILES for path in source.glob(pattern)})


def resolve(policy: PolicyConfig, needs: Needs, directory: Path) -> PolicyRecord:
    """Check a hub id or local directory by its configs alone and link its files into `directory`.

    Raises:
        ConfigError: there is no such model, the learner does not compute it, or it lacks what the run needs.
    """
    start = time.perf_counter()
    source = locate(policy.model, (*_CONFIG_FILES, _WEIGHTS))
    architecture, _ = _check_configs(source, policy, needs)
    require(any(source.glob(_WEIGHTS)), "policy.model", f"must have weights in {_WEIGHTS} files", policy.model)
    for file in safetensors_files(source):
        require(file.is_file(), "policy.model", f"must hold {file.name}, which its index names", policy.model)
    link_files((path for pattern in (*_CONFIG_FILES, _WEIGHTS) for path in source.glob(pattern)), directory)
    write_positions(architecture, directory)
    return PolicyRecord(
        model=policy.model,
        architecture=architecture.family.name,
        num_parameters=architecture.num_parameters(),
        vocab_size=architecture.vocab_size,
        max_position_embeddings=architecture.num_positions,
        eos_token_id=architecture.eos_token_ids[0],
        pretrain_steps=0,
        pretrain_loss=0.0,
        pretrain_losses=(),
        elapsed_s=time.perf_counter() - start,
    )


def link_files(files: Iterable[Path], directory: Path) -> None:
    """Link files into a directory, in place of the links that an earlier attempt has laid."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in files:
        link = directory / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())


def write_positions(architecture: Architecture, directory: Path) -> None:
    """Give a model directory's `config.json` its family's type and a scaled rotary embedding in full, for all readers.

    A MiMo of the hub has a type of its own, with code that transformers and vLLM would have to run. vLLM takes no whole
    number for the factor of type `linear`, and no null for a parameter of `yarn`.
    """
    path, kind = directory / "config.json", architecture.family.model_type
    config = json.loads(path.read_text())
    if architecture.rope_scaling is None and config.get("model_type") == kind:
        return
    config.pop("auto_map", None)
    config |= {"model_type": kind, **architecture.positions_to_hf()}
    write_atomic(path, json.dumps(config, indent=2).encode())


def _check_configs(source: Path, policy: PolicyConfig, needs: Needs) -> tuple[Architecture, PreTrainedTokenizerBase]:
    """Load architecture and tokenizer from `source` and require that both meet the run's needs."""
    from transformers import AutoTokenizer

    architecture = Architecture.from_hf(source).extended(policy.rope)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    require(tokenizer.chat_template is not None, "policy.model", "must have a chat template", policy.model)
    require(tokenizer.eos_token_id is not None, "policy.model", "must have an end-of-sequence token", None)
    context, length = architecture.num_positions, needs.max_model_len
    rule, fix = f"must be <= the policy's {context} positions", "lower it, or extend the positions with policy.rope"
    require(length <= context, "engine.max_model_len", rule, length, fix)
    name = architecture.family.name
    fix = f"take a {MIMO.name}, or another draft.method"
    require(architecture.has_mtp or not needs.mtp, "policy.model", "must have an MTP layer to draft with", name, fix)
    if needs.routes:
        require_routes(architecture)
    layers = needs.draft_layer_ids
    rule = "must be of a family whose inner states vLLM returns, for an EAGLE-3 or DFlash draft"
    require(layers == () or architecture.family.eagle3, "policy.model", rule, name, "take another draft.method")
    aux_layer_ids(layers, architecture.num_layers)
    return architecture, tokenizer


def locate(model: str, patterns: Sequence[str], *, field: str = "policy.model") -> Path:
    """Find a model's local directory; the files of a hub id that match `patterns` are downloaded.

    Args:
        model: a path or a hub id, which may end in `@` and a revision.
        field: the recipe field that holds `model`, for the error.
    Raises:
        ConfigError: neither a directory nor a reachable hub id has that name.
    """
    path = Path(model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        name, _, revision = model.partition("@")
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{field} must be a local directory or a reachable hub id, got {model!r}: {error}") from error


def pretrain(
    lm_step: Step,
    documents: Iterator[Document],
    config: ScratchConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train for `config.num_steps` updates of about `config.tokens_per_step` tokens each.

    Args:
        documents: consumed in order; they must last for all steps.
        on_step: called with each step, from 0, and its loss.
    Returns:
        Mean loss a learned token of every step, in nats.
    Raises:
        ValueError: `documents` ended before the last step.
    """
    losses = []
    for step in range(config.num_steps):
        batch = _take(documents, config.tokens_per_step)
        if not batch:
            raise ValueError(f"documents ended after {step} of {config.num_steps} pretraining steps")
        sequences, loss_starts = zip(*batch, strict=True)
        loss = lm_step(sequences, loss_starts, learning_rate=learning_rate_at(step, config))
        losses.append(loss)
        on_step(step, loss)
    return losses


def learning_rate_at(step: int, config: ScratchConfig) -> float:
    """Linear warmup to the optimizer's rate, then linear decay that would reach zero one step after the last."""
    highest, warmup = config.optimizer.learning_rate, config.optimizer.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * (config.num_steps - step) / (config.num_steps - warmup)


def _take(documents: Iterator[Document], num_tokens: int) -> list[Document]:
    """Take whole documents until they hold at least `num_tokens` tokens, or until there are no more."""
    batch, taken = [], 0
    for document in documents:
        batch.append(document)
        taken += len(document[0])
        if taken >= num_tokens:
            break
    return batch
