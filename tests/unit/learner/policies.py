"""Small policies for the tests of the learner, and what they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.grpo.config import LossConfig, OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.learner.config import LearnerConfig, ScratchConfig, ShapeConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.types import TrainBatch

VOCAB = 32
SCRATCH = ScratchConfig(
    shape=ShapeConfig(hidden_size=32, num_layers=3, head_dim=16, ffn_hidden_size=48),
    max_position_embeddings=64,
    num_steps=30,
    seed=3,
)
LEARNER = LearnerConfig(max_tokens_per_microbatch=64, num_threads=1)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)


def shaped(*, tie_word_embeddings: bool = False, num_mtp_layers: int = 0, **sizes: int) -> ScratchConfig:
    """`SCRATCH` with other sizes of its shape."""
    shape = replace(SCRATCH.shape, **sizes)
    return replace(SCRATCH, shape=shape, tie_word_embeddings=tie_word_embeddings, num_mtp_layers=num_mtp_layers)


def new_policy(
    scratch: ScratchConfig = SCRATCH,
    learner: LearnerConfig = LEARNER,
    optimizer: OptimizerConfig | None = OPTIMIZER,
    **changes: Any,
) -> MegatronPolicy:
    """A fresh policy in a learner with these `changes`."""
    learner = replace(learner, **changes)
    return MegatronPolicy.from_scratch(scratch, vocab_size=VOCAB, eos_token_id=1, learner=learner, optimizer=optimizer)


def random_sequences(count: int = 9, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(0, VOCAB, rng.integers(5, 30)).tolist()) for _ in range(count))


def update_of(
    policy: MegatronPolicy,
    sequences: Sequence[tuple[int, ...]] | None = None,
    *,
    start: int = 3,
    seed: int = 0,
    kl_coefficient: float = 0.0,
    advantages: Sequence[float] | None = None,
) -> Update:
    """An update of the policy on rollouts of its own at temperature 0.8."""
    sequences = random_sequences(seed=seed) if sequences is None else sequences
    starts = (start,) * len(sequences)
    logprobs = policy.logprobs(sequences, starts, 0.8)
    drawn = np.random.default_rng(seed).normal(size=len(sequences)).tolist()
    batch = TrainBatch(
        token_ids=tuple(sequences),
        prompt_lengths=starts,
        rollout_logprobs=tuple(tuple(row.tolist()) for row in logprobs),
        advantages=tuple(drawn if advantages is None else advantages),
        policy_version=policy.version,
    )
    return Update(
        batch=batch,
        trainer_logprobs=logprobs,
        ref_logprobs=logprobs if kl_coefficient else None,
        loss=LossConfig(kl_coefficient=kl_coefficient),
        temperature=0.8,
    )


def chosen(logits_TV: Tensor, tokens: Sequence[int], start: int = 1, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the tokens from `start` on."""
    return torch.log_softmax(logits_TV / temperature, -1)[range(start - 1, len(tokens) - 1), tokens[start:]]


def torch_step(
    model: Callable[[Tensor], Any], optimizer: torch.optim.Optimizer, sequences: Sequence[Sequence[int]], start: int
) -> tuple[float, float]:
    """Update what torch's optimizer steps as `lm_step` does; the loss, and the norm that is clipped to 0.5."""
    optimizer.zero_grad()
    loss = -torch.cat([chosen(model(torch.tensor([tokens])).logits[0], tokens, start) for tokens in sequences]).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.5)
    optimizer.step()
    return loss.item(), float(norm)


def require_close(policy: MegatronPolicy, theirs: Mapping[str, Tensor], *, atol: float) -> None:
    """Fail, with its name, at a weight that differs."""
    for name, tensor in policy.weights():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def save(policy: MegatronPolicy, directory: Path) -> Path:
    """The policy as a model directory, with the tokenizer of another model."""
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "config.json").write_text('{"of": "another model"}')
    policy.save_hf(directory / "model", tokenizer)
    return directory / "model"


def same_weights(one: MegatronPolicy, other: MegatronPolicy) -> bool:
    """True if all weights are equal to the last bit, those of MTP layers too."""
    both = zip((*one.weights(), *one.mtp_weights()), (*other.weights(), *other.mtp_weights()), strict=True)
    return all(name == twin and torch.equal(a, b) for (name, a), (twin, b) in both)


def flip(file: Path) -> None:
    """Change one bit of the last byte."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
