"""A small language model as draft, either given or trained on the policy's own responses.

Training is sequence-level distillation (arXiv 1606.07947): the student learns the teacher's sampled text. A batch is a
pure function of seed and step, so training resumes exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.drafts.compatibility import check_draft_model, tensor_shapes
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.pretrain import DraftProgress, Responses
from slipstream.learner.architecture import num_positions
from slipstream.learner.config import ScratchConfig
from slipstream.learner.policy_source import Step, learning_rate_at, link_files, locate

_WEIGHTS = "*.safetensors"


def link_draft_model(config: DraftConfig, policy: Path, directory: Path, *, max_model_len: int) -> int:
    """Check the model that `draft.model` names and link its files into `directory`; returns its parameter count.

    Raises:
        ConfigError: there is no such model, or it cannot draft for the policy (`check_draft_model`).
    """
    assert config.model is not None
    source = locate(config.model, ("*.json", "tokenizer*", _WEIGHTS), field="draft.model")
    check_draft_model(policy, source, max_model_len=max_model_len, field="draft.model")
    link_files(filter(Path.is_file, source.iterdir()), directory)
    return num_parameters(directory)


def num_parameters(model: Path) -> int:
    """Count the elements of all tensors in a model directory."""
    return sum(map(math.prod, tensor_shapes(model).values()))


def scratch_model(config: DraftConfig, policy: Path) -> tuple[ScratchConfig, int, int]:
    """Return the Qwen3 that `draft.draft_model` describes, and the policy's vocabulary size and end-of-sequence id."""
    ours = json.loads((policy / "config.json").read_text())
    eos = ours["eos_token_id"]
    optimizer, num_steps = config.draft_model.optimizer, config.pretrain.num_steps
    scratch = ScratchConfig(
        shape=config.draft_model.shape,
        max_position_embeddings=num_positions(ours),
        num_steps=num_steps,
        tokens_per_step=config.pretrain.tokens_per_step,
        optimizer=replace(optimizer, warmup_steps=min(optimizer.warmup_steps, num_steps)),
        seed=config.seed,
    )
    return scratch, ours["vocab_size"], eos[0] if isinstance(eos, list) else eos


def response_update(lm_step: Step, train: Responses, scratch: ScratchConfig) -> Callable[[int, list[int]], float]:
    """Return the `update` of `train_draft` that teaches a small model the responses of chats.

    Args:
        lm_step: trains a learner that holds `scratch` with random weights.
    """

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
    Raises:
        ConfigError: no response is long enough.
    """
    chances = [np.exp(np.minimum(q[1:] - p[1:], 0.0, dtype=np.float64)) for p, q in zip(policy, draft, strict=True)]
    long = [each for each in chances if len(each) >= num_tokens]
    rule = f"must leave a held-out response of more than {num_tokens} tokens"
    require(bool(long), "draft.pretrain.ttt_steps", rule, max(map(len, chances), default=0) + 1, "lower it")
    windows = np.concatenate([np.lib.stride_tricks.sliding_window_view(each, num_tokens) for each in long])
    return DraftProgress(
        rate_by_position=tuple(float(rate) for rate in windows.mean(axis=0)),
        mean_acceptance_length=1.0 + float(windows.cumprod(axis=1).sum(axis=1).mean()),
    )
