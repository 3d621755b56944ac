"""Draft pretraining on the policy's own responses: a draft on hidden states and its vocabulary, or a small model.

Pretraining resumes from responses and checkpoints in the stage's directory, and a batch is a pure function of seed and
step. A large vocabulary can be cut to the tokens that the policy's responses use most.

A small language model is given, or learns the policy's sampled text (sequence-level distillation, arXiv 1606.07947).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.data.chat import end_token_ids
from slipstream.drafts.compatibility import check_draft_model, read_config, tensor_shapes
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.learner_draft import Chats, sample_parts
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines
from slipstream.learner.architecture import num_positions
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.config import ScratchConfig
from slipstream.learner.policy_source import Step, learning_rate_at, link_files, locate
from slipstream.records.files import write_atomic
from slipstream.storage import remove
from slipstream.types import Prompt

logger = logging.getLogger(__name__)

_LOSSES = "losses.json"
_SEED_OFFSET = 7919  # draft responses and training rollouts must not share engine seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftProgress:
    """Held-out acceptance of a draft: by position given the tokens before, and mean acceptance length."""

    rate_by_position: tuple[float, ...]
    mean_acceptance_length: float


def regenerate(
    engine: Engines, prompts: Sequence[Prompt], *, config: DraftConfig, sampling: SamplingConfig
) -> tuple[Chats, float]:
    """Generate the policy's responses to `prompts`; returns them and the seconds of generation."""
    seed, group_size = config.seed + _SEED_OFFSET, config.pretrain.samples_per_prompt
    result = engine.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)
    pairs = [(group.prompt.token_ids, rollout) for group in result.groups for rollout in group.rollouts]
    token_ids = [prompt + rollout.token_ids for prompt, rollout in pairs]
    return Chats(token_ids, [len(prompt) for prompt, _ in pairs]), result.generation_s


def write_responses(responses: Chats, path: Path) -> None:
    """Store `responses` for a resumed attempt."""
    kept = {"token_ids": responses.token_ids, "prompt_lengths": responses.prompt_lengths}
    write_atomic(path, json.dumps(kept).encode())


def read_responses(path: Path) -> Chats:
    """Read what `write_responses` wrote."""
    return Chats(**json.loads(path.read_text()))


def train_draft(
    train: Chats,
    config: DraftConfig,
    *,
    update: Callable[[int, list[int]], float],
    save: Callable[[Path], None],
    load: Callable[[Path], object],
    hold: Callable[[], bool] = lambda: True,
    checkpoint: Path,
    on_step: Callable[[int, float], None],
) -> list[float]:
    """Train to the last step, from an earlier attempt's checkpoint if there is one; returns the loss of every step.

    Args:
        update: updates the draft in the given step on the chats with the given indices; returns the loss.
        hold: computes the chats' hidden states once; returns False if they exceed the cache.
    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    plan, losses = config.pretrain, completed_losses(checkpoint)
    num_saved = len(losses)
    if losses:
        try:
            load(checkpoint / f"step-{num_saved}")
        except (CheckpointError, FileNotFoundError) as error:
            raise CheckpointError(f"{error}; remove {checkpoint} to train the draft anew") from error
        logger.info("pretrain_draft: resuming at step %d", num_saved)
    if not hold():
        text = "pretrain_draft: hidden states exceed %s and are computed in each step; raise it if memory allows"
        logger.info(text, "draft.pretrain.states_cache_gib")
    lengths = [len(tokens) for tokens in train.token_ids]
    for step in range(num_saved, plan.num_steps):
        seed = f"{config.seed}/draft/{step}"
        (indices,) = sample_parts(lengths, num_parts=1, num_tokens=plan.tokens_per_step, seed=seed)
        losses.append(update(step, indices))
        on_step(step, losses[-1])
        if len(losses) % plan.checkpoint_every_steps == 0 and len(losses) < plan.num_steps:
            save(checkpoint / f"step-{len(losses)}")
            write_atomic(checkpoint / _LOSSES, json.dumps(losses).encode())
            remove(checkpoint / f"step-{num_saved}")
            num_saved = len(losses)
    return losses


def completed_losses(checkpoint: Path) -> list[float]:
    """Read the losses of the steps that an earlier attempt completed."""
    file = checkpoint / _LOSSES
    return json.loads(file.read_text()) if file.is_file() else []


def require_windows(heldout: Chats, *, num_tokens: int) -> None:
    """Reject held-out responses of which none has room for `num_tokens` drafts behind its first token."""
    pairs = zip(heldout.token_ids, heldout.prompt_lengths, strict=True)
    longest = max(len(tokens) - start for tokens, start in pairs)
    rule = f"must leave a held-out response of more than {num_tokens} tokens"
    require(longest > num_tokens, "draft.pretrain.ttt_steps", rule, longest, "lower it")


def require_cut(num: int, vocab_size: int, *, field: str) -> None:
    """Reject a draft's vocabulary, the recipe's `field`, that is not smaller than the policy's."""
    fix = "null keeps the whole vocabulary"
    require(num < vocab_size, field, f"must be < the policy's {vocab_size} tokens", num, fix)


def frequent_tokens(responses: Iterable[Sequence[int]], *, num: int, vocab_size: int) -> tuple[tuple[int, ...], float]:
    """Return the `num` most frequent tokens in ascending order, and their share; ties go to the smaller id.

    Source: `build_vocab_mappings_from_distribution` of speculators 0.9.
    """
    counts = Counter(itertools.chain.from_iterable(responses))
    found = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:num]
    return tuple(sorted(found)), sum(counts[token] for token in found) / counts.total()


def link_draft_model(config: DraftConfig, policy: Path, directory: Path, *, max_model_len: int) -> int:
    """Check the model that `draft.model` names and link its files into `directory`; returns its parameter count."""
    assert config.model is not None
    source = locate(config.model, ("*.json", "tokenizer*", "*.safetensors"), field="draft.model")
    check_draft_model(policy, source, max_model_len=max_model_len, field="draft.model")
    link_files(filter(Path.is_file, source.iterdir()), directory)
    return num_parameters(directory)


def num_parameters(model: Path) -> int:
    """Count the elements of all tensors in a model directory."""
    return sum(map(math.prod, tensor_shapes(model).values()))


def scratch_model(config: DraftConfig, policy: Path) -> tuple[ScratchConfig, int, int]:
    """Return the Qwen3 that `draft.draft_model` describes, and the policy's vocabulary size and end-of-sequence id."""
    ours = read_config(policy, "policy.model")
    optimizer, num_steps = config.draft_model.optimizer, config.pretrain.num_steps
    scratch = ScratchConfig(
        shape=config.draft_model.shape,
        max_position_embeddings=num_positions(ours),
        num_steps=num_steps,
        tokens_per_step=config.pretrain.tokens_per_step,
        optimizer=replace(optimizer, warmup_steps=min(optimizer.warmup_steps, num_steps)),
        seed=config.seed,
    )
    return scratch, ours["vocab_size"], end_token_ids(policy)[0]


def response_update(lm_step: Step, train: Chats, scratch: ScratchConfig) -> Callable[[int, list[int]], float]:
    """Return the `update` of `train_draft` that teaches a learner with `scratch` the responses of chats."""

    def update(step: int, indices: list[int]) -> float:
        batch = train.select(indices)
        return lm_step(batch.token_ids, batch.prompt_lengths, learning_rate=learning_rate_at(step, scratch))

    return update


def heldout_acceptance(
    policy: Sequence[NDArray[np.float32]], draft: Sequence[NDArray[np.float32]], *, num_tokens: int
) -> DraftProgress:
    """Estimate the policy's acceptance of drafts of `num_tokens`, from held-out responses that the policy sampled.

    The probability of accepting a draft token is sum_v min(p(v), q(v)) of policy and draft. It equals the mean of
    min(1, q / p) over the policy's own tokens, and for several tokens the mean of the product. The first draft
    follows a response's first token, and a window lies within one response.

    Args:
        policy: logprobs of each response's tokens at the sampling temperature.
        draft: the draft's logprobs of the same tokens.
    """
    chances = [np.exp(np.minimum(q[1:] - p[1:], 0.0, dtype=np.float64)) for p, q in zip(policy, draft, strict=True)]
    long = [each for each in chances if len(each) >= num_tokens]  # some are, by `require_windows`
    windows = np.concatenate([np.lib.stride_tricks.sliding_window_view(each, num_tokens) for each in long])
    return DraftProgress(
        rate_by_position=tuple(float(rate) for rate in windows.mean(axis=0)),
        mean_acceptance_length=1.0 + float(windows.cumprod(axis=1).sum(axis=1).mean()),
    )
