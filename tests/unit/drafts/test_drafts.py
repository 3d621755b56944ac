"""Drafts: alignment and held-out acceptance worked by hand, exact resume, and every misfit refused."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import ConfigError
from slipstream.drafts.compatibility import check_draft
from slipstream.drafts.passes import pack_chats
from slipstream.drafts.trainer import DraftTrainer
from slipstream.learner.errors import CheckpointError
from slipstream.ragged import Ragged
from slipstream.types import Dtype
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS


def test_chats_are_shifted_within_themselves() -> None:
    def one(offset: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        aux = torch.arange(offset, offset + length).float()[:, None]
        return aux, aux + 100

    packed = pack_chats([[10, 11, 12, 13], [20, 21, 22]], [1, 1], [one(0, 4), one(50, 3)])
    assert packed.input_ids.tolist() == [[11, 12, 13, 21, 22]]
    assert packed.hidden_states[0, :, 0].tolist() == [0, 1, 2, 50, 51]
    assert packed.last[0, :, 0].tolist() == [101, 102, 103, 151, 152]
    assert packed.position_ids.tolist() == [[1, 2, 3, 1, 2]]
    assert packed.document_ids.tolist() == [[0, 0, 0, 1, 1]]
    # The state of a chat's last token predicts a token that was never sampled.
    assert packed.loss_mask.tolist() == [[True, True, False, True, False]]


def test_what_the_draft_learns_from_is_the_policys_own_distribution(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    from transformers import Qwen3ForCausalLM

    head = DraftTrainer(policy, CONFIG)._model
    logits = Qwen3ForCausalLM.from_pretrained(policy)(torch.tensor([CHATS[0]])).logits[0]
    torch.testing.assert_close(head.verifier_lm_head(head.verifier_norm(states[0][1])), logits)


def test_training_lowers_the_loss_and_raises_held_out_acceptance(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    trainer = DraftTrainer(policy, CONFIG)
    _, before = trainer.evaluate(CHATS, PROMPTS, states)
    losses = [trainer.step(CHATS, PROMPTS, states) for _ in range(30)]
    rates, after = trainer.evaluate(CHATS, PROMPTS, states)
    assert losses[-1] < 0.5 * losses[0]
    assert 1.0 <= before < after <= 1.0 + CONFIG.ttt_steps
    assert len(rates) == CONFIG.ttt_steps


def test_rows_do_not_change_the_loss(policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    from dataclasses import replace

    together = DraftTrainer(policy, CONFIG).step(CHATS, PROMPTS, states)
    apart = DraftTrainer(policy, replace(CONFIG, tokens_per_row=12)).step(CHATS, PROMPTS, states)
    assert apart == pytest.approx(together, rel=0.05)


def test_a_resumed_draft_training_equals_an_uninterrupted_one(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]], tmp_path: Path
) -> None:
    whole = DraftTrainer(policy, CONFIG)
    losses = [whole.step(CHATS, PROMPTS, states) for _ in range(6)]
    killed = DraftTrainer(policy, CONFIG)
    for _ in range(3):
        killed.step(CHATS, PROMPTS, states)
    killed.save_checkpoint(tmp_path / "checkpoint")
    resumed = DraftTrainer(policy, CONFIG)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert [resumed.step(CHATS, PROMPTS, states) for _ in range(3)] == losses[3:]


def test_a_damaged_checkpoint_of_a_draft_is_refused(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]], tmp_path: Path
) -> None:
    trainer = DraftTrainer(policy, CONFIG)
    trainer.step(CHATS, PROMPTS, states)
    trainer.save_checkpoint(tmp_path / "draft" / "step-1")
    file = tmp_path / "draft" / "step-1" / "draft.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"step-1 is damaged: .*; remove {tmp_path / 'draft'} to train"):
        trainer.load_checkpoint(tmp_path / "draft" / "step-1")


def test_a_saved_draft_fits_its_policy_and_shares_nothing_with_it(policy: Path, draft: Path) -> None:
    check_draft(policy, draft, max_model_len=64)
    assert "embed_tokens.weight" not in load_file(draft / "model.safetensors")


def _edit_config(draft: Path, **changes: object) -> None:
    path = draft / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        section = config if name in config else config["transformer_layer_config"]
        section[name] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, r"draft hidden_size must equal the policy's 32, got 64"),
        ({"vocab_size": 32}, r"draft vocab_size must equal the policy's 16, got 32"),
        ({"draft_vocab_size": 8}, r"draft lm_head.weight must be \[draft_vocab_size 8, 32\], got \(16, 32\)"),
        ({"max_position_embeddings": 32}, r"draft max_position_embeddings must be >= engine.max_model_len 64, got 32"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, r"aux_hidden_state_layer_ids must be different layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}, r"must be different layers in \[0, 2\], got \[0, 1, 5\]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, r"draft fc.weight must be \[32, 2 aux layers x 32\]"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    policy: Path, draft: Path, changes: dict[str, object], message: str
) -> None:
    _edit_config(draft, **changes)
    with pytest.raises(ConfigError, match=message):
        check_draft(policy, draft, max_model_len=64)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), r"missing \['norm.weight'\]"),
        (lambda tensors: tensors.update(surprise=torch.zeros(1)), r"extra \['surprise'\]"),
    ],
)
def test_a_draft_with_a_missing_or_an_extra_tensor_is_refused(policy: Path, draft: Path, edit, message: str) -> None:
    tensors = load_file(draft / "model.safetensors")
    edit(tensors)
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        check_draft(policy, draft, max_model_len=64)


def test_a_draft_with_the_policys_head_is_refused(policy: Path, draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"] = load_file(policy / "model.safetensors")["lm_head.weight"]
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(ConfigError, match=r"draft lm_head.weight must differ from the policy's"):
        check_draft(policy, draft, max_model_len=64)


def test_a_policy_is_no_draft(policy: Path, draft: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be an EAGLE-3 draft"):
        check_draft(policy, policy, max_model_len=64)
    shutil.rmtree(draft)
    with pytest.raises(ConfigError, match=r"draft must be a model directory with a config.json"):
        check_draft(policy, draft, max_model_len=64)


def test_training_the_draft_beside_the_policy_changes_no_bit_of_the_policys_update(policy: Path, draft: Path) -> None:
    """A real draft loss on the hidden states of the policy's own forward pass, with and without."""
    from slipstream.grpo.config import LossConfig, OptimizerConfig
    from slipstream.grpo.update import Update
    from slipstream.learner.config import LearnerConfig
    from slipstream.types import TrainBatch
    from slipstream.workers.learner_process import LearnerProcess

    batch = TrainBatch(
        token_ids=tuple(map(tuple, CHATS)),
        prompt_lengths=tuple(PROMPTS),
        rollout_logprobs=tuple((-1.0,) * (len(chat) - start) for chat, start in zip(CHATS, PROMPTS, strict=True)),
        advantages=(1.0, -1.0),
        policy_version=0,
    )
    optimizer = OptimizerConfig(learning_rate=1e-3, clip_grad=0.01)  # clips: a shared norm would show
    alone, beside = (LearnerProcess(LearnerConfig(max_tokens_per_microbatch=16)) for _ in range(2))
    for learner in (alone, beside):
        learner.load(policy, optimizer)
    beside.continue_draft(draft, policy, CONFIG, Dtype.FLOAT32)
    trainer = beside._drafting
    assert isinstance(trainer, DraftTrainer)
    before = {name: tensor.clone() for name, tensor in trainer._model.state_dict().items()}
    for _ in range(3):
        update = Update(
            batch=batch,
            trainer_logprobs=alone.logprobs(batch, 1.0),
            ref_logprobs=None,
            loss=LossConfig(),
            temperature=1.0,
        )
        expected = alone.train_step(update)
        found = beside.train_step(replace(update, trains_draft=True))
        assert (found.stats, found.own_logprobs) == (expected.stats, expected.own_logprobs)
        assert found.draft is not None
        assert found.draft.loss > 0
        assert expected.stats.grad_norm > optimizer.clip_grad
    for (name, one), (_, other) in zip(alone._loaded.weights(), beside._loaded.weights(), strict=True):
        assert torch.equal(one, other), name
    after = trainer._model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before), "the draft must have learned"


def test_two_trainers_with_a_chat_each_make_the_update_of_one_with_both(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    config = replace(CONFIG, tokens_per_row=12)  # each chat has a row of its own, here as there
    trainers = [DraftTrainer(policy, config) for _ in range(3)]
    for trainer in trainers[1:]:
        trainer._model.load_state_dict(trainers[0]._model.state_dict())
    handed: list[torch.Tensor] = [torch.empty(0)] * 2
    meeting = Barrier(2)

    def sum_over_ranks(rank: int, tensor: torch.Tensor) -> torch.Tensor:
        handed[rank] = tensor
        meeting.wait(60)
        total = handed[0] + handed[1]
        meeting.wait(60)
        return total

    def steps(rank: int) -> list[float]:
        own, reduce = slice(rank, rank + 1), partial(sum_over_ranks, rank)
        trainers[1 + rank]._sum_over_ranks = reduce
        return [trainers[1 + rank].step(CHATS[own], PROMPTS[own], states[own]) for _ in range(2)]

    expected = [trainers[0].step(CHATS, PROMPTS, states) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(steps, (0, 1)))
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    one, *others = ([p.detach() for p in trainer._trained] for trainer in trainers)
    for other in others:
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-5)


def test_a_negative_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft.states_cache_gib must be >= 0, got -1.0"):
        replace(CONFIG, states_cache_gib=-1.0)


def test_hidden_states_captured_once_train_the_draft_as_those_of_each_step_do(policy: Path) -> None:
    from slipstream.learner.config import LearnerConfig
    from slipstream.workers.learner_process import LearnerProcess

    losses = []
    for gib in (1.0, 0.0):
        config = replace(CONFIG, states_cache_gib=gib)
        learner = LearnerProcess(LearnerConfig(max_tokens_per_microbatch=16))
        learner.load(policy, None)
        learner.start_draft(policy, config)
        chats = Ragged.of(CHATS, np.int32)
        assert learner.hold_draft_chats((range(2), chats, PROMPTS), config) is (gib > 0.0)
        losses.append([learner.draft_step(indices, config, 1.0) for indices in ([0, 1], [1], [0])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _with_maps(draft: Path, ids: list[int], marked: list[int]) -> None:
    """Make it a draft of the policy's ids `ids`, of which `t2d` marks `marked`."""
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][: len(ids)].contiguous()
    tensors["d2t"] = torch.tensor([target - index for index, target in enumerate(ids)])
    tensors["t2d"] = torch.tensor([index in marked for index in range(16)])
    save_file(tensors, draft / "model.safetensors")
    _edit_config(draft, draft_vocab_size=len(ids))


def test_a_draft_of_part_of_the_vocabulary_fits(policy: Path, draft: Path) -> None:
    _with_maps(draft, [2, 3, 9, 15], [2, 3, 9, 15])
    check_draft(policy, draft, max_model_len=64)


@pytest.mark.parametrize(
    ("ids", "marked", "message"),
    [
        ([2, 3, 9, 16], [2, 3, 9], r"draft d2t must lead to policy ids in \[0, 16\), got \[16\]"),
        ([2, 3, 3, 9], [2, 3, 9], r"draft d2t must lead to different policy ids, got '1 repeated'"),
        ([2, 3, 9, 15], [2, 3, 9, 14], r"draft t2d must mark exactly the policy ids that d2t leads to, got '2 ids"),
    ],
)
def test_a_draft_with_a_wrong_vocabulary_map_is_refused(
    policy: Path, draft: Path, ids: list[int], marked: list[int], message: str
) -> None:
    _with_maps(draft, ids, marked)
    with pytest.raises(ConfigError, match=message):
        check_draft(policy, draft, max_model_len=64)
