"""Stages of `slipstream gpu-check` that train without an engine: the policy's update and its checkpoint, and a draft.

See `check_stages` for the setting that every stage gets.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.gpu_check.check_stages import VOCAB, Setting, apart, random_policy, sequences_update
from slipstream.grpo.config import OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.learner.config import LearnerConfig, Packing, Recompute, ScratchConfig, ShapeConfig
from slipstream.ragged import Ragged
from slipstream.types import Dtype

if TYPE_CHECKING:
    from slipstream.workers.learner_process import LearnerProcess

_OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
_RELATIVE = 3e-2  # bfloat16 beside float32, a loss or a norm


def learner(at: Setting) -> None:
    """One update in every arrangement, beside float32 on the CPU; then a checkpoint that resumes to the bit."""
    expected = apart(at, partial(_stats, at.learner(dtype=Dtype.FLOAT32, packing=Packing.NEVER)), on_cpu=True)
    arrangements: dict[str, dict[str, Any]] = {
        "padded": {"packing": Packing.NEVER},
        "packed": {"packing": Packing.ALWAYS},
        "chunked": {"logprob_chunk_tokens": 64},
        "selective": {"recompute": Recompute.SELECTIVE},
        "full": {"recompute": Recompute.FULL},
    }
    for name, changed in arrangements.items():
        found = _stats(at.learner(**changed))
        for figure, value in expected.items():
            error = abs(found[figure] - value) / max(abs(value), 0.1)
            at.figures[f"{name}_{figure}_error"] = error
            require(error <= _RELATIVE, f"{figure}, {name}", f"must lie within {_RELATIVE} of {value}", found[figure])
    _resume(at)


def _policy(config: LearnerConfig, seed: int = 0) -> Any:
    from slipstream.learner.megatron import MegatronPolicy

    shape = ShapeConfig(
        hidden_size=128, num_layers=4, num_attention_heads=4, num_query_groups=2, head_dim=64, ffn_hidden_size=256
    )
    scratch = ScratchConfig(shape=shape, seed=seed)
    return MegatronPolicy.from_scratch(scratch, vocab_size=512, eos_token_id=1, learner=config, optimizer=_OPTIMIZER)


def _update() -> Update:
    sequences = [np.random.default_rng(i).integers(0, 512, 60 + 10 * i).tolist() for i in range(8)]
    return sequences_update(sequences, vocab_size=512)


def _stats(config: LearnerConfig) -> dict[str, float]:
    """Loss, norm and entropy of an update of the small policy."""
    stats = _policy(config).train_step(_update()).stats
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "entropy": stats.entropy or 0.0}


def _resume(at: Setting) -> None:
    policy, resumed = _policy(at.learner()), _policy(at.learner(), seed=1)
    policy.train_step(_update())
    policy.save_checkpoint(at.work / "checkpoint", {"step": 1})
    policy.finish_checkpoint()
    resumed.load_checkpoint(at.work / "checkpoint")
    require(_equal_fraction(policy, resumed) == 1.0, "a loaded checkpoint", "must hold the saved bits", "others")
    for each in (policy, resumed):
        each.train_step(_update())
    # Attention's gradient on a GPU adds in any order, so that two equal updates may differ in the last bit.
    found, least = _equal_fraction(policy, resumed), 1.0 if at.is_dry else 0.98
    at.figures["equal_weights_fraction_after_resume"] = found
    require(found >= least, "weights after a resumed update", f"must be equal in {least:.0%}", found)


def _equal_fraction(one: Any, other: Any) -> float:
    equal, num = 0, 0
    for (_, ours), (_, theirs) in zip(one.weights(), other.weights(), strict=True):
        equal, num = equal + int((ours == theirs).sum()), num + ours.numel()
    return equal / num


def draft(at: Setting) -> None:
    """Twenty updates of a draft: the loss falls, and begins as on the CPU."""
    policy = random_policy(at.work / "policy", 0)
    expected = apart(at, partial(_draft_losses, policy, at.learner(dtype=Dtype.FLOAT32), 5), on_cpu=True)
    start_s = time.perf_counter()
    losses = _draft_losses(policy, at.learner(), 20)
    at.figures["seconds"] = round(time.perf_counter() - start_s, 1)
    at.figures["first_loss"], at.figures["last_loss"] = losses[0], losses[-1]
    errors = [abs(ours - theirs) / theirs for ours, theirs in zip(losses, expected, strict=False)]
    at.figures["largest_error"] = max(errors)
    require(max(errors) <= _RELATIVE, "the draft's first losses", f"must lie within {_RELATIVE} of {expected}", losses)
    require(losses[-1] < 0.9 * losses[0], "the draft's loss", "must fall by a tenth in 20 updates", losses)


def _draft_losses(policy: Path, config: LearnerConfig, num_steps: int) -> list[float]:
    chats = random_sequences(32, 64, VOCAB)
    optimizer = OptimizerConfig(learning_rate=5e-3, warmup_steps=2)
    settings = DraftConfig(pretrain=replace(DraftConfig().pretrain, optimizer=optimizer))
    process = draft_learner(policy, config, settings, chats)
    return [process.draft_step(range(32), 1.0) for _ in range(num_steps)]


def draft_learner(
    policy: Path,
    config: LearnerConfig,
    settings: DraftConfig,
    chats: Sequence[Sequence[int]],
    token_ids: Sequence[int] | None = None,
) -> LearnerProcess:
    """Load a policy, and a fresh draft of a vocabulary of `token_ids` with chats to learn from."""
    from slipstream.workers.learner_process import LearnerProcess

    process = LearnerProcess(config)
    process.load(policy, None)
    process.start_draft(policy, settings, token_ids=token_ids)
    process.hold_draft_chats((range(len(chats)), Ragged.of(chats, np.int32), [8] * len(chats)), settings)
    return process


def random_sequences(num: int, length: int, vocab_size: int) -> list[list[int]]:
    """Draw the tokens of sequences, the same ones each time."""
    return np.random.default_rng(0).integers(4, vocab_size, (num, length)).tolist()
