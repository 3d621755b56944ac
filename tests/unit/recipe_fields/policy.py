"""Probes of the policy, and of how it is pretrained."""

import itertools
import typing
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from slipstream.data.tokenizer import write_tokenizer
from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture
from slipstream.learner.config import LearnerConfig
from slipstream.learner.layers import _transformer_config, build_model
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.optimizer import Training
from slipstream.learner.policy_source import pretrain, resolve
from slipstream.recipe import Recipe
from slipstream.stages import prepare_policy, support
from tests.unit.recipe_fields.base import Check, Tools, checks


def own_architecture(recipe: Recipe, _: Tools) -> Architecture:
    scratch = recipe.policy.scratch
    assert scratch is not None
    return Architecture.from_scratch(scratch, vocab_size=64, eos_token_id=3)


def model_config(recipe: Recipe, tools: Tools) -> object:
    """What Megatron is told of the model, and what transformers and vLLM read of it."""
    architecture = own_architecture(recipe, tools)
    config = _transformer_config(architecture, recipe.learner)
    split = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
        config.sequence_parallel,
    )
    return architecture.to_hf(recipe.learner.dtype), architecture.num_parameters(), split, config.params_dtype


def extended_positions(recipe: Recipe, tools: Tools) -> object:
    """What transformers and vLLM read of the angles that learner, engine and draft take from a policy's directory."""
    return own_architecture(recipe, tools).extended(recipe.policy.rope).positions_to_hf()


def dealt_experts(recipe: Recipe, _: Tools) -> object:
    """What Megatron is told of a mixture's experts."""
    config = _transformer_config(Architecture.from_hf(Path(recipe.policy.model)), recipe.learner)
    return config.num_moe_experts, config.expert_model_parallel_size


def own_policy(recipe: Recipe) -> MegatronPolicy:
    scratch = recipe.policy.scratch
    assert scratch is not None
    return MegatronPolicy.from_scratch(
        scratch, vocab_size=64, eos_token_id=3, learner=recipe.learner, optimizer=recipe.grpo.optimizer
    )


def first_weights(recipe: Recipe, _: Tools) -> object:
    return [float(tensor.double().abs().sum()) for _, tensor in own_policy(recipe).weights()]


def first_learning_rate(recipe: Recipe, _: Tools) -> float:
    return own_policy(recipe).learning_rate


def megatron_optimizer(recipe: Recipe, tools: Tools) -> object:
    """Megatron's optimizer: its kind, its settings, and its parameters' group."""
    parallel.initialize(LearnerConfig().parallel)
    gpt = build_model(own_architecture(recipe, tools), recipe.learner, parallel.current_shard())
    optimizer = Training(gpt, recipe.learner, recipe.grpo.optimizer).optimizer
    names = ("lr", "betas", "eps", "weight_decay")
    groups = [{name: group.get(name) for name in names} for group in optimizer.param_groups]
    split = optimizer.config.use_distributed_optimizer
    return groups, optimizer.config.clip_grad, len(optimizer.param_groups), split


def held_logits(recipe: Recipe, _: Tools) -> list[int]:
    """Of how many tokens logits are held at once, of a response of 20."""
    seen: list[int] = []

    def function(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        seen.append(len(logits_NV))
        return logits_NV[:, :1]

    own_policy(recipe).map_logits([tuple([5] * 21)], [1], function, width=1)
    return seen


def recomputed(recipe: Recipe, tools: Tools) -> object:
    config = _transformer_config(own_architecture(recipe, tools), recipe.learner)
    return config.recompute_granularity


def microbatches(recipe: Recipe, _: Tools) -> int:
    """How many micro-batches 40 sequences of 200 tokens are cut into."""
    return len(own_policy(recipe)._microbatches([tuple([5] * 200)] * 40, [1] * 40))


def rows(recipe: Recipe, _: Tools) -> list[int]:
    """How many rows the micro-batches of three sequences have."""
    return [len(batch.labels_BT) for batch in own_policy(recipe)._microbatches([tuple([5] * 20)] * 3, [1] * 3)]


def pretraining_steps(recipe: Recipe, _: Tools) -> object:
    calls: list[Any] = []

    def lm_step(
        sequences: Sequence[Sequence[int]], loss_starts: Sequence[int], *, learning_rate: float | None
    ) -> float:
        calls.append((len(sequences), learning_rate))
        return 0.0

    assert recipe.policy.scratch is not None
    pretrain(typing.cast(Any, lm_step), itertools.repeat(((1, 2, 3, 4), 0)), recipe.policy.scratch)
    return calls


def own_training(recipe: Recipe, tools: Tools) -> object:
    """What the stage hands to the learner that trains the recipe's own policy, and the chats that it learns."""
    seen: list[Any] = []
    learner = SimpleNamespace(
        create=lambda scratch, size, eos, optimizer: seen.append(optimizer) or 7,
        lm_step=lambda sequences, starts, learning_rate: seen.append(sequences) or 0.0,
        save_hf=lambda directory, tokenizer: None,
    )
    tools.patch.setattr(prepare_policy, "connect", lambda: None)
    tools.patch.setattr(prepare_policy, "start_learner", lambda config, layout: nullcontext(learner))
    write_tokenizer(tools.directory / "tokenizer", max_length=256)
    prepare_policy.train_from_scratch(
        recipe, tools.directory / "policy", tokenizer_dir=tools.directory / "tokenizer", log=lambda metrics, step: None
    )
    return seen


def which_policy(recipe: Recipe, _: Tools) -> object:
    return resolve(recipe.policy, support.policy_needs(recipe), Path("nowhere"))


OPTIMIZER = {"method": "muon", "betas": [0.5, 0.9], "weight_decay": 0.5, "clip_grad": 1e-9}
MIXTURE = {"policy.model": str(Path(__file__).parent / "mixture"), "policy.scratch": None, "learner.parallel.data": 2}
TWO_GROUPS = {"policy.scratch.shape.num_query_groups": 2}  # one for each of two ranks
TWO_RANKS = {"learner.parallel.tensor": 2, **TWO_GROUPS}
YARN = {"policy.rope.type": "yarn", "policy.rope.factor": 4.0}
LLAMA3 = YARN | {"policy.rope.type": "llama3", "policy.rope.low_freq_factor": 1.0, "policy.rope.high_freq_factor": 4.0}
SCALES = YARN | {"policy.rope.mscale": 2.0, "policy.rope.mscale_all_dim": 1.0}
SCALINGS = {
    **dict.fromkeys(("type", "factor", "original_max_position_embeddings"), YARN),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "truncate"), YARN),
    **dict.fromkeys(("mscale", "mscale_all_dim"), SCALES),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), LLAMA3),
}
OTHER = {"type": "linear", "original_max_position_embeddings": 256, "truncate": False, "beta_slow": 0.5}
CHECKS = {
    **{f"policy.rope.{name}": Check(OTHER.get(name, 3.0), extended_positions, also) for name, also in SCALINGS.items()},
    "workload": Check("rl_think", own_training),
    "policy.model": Check("./nowhere", which_policy),
    **checks(
        "policy.scratch.shape", model_config, hidden_size=32, num_layers=4, num_attention_heads=4, num_query_groups=2
    ),
    **checks("policy.scratch.shape", model_config, head_dim=16, ffn_hidden_size=32),
    **checks("policy.scratch", model_config, num_mtp_layers=1, max_position_embeddings=1024, tie_word_embeddings=True),
    "policy.scratch.shape.init_std": Check(0.1, first_weights),
    "policy.scratch.seed": Check(1, first_weights),
    **checks("policy.scratch", pretraining_steps, num_steps=5, tokens_per_step=9),
    **checks("policy.scratch.optimizer", pretraining_steps, learning_rate=0.5, warmup_steps=1),
    **{f"policy.scratch.optimizer.{name}": Check(value, own_training) for name, value in OPTIMIZER.items()},
    "learner.max_tokens_per_microbatch": Check(512, microbatches),
    "learner.packing": Check("always", rows),
    "learner.logprob_chunk_tokens": Check(8, held_logits),
    "learner.recompute": Check("full", recomputed),
    "learner.distributed_optimizer": Check(True, megatron_optimizer),
    "learner.dtype": Check("bfloat16", model_config),
    **checks("learner.parallel", model_config, TWO_GROUPS, tensor=2, context=2),
    "learner.parallel.pipeline": Check(3, model_config),
    "learner.parallel.expert": Check(2, dealt_experts, MIXTURE),
    "learner.parallel.sequence_parallel": Check(True, model_config, TWO_RANKS),
    "grpo.optimizer.warmup_steps": Check(10, first_learning_rate),
}
