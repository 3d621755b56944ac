"""A small model taught on the real learner: resumed to the bit, and one that its policy's engine may load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.drafts.compatibility import check_draft_model
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.methods import DraftMethod
from slipstream.drafts.pretrain import num_parameters, response_update, scratch_model, train_draft
from slipstream.learner.config import LearnerConfig
from slipstream.workers.learners import RemoteLearner, start_learner
from tests.small import draft_with

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 32, "num_attention_heads": 1, "ffn_hidden_size": 48}
CONFIG = draft_with(
    method=DraftMethod.DRAFT_MODEL,
    pretrain={"num_steps": 6, "tokens_per_step": 32, "checkpoint_every_steps": 2},
    draft_model={"shape": SHAPE, "optimizer": {"warmup_steps": 2, "learning_rate": 1e-2}},
)
CHATS = tuple(tuple(4 + (start + 5 * step) % 50 for step in range(12)) for start in range(8))
TRAIN = Chats(CHATS, (3,) * len(CHATS))


class KilledError(RuntimeError):
    """Where an attempt ends."""


def test_a_resumed_training_equals_an_uninterrupted_one_and_fits_its_policy(
    tmp_path: Path, policy: Path, ray_session: None
) -> None:
    scratch, vocab_size, eos = scratch_model(CONFIG, policy)

    def teach(learner: RemoteLearner, name: str, *, end: int = CONFIG.pretrain.num_steps) -> list[float]:
        def on_step(step: int, loss: float) -> None:
            if step == end:
                raise KilledError

        def save(path: Path) -> None:
            learner.save_checkpoint(path, {})
            learner.finish_checkpoint()

        learner.create(scratch, vocab_size, eos, scratch.optimizer)
        how = {"save": save, "load": learner.load_checkpoint, "checkpoint": tmp_path / f"{name}-checkpoint"}
        update = response_update(learner.lm_step, TRAIN, scratch)
        return train_draft(TRAIN, CONFIG, update=update, on_step=on_step, **how)

    with start_learner(LearnerConfig(num_threads=1)) as learner:
        whole = teach(learner, "whole")
        learner.save_hf(tmp_path / "whole", policy)
        with pytest.raises(KilledError):
            teach(learner, "killed", end=4)
        assert teach(learner, "killed") == whole
        learner.save_hf(tmp_path / "resumed", policy)
    assert whole[-1] < whole[0]
    tensors = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    check_draft_model(policy, tmp_path / "resumed", max_model_len=512)
    # A layer: 32 x (2*32 + 2*32 + 3*48), norms 2*32 + 2*32; two tables of 64 x 32; the final norm.
    assert num_parameters(tmp_path / "resumed") == 2 * (32 * 272 + 128) + 2 * 64 * 32 + 32
