"""The policy's MTP layer behind the methods of a draft, in the learner's process and on disk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import ConfigError
from slipstream.data.tokenizer import write_tokenizer
from slipstream.drafts.compatibility import require_fit
from slipstream.drafts.learner_draft import Chats, MtpDraft
from slipstream.drafts.methods import DraftMethod
from slipstream.grpo.config import OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.learner.architecture import QWEN3
from slipstream.learner.config import PolicyConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.policy_source import Needs, write_policy_tokenizer
from slipstream.ragged import Ragged
from slipstream.types import Dtype
from slipstream.workers.learner_process import LearnerProcess
from tests.small import draft_with
from tests.unit.learner import mimo
from tests.unit.learner.policies import LEARNER, update_of

CONFIG = draft_with(
    method=DraftMethod.MTP,
    pretrain={"ttt_steps": 2, "num_steps": 20, "optimizer": {"warmup_steps": 2, "learning_rate": 5e-3}},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return mimo.write_model(tmp_path / "policy")


def _process(path: Path, optimizer: OptimizerConfig | None = None) -> LearnerProcess:
    process = LearnerProcess(LEARNER, rank=0, world_size=1)
    process.load(path, optimizer)
    return process


def _update(process: LearnerProcess, *, trains_draft: bool = True) -> Update:
    given = update_of(process._loaded, mimo.sequences())
    return dataclasses.replace(given, trainer_logprobs=None, trains_draft=trains_draft)


def _draft(path: Path) -> MtpDraft:
    policy = MegatronPolicy.load(path, learner=LEARNER, optimizer=None)
    return MtpDraft(policy, CONFIG, tokenizer_dir=path, writes=True, is_online=False)


def test_pretraining_teaches_the_layer_and_saves_it_as_a_draft_that_fits(path: Path, tmp_path: Path) -> None:
    process = _process(path)
    sequences, starts = Ragged.of(mimo.sequences(16), np.int64), [2] * 16
    assert process.start_draft(path, CONFIG) == sum(
        tensor.numel() for name, tensor in mimo.random_weights().items() if "mtp_layers" in name
    )
    assert process.hold_draft_chats((range(16), sequences, starts), CONFIG)
    before = process.evaluate_draft((sequences, starts), 1.0)
    losses = [process.draft_step(range(16), 1.0) for _ in range(20)]
    after = process.evaluate_draft((sequences, starts), 1.0)
    assert losses[-1] < losses[0]
    assert after.mean_acceptance_length > before.mean_acceptance_length + 0.1
    assert len(after.rate_by_position) == 2
    process.save_draft(tmp_path / "draft")
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    assert all(name.startswith("model.mtp_layers.0.") for name in saved)
    assert dict(process._drafting.weights()).keys() == saved.keys()
    require_fit(CONFIG, path, tmp_path / "draft", max_model_len=32)
    require_fit(CONFIG, path, path, max_model_len=32)


def test_a_step_with_the_layer_is_the_policys_own_to_the_last_bit(path: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-3)
    alone, both = _process(path, optimizer), _process(path, optimizer)
    both.continue_draft(path, path, CONFIG, Dtype.FLOAT32)
    for _ in range(2):
        expected = alone.train_step(_update(alone, trains_draft=False))
        trained = both.train_step(_update(both))
        assert trained.stats == expected.stats
        assert trained.draft is not None and trained.draft.loss > 0.0
        assert trained.draft.num_updates == CONFIG.online.updates
    weights = [dict(process._loaded.weights()) for process in (alone, both)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not any(torch.equal(tensor, mimo.random_weights()[name]) for name, tensor in both._drafting.weights())


def test_a_resumed_run_goes_on_with_policy_and_layer_bit_for_bit(path: Path, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-3)
    straight, resumed = _process(path, optimizer), _process(path, optimizer)
    for process in (straight, resumed):
        process.continue_draft(path, path, CONFIG, Dtype.FLOAT32)
    straight.train_step(_update(straight))
    straight.save_checkpoint(tmp_path / "checkpoint", {})
    straight.finish_checkpoint()
    resumed.load_checkpoint(tmp_path / "checkpoint")
    for process in (straight, resumed):
        process.train_step(_update(process))
    for name in ("weights", "mtp_weights"):
        one, other = (dict(getattr(process._loaded, name)()) for process in (straight, resumed))
        assert all(torch.equal(one[each], other[each]) for each in one)


def test_a_resumed_pretraining_goes_on_bit_for_bit(path: Path, tmp_path: Path) -> None:
    sequences = mimo.sequences()
    draft, resumed = _draft(path), _draft(path)
    chats = Chats(sequences, [2] * 9, draft._policy.hidden_states(sequences, draft._policy.architecture.mtp_layer_ids))
    draft.step(chats)
    draft.save_checkpoint(tmp_path / "step-1")
    expected = [draft.step(chats) for _ in range(2)]
    resumed.load_checkpoint(tmp_path / "step-1")
    assert [resumed.step(chats) for _ in range(2)] == expected


def test_a_layer_of_another_policy_or_of_none_is_refused(path: Path, tmp_path: Path) -> None:
    other = mimo.write_model(tmp_path / "other", dataclasses.replace(mimo.ARCH, ffn_hidden_size=32))
    with pytest.raises(ConfigError, match=r"same tensors of the same shapes, got \"?3 others"):
        require_fit(CONFIG, path, other, max_model_len=32)
    save_file({"model.norm.weight": torch.ones(4)}, other / "model.safetensors")
    with pytest.raises(ConfigError, match=r"draft\.method mtp needs a policy with an MTP layer"):
        require_fit(CONFIG, other, path, max_model_len=32)


def test_a_policy_of_a_hub_that_cannot_draft_with_itself_is_refused_by_its_config(tmp_path: Path) -> None:
    plain = dataclasses.replace(mimo.ARCH, family=QWEN3, num_mtp_layers=0)
    model = tmp_path / "model"
    write_tokenizer(model, max_length=64)
    (model / "config.json").write_text(json.dumps(plain.to_hf(Dtype.FLOAT32)))
    given, needs = PolicyConfig(model=str(model)), Needs(max_model_len=64, draft_layer_ids=(), mtp=True)
    with pytest.raises(ConfigError, match=r"policy\.model must have an MTP layer to draft with, got 'Qwen3ForCausalLM"):
        write_policy_tokenizer(given, needs, tmp_path / "out")
    (model / "config.json").write_text(json.dumps(mimo.ARCH.to_hf(Dtype.FLOAT32)))
    write_policy_tokenizer(given, needs, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
