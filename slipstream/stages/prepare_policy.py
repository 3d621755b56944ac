"""Resolve the policy, or train the recipe's own from random weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.data.prompts import render
from slipstream.data.synthetic import pretraining_corpus
from slipstream.recipe import Recipe
from slipstream.records import write_record
from slipstream.stages.context import RunContext
from slipstream.stages.support import settled, tracked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 25


def prepare_policy(context: RunContext, recipe: Recipe) -> Path:
    """Resolve and check the policy, or train the recipe's own from random weights; a directory in HF format."""
    from slipstream.policy.prepare import resolve, train_from_scratch

    recipe = settled(context, recipe)
    directory = context.directory("prepare_policy") / "policy"
    with tracked(context, recipe, "prepare_policy") as tracker:

        def on_step(step: int, loss: float) -> None:
            tracker.log({"pretrain/loss": loss}, step)
            if step % _LOG_EVERY_STEPS == 0:
                logger.info("prepare_policy: step %d, loss %.3f", step, loss)

        if recipe.policy.scratch is None:
            record = resolve(recipe, directory)
        else:
            record = train_from_scratch(recipe, directory, documents=partial(_documents, recipe), on_step=on_step)
        write_record(record, directory / "policy.json")
        tracker.log_params({"num_parameters": record.num_parameters, "model": record.model})
        tracker.log({"time/prepare_policy_s": record.elapsed_s})
    logger.info(
        "prepare_policy: %s, %.1f M parameters, %.0f s",
        record.architecture,
        record.num_parameters / 1e6,
        record.elapsed_s,
    )
    return directory


def _documents(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], int]]:
    """Chats of the synthetic corpus; only the responses are learned."""
    corpus = pretraining_corpus(recipe.data.synthetic, workload=recipe.workload, seed=recipe.data.seed)
    for example in corpus:
        prompt = list(render(example.problem, tokenizer=tokenizer, instruction=recipe.data.instruction))
        response = tokenizer.encode(example.response, add_special_tokens=False)
        assert isinstance(tokenizer.eos_token_id, int)
        yield [*prompt, *response, tokenizer.eos_token_id], len(prompt)
