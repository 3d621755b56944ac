"""A small model as draft: refused by what does not fit, linked, or taught by responses; its acceptance by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config import ConfigError
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.methods import DraftMethod
from slipstream.drafts.pretrain import (
    completed_losses,
    heldout_acceptance,
    link_draft_model,
    require_windows,
    response_update,
    scratch_model,
    train_draft,
)
from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.config import ScratchConfig
from slipstream.learner.policy_source import learning_rate_at
from tests.small import draft_with
from tests.unit.drafts.small import model


def test_a_model_that_is_not_there_is_refused_by_the_field_that_names_it(tmp_path: Path) -> None:
    config = DraftConfig(method=DraftMethod.DRAFT_MODEL, model=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"draft.model must be a local directory or a reachable hub id, got '.*nowh"):
        link_draft_model(config, model(tmp_path / "policy"), tmp_path / "draft", max_model_len=512)


def test_links_are_laid_anew_by_a_retry_and_parameters_counted(tmp_path: Path) -> None:
    policy, given, draft = model(tmp_path / "policy"), model(tmp_path / "given"), tmp_path / "draft"
    config = DraftConfig(method=DraftMethod.DRAFT_MODEL, model=str(given))
    for _ in range(2):
        assert link_draft_model(config, policy, draft, max_model_len=512) == 6
    assert {path.name for path in draft.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_small_model_has_the_policys_vocabulary_and_positions_and_the_drafts_training(tmp_path: Path) -> None:
    config = draft_with(
        method=DraftMethod.DRAFT_MODEL,
        pretrain={"num_steps": 10},
        draft_model={"optimizer": {"warmup_steps": 20, "learning_rate": 0.1}},
        seed=4,
    )
    scratch, vocab_size, eos = scratch_model(config, model(tmp_path / "policy", eos_token_id=[5, 6]))
    assert (vocab_size, eos) == (64, 5)
    assert (scratch.shape.hidden_size, scratch.shape.num_layers, scratch.max_position_embeddings) == (64, 2, 512)
    assert (scratch.num_steps, scratch.optimizer.warmup_steps, scratch.seed) == (10, 10, 4)
    assert (scratch.optimizer.learning_rate, scratch.optimizer.method) == (0.1, OptimizerMethod.MUON)


CONFIG = draft_with(
    method=DraftMethod.DRAFT_MODEL, pretrain={"num_steps": 5, "tokens_per_step": 6, "checkpoint_every_steps": 2}
)
SCRATCH = ScratchConfig(
    optimizer=OptimizerConfig(method=OptimizerMethod.MUON, learning_rate=0.1, warmup_steps=2), num_steps=5
)
TRAIN = Chats(((1, 2, 3), (4, 5, 6), (7, 8, 9)), (1, 2, 1))


class Learner:
    """Notes its updates; its loss counts them, checkpoints included."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.count = 0

    def lm_step(
        self, sequences: Sequence[Sequence[int]], loss_starts: Sequence[int], *, learning_rate: float | None = None
    ) -> float:
        self.steps.append((tuple(sequences), tuple(loss_starts), learning_rate))
        self.count += 1
        return float(self.count)

    def save(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "state").write_text(str(self.count))

    def load(self, path: Path) -> None:
        if (path / "damaged").exists():
            raise CheckpointError(f"{path.name} is damaged")
        self.count = int((path / "state").read_text())


def taught(learner: Learner, checkpoint: Path, **how: Any) -> list[float]:
    how = {"save": learner.save, "load": learner.load, "on_step": lambda step, loss: None, **how}
    update = response_update(learner.lm_step, TRAIN, SCRATCH)
    return train_draft(TRAIN, CONFIG, update=update, checkpoint=checkpoint, **how)


def test_each_update_learns_responses_alone_at_the_rate_of_its_step(tmp_path: Path) -> None:
    learner, told = Learner(), []
    losses = taught(learner, tmp_path, on_step=lambda step, loss: told.append((step, loss)))
    assert losses == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert told == list(enumerate(losses))
    starts = dict(zip(TRAIN.token_ids, TRAIN.prompt_lengths, strict=True))
    for step, (sequences, loss_starts, rate) in enumerate(learner.steps):
        assert len(set(sequences)) == 2  # two chats of three tokens fill six
        assert loss_starts == tuple(starts[tokens] for tokens in sequences)
        assert rate == learning_rate_at(step, SCRATCH)


def test_a_resumed_training_makes_the_updates_that_were_left(tmp_path: Path) -> None:
    class Killed(Learner):
        def lm_step(self, *arguments: Any, **more: Any) -> float:
            if self.count == 4:
                raise KeyboardInterrupt
            return super().lm_step(*arguments, **more)

    whole, killed, resumed = Learner(), Killed(), Learner()
    losses = taught(whole, tmp_path / "a")
    assert completed_losses(tmp_path / "b") == []
    with pytest.raises(KeyboardInterrupt):
        taught(killed, tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["losses.json", "step-4"]
    assert completed_losses(tmp_path / "b") == losses[:4]
    again = taught(resumed, tmp_path / "b")
    assert again == losses
    assert resumed.steps == whole.steps[4:]


def test_a_draft_is_not_trained_anew_over_a_damaged_checkpoint_and_no_states_are_computed(tmp_path: Path) -> None:
    (tmp_path / "losses.json").write_text("[1.0, 2.0, 3.0, 4.0]")
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "damaged").touch()
    with pytest.raises(CheckpointError, match=f"step-4 is damaged; remove {tmp_path} to train the draft anew"):
        taught(Learner(), tmp_path, hold=pytest.fail)
    shutil.rmtree(tmp_path / "step-4")
    with pytest.raises(CheckpointError, match=r"state'; remove .* to train the draft anew"):
        taught(Learner(), tmp_path)


def logs(*probabilities: float) -> np.ndarray:
    return np.log(np.asarray(probabilities, dtype=np.float32))


def test_held_out_acceptance_is_the_mean_ratio_and_of_a_window_the_product() -> None:
    # After the first token the ratios are 1/2, 1 (the draft is surer than the policy) and 1/4: windows (1/2, 1) and
    # (1, 1/4). The second response is too short for a window of two.
    policy = [logs(0.9, 0.8, 0.5, 0.4), logs(0.5, 0.5)]
    draft = [logs(0.1, 0.4, 0.6, 0.1), logs(0.5, 0.1)]
    found = heldout_acceptance(policy, draft, num_tokens=2)
    assert found.rate_by_position == pytest.approx((0.75, 0.625))
    assert found.mean_acceptance_length == pytest.approx(1 + (0.5 + 0.5 + 1 + 0.25) / 2)


def test_held_out_responses_too_short_for_a_window_are_refused(refusal: Callable[..., str]) -> None:
    short = Chats(((1, 5, 6), (1, 2, 5, 6)), (1, 2))
    require_windows(short, num_tokens=1)
    assert refusal(require_windows, heldout=short, num_tokens=2) == (
        "draft.pretrain.ttt_steps must leave a held-out response of more than 2 tokens, got 2; lower it"
    )
