"""The learner on any single GPU, beside stages 1 and 5 of gpu-check (`test_gpu_check.py`)."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from slipstream.grpo.config import LossConfig, OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.learner.config import LearnerConfig, LoraConfig, LoraTarget, Packing, Recompute, ScratchConfig
from slipstream.learner.config import ShapeConfig as Shape
from slipstream.learner.megatron import MegatronPolicy
from slipstream.types import Dtype, TrainBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 8192
SMALL = Shape(hidden_size=256, num_layers=4, num_attention_heads=4, head_dim=64, ffn_hidden_size=512)
LARGER = Shape(hidden_size=1024, num_layers=8, num_attention_heads=16, head_dim=64, ffn_hidden_size=3072)
_WIDE = Shape(hidden_size=4096, num_layers=1, num_attention_heads=32, num_query_groups=8, head_dim=128)
OF_8B = dataclasses.replace(_WIDE, ffn_hidden_size=12288, init_std=0.02)
LEARNER = LearnerConfig(max_tokens_per_microbatch=2048, dtype=Dtype.BFLOAT16)
OPTIMIZER = OptimizerConfig(learning_rate=1e-4)
SEQUENCES = [np.random.default_rng(i).integers(0, VOCAB, 200 + 10 * i).tolist() for i in range(16)]
PROMPTS = [20] * 16


def _policy(learner: LearnerConfig = LEARNER, shape: Shape = SMALL) -> MegatronPolicy:
    scratch = ScratchConfig(shape=shape)
    return MegatronPolicy.from_scratch(scratch, vocab_size=VOCAB, eos_token_id=1, learner=learner, optimizer=OPTIMIZER)


def _update() -> Update:
    batch = TrainBatch(
        token_ids=SEQUENCES,
        prompt_lengths=PROMPTS,
        rollout_logprobs=[[-9.0] * (len(tokens) - 20) for tokens in SEQUENCES],
        advantages=np.linspace(-1.0, 1.0, 16).tolist(),
        policy_version=0,
    )
    return Update(batch=batch, trainer_logprobs=None, ref_logprobs=None, loss=LossConfig(), temperature=1.0)


def test_logprobs_equal_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    policy = _policy(dataclasses.replace(LEARNER, dtype=Dtype.FLOAT32))
    policy.save_hf(tmp_path / "model", tmp_path / "tokenizer")
    theirs: Any = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs.cuda()
    for tokens, found in zip(SEQUENCES, policy.logprobs(SEQUENCES, PROMPTS, 1.0), strict=True):
        with torch.no_grad():
            logprobs = torch.log_softmax(theirs(torch.tensor([tokens]).cuda()).logits[0], -1)
        expected = logprobs[range(19, len(tokens) - 1), tokens[20:]].cpu().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)  # TF32 may be on


def test_adapters_move_the_merged_targets_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    _policy().save_hf(tmp_path / "model", tmp_path / "tokenizer")
    lora = LoraConfig(targets=(LoraTarget.QUERY, LoraTarget.UP, LoraTarget.DOWN))
    optimizer = OptimizerConfig(learning_rate=1e-2)
    policy = MegatronPolicy.load(tmp_path / "model", learner=LEARNER, optimizer=optimizer, lora=lora)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    for _ in range(2):
        assert policy.train_step(_update()).stats.grad_norm > 0
    for name, tensor in policy.weights():
        assert torch.equal(tensor, before[name]) is not any(f".{t.value}." in name for t in lora.targets), name


@pytest.mark.parametrize(
    "changed", [{"logprob_chunk_tokens": 256}, {"recompute": Recompute.SELECTIVE}, {"recompute": Recompute.FULL}]
)
def test_an_update_that_takes_less_memory_is_the_same_update(changed: dict[str, Any]) -> None:
    found = []
    for learner in (LEARNER, dataclasses.replace(LEARNER, **changed)):
        policy = _policy(learner)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stats = policy.train_step(_update()).stats
        found.append((stats, torch.cuda.max_memory_allocated() - before))
    (whole, whole_bytes), (lean, lean_bytes) = found
    assert dataclasses.asdict(lean) == pytest.approx(dataclasses.asdict(whole), rel=2e-2, abs=1e-4)
    assert lean_bytes < whole_bytes


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs transformer_engine")
def test_the_layers_are_transformer_engines_where_it_is_installed() -> None:
    kinds = {type(module).__module__.partition(".")[0] for module in _policy()._gpt.decoder.modules()}
    assert "transformer_engine" in kinds


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ALWAYS])
def test_a_layer_of_8b_shapes_updates_in_bfloat16_as_in_float32(packing: Packing) -> None:
    found = []
    for dtype, how in ((Dtype.FLOAT32, Packing.NEVER), (Dtype.BFLOAT16, packing)):
        learner = dataclasses.replace(LEARNER, dtype=dtype, packing=how, logprob_chunk_tokens=512)
        policy = _policy(learner, OF_8B)
        stats = policy.train_step(_update()).stats
        found.append([stats.loss, stats.grad_norm, stats.entropy])
        del policy
        torch.cuda.empty_cache()
    assert found[1] == pytest.approx(found[0], rel=3e-2, abs=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
def test_a_resting_learner_gives_its_memory_to_others_and_gets_it_back_to_the_last_bit(
    dtype: Dtype, is_distributed: bool
) -> None:
    """What is free is read from the driver, over all processes: what torch keeps for itself does not count."""
    learner = dataclasses.replace(LEARNER, dtype=dtype, distributed_optimizer=is_distributed)
    policy, short = _policy(learner, LARGER), [tokens[:100] for tokens in SEQUENCES[:4]]
    policy.lm_step(short, [0] * 4)
    torch.cuda.empty_cache()
    before, free = _numbers(policy), torch.cuda.mem_get_info()[0]

    num_bytes = policy.offload()

    assert num_bytes >= 12 * policy.architecture.num_parameters()  # gradients and two moments
    assert torch.cuda.mem_get_info()[0] - free >= 0.95 * num_bytes
    policy.logprobs(short, [1] * 4, 1.0)  # by its weights, which it has
    policy._memory.onload()
    assert all(torch.equal(one, other) for one, other in zip(_numbers(policy), before, strict=True))
    policy.lm_step(short, [0] * 4)


def _numbers(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Weights, masters and moments, on the host."""
    held = policy._checkpoints._held
    stepped = [each.stepped for each in held if each.stepped is not None]
    moments = [each.optimizer.state[each.main][name] for each in stepped for name in each.moments]
    return [
        each.detach().cpu().clone() for each in [*(h.parameter for h in held), *(s.main for s in stepped), *moments]
    ]
