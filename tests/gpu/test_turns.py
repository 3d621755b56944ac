"""Learner and engine that have a GPU's memory in turn, on a real one: any single GPU. Not run so far: none was at hand.
Steps of both in turn are stage 7 of gpu-check (`test_gpu_check.py`).

What is free is read from the driver, over all processes: memory that torch or vLLM keeps for itself does not count.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.grpo.config import OptimizerConfig
from slipstream.learner.config import LearnerConfig, ScratchConfig, ShapeConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.refit.config import WeightFiles
from slipstream.refit.fingerprint import ALL
from slipstream.types import Dtype
from tests.gpu.ends import SAMPLING, learner_and_engine
from tests.small import PROMPTS, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 8192
SCRATCH = ScratchConfig(
    shape=ShapeConfig(hidden_size=1024, num_layers=8, num_attention_heads=16, head_dim=64, ffn_hidden_size=3072)
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-4)
SEQUENCES = [np.random.default_rng(i).integers(0, VOCAB, 100).tolist() for i in range(4)]


def _free() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
def test_a_resting_learner_gives_its_memory_to_others_and_gets_it_back_to_the_last_bit(
    dtype: Dtype, is_distributed: bool
) -> None:
    learner = LearnerConfig(max_tokens_per_microbatch=1024, dtype=dtype, distributed_optimizer=is_distributed)
    policy = MegatronPolicy.from_scratch(
        SCRATCH, vocab_size=VOCAB, eos_token_id=1, learner=learner, optimizer=OPTIMIZER
    )
    policy.lm_step(SEQUENCES, [0] * 4)
    torch.cuda.empty_cache()
    before, free = _numbers(policy), _free()

    num_bytes = policy.offload()

    assert num_bytes >= 12 * policy.architecture.num_parameters()  # gradients and two moments
    assert _free() - free >= 0.95 * num_bytes
    policy.logprobs(SEQUENCES, [1] * 4, 1.0)  # by its weights, which it has
    policy._memory.onload()
    assert all(torch.equal(one, other) for one, other in zip(_numbers(policy), before, strict=True))
    policy.lm_step(SEQUENCES, [0] * 4)


def _numbers(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Weights, masters and moments, on the host."""
    held = policy._checkpoints._held
    stepped = [each.stepped for each in held if each.stepped is not None]
    moments = [each.optimizer.state[each.main][name] for each in stepped for name in each.moments]
    return [
        each.detach().cpu().clone() for each in [*(h.parameter for h in held), *(s.main for s in stepped), *moments]
    ]


def test_an_engine_without_its_cache_is_refitted_and_then_generates(models: dict[str, Path], ray_session: None) -> None:
    with learner_and_engine(models, can_sleep=True) as (_, engines):
        before = engines.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)
        free = _free()

        engines.sleep()

        total = torch.cuda.mem_get_info()[1]
        assert _free() - free > 0.2 * total  # of the 0.3 that it has, nearly all is cache
        engines.refit(WeightFiles(policy=models["new"], policy_version=1))
        (new,) = engines.start_fingerprints(is_draft=False, turn=ALL)()
        engines.token_logprobs([PROMPTS[0].token_ids])
        assert _free() - free > 0.2 * total  # it took its cache for that, and gave it back
        changed = engines.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)
        assert abs(_free() - free) < 0.02 * total
        assert tokens(changed) != tokens(before)
        engines.sleep()
        engines.refit(WeightFiles(policy=models["old"], policy_version=2))
        assert engines.start_fingerprints(is_draft=False, turn=ALL)() != [new]
        assert tokens(engines.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)) == tokens(before)
