"""Resolve the policy, or train the recipe's own from random weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.data.prompts import render
from slipstream.data.synthetic import pretraining_corpus
from slipstream.grpo.config import OptimizerConfig
from slipstream.policy.config import SCRATCH
from slipstream.policy.pretrain import pretrain
from slipstream.policy.source import resolve
from slipstream.recipe import Recipe
from slipstream.records import PolicyRecord, write_record
from slipstream.stages.context import RunContext
from slipstream.stages.support import numerics, policy_needs, settled, tokenizer, tracked
from slipstream.workers.learners import start_learner
from slipstream.workers.session import connect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 25


def prepare_policy(context: RunContext, recipe: Recipe, *, data: Path) -> Path:
    """Resolve and check the policy, or train the recipe's own from random weights; a directory in HF format.

    Args:
        data: what `prepare_data` wrote: the recipe's own policy takes its tokenizer from there.
    """
    recipe_as_given, recipe = recipe, settled(context, recipe)
    directory = context.directory("prepare_policy") / "policy"
    with tracked(context, recipe, "prepare_policy") as tracker:

        def on_step(step: int, loss: float) -> None:
            tracker.log({"pretrain/loss": loss}, step)
            if step % _LOG_EVERY_STEPS == 0:
                logger.info("prepare_policy: step %d, loss %.3f", step, loss)

        if recipe.policy.scratch is None:
            record = resolve(recipe.policy, policy_needs(recipe), directory)
        else:
            record = train_from_scratch(recipe, directory, tokenizer_dir=data / "tokenizer", on_step=on_step)
        write_record(record, directory / "policy.json")
        measured = numerics(context, recipe_as_given)
        if measured is not None:
            tracker.log_params({"dtype": measured.dtype, "dtype_reason": measured.reason})
        tracker.log_params({"num_parameters": record.num_parameters, "model": record.model})
        tracker.log({"time/prepare_policy_s": record.elapsed_s})
    logger.info(
        "prepare_policy: %s, %.1f M parameters, %.0f s",
        record.architecture,
        record.num_parameters / 1e6,
        record.elapsed_s,
    )
    return directory


def train_from_scratch(
    recipe: Recipe, directory: Path, *, tokenizer_dir: Path, on_step: Callable[[int, float], None]
) -> PolicyRecord:
    """Train the recipe's own policy on its synthetic corpus and write it in HF format, with its tokenizer."""
    scratch = recipe.policy.scratch
    assert scratch is not None, "the recipe's own policy has an architecture"
    start = time.perf_counter()
    words = tokenizer(tokenizer_dir)
    assert isinstance(words.eos_token_id, int)
    connect()
    with start_learner(recipe.learner) as learner:
        num_parameters = learner.create(
            scratch,
            len(words),
            words.eos_token_id,
            OptimizerConfig(method=scratch.optimizer, learning_rate=scratch.learning_rate),
        )
        losses = pretrain(learner.lm_step, _documents(recipe, words), scratch, on_step)
        learner.save_hf(directory, tokenizer_dir)
    return PolicyRecord(
        model=SCRATCH,
        architecture="Qwen3ForCausalLM",
        num_parameters=num_parameters,
        vocab_size=len(words),
        max_position_embeddings=scratch.max_position_embeddings,
        eos_token_id=words.eos_token_id,
        pretrain_steps=scratch.num_steps,
        pretrain_loss=losses[-1] if losses else 0.0,
        pretrain_losses=tuple(losses),
        elapsed_s=time.perf_counter() - start,
    )


def _documents(recipe: Recipe, words: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], int]]:
    """Chats of the synthetic corpus; only the responses are learned."""
    corpus = pretraining_corpus(recipe.data.synthetic, workload=recipe.workload, seed=recipe.data.seed)
    for example in corpus:
        prompt = list(render(example.problem, tokenizer=words, instruction=recipe.data.instruction))
        response = words.encode(example.response, add_special_tokens=False)
        assert isinstance(words.eos_token_id, int)
        yield [*prompt, *response, words.eos_token_id], len(prompt)
