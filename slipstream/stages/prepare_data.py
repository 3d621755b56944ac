"""Load, filter and tokenize the prompt sets, and check their sizes."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.data.prompts import read_prompt_sets, write_prompt_sets
from slipstream.learner.policy_source import write_policy_tokenizer
from slipstream.recipe import Recipe
from slipstream.stages.context import RunContext
from slipstream.stages.runs import tracked
from slipstream.stages.store import data_key, kept, publish
from slipstream.stages.support import policy_needs, recipe_prompt_sets, require_prompts, tokenizer

logger = logging.getLogger(__name__)


def prepare_data(context: RunContext, recipe: Recipe, *, policy: Path | None = None, trains_draft: bool = True) -> Path:
    """Load, filter and tokenize the four prompt sets; return a directory with them, their manifest and the tokenizer.

    This stage precedes the policy's, so that a prompt set that is too small fails before minutes of training.

    Args:
        policy: model directory whose tokenizer is used; None: the recipe's policy has it.
        trains_draft: False where no draft is trained, so that its prompts need not suffice.
    """
    key = data_key(recipe, policy=policy)
    done = kept(context, recipe, "prepare_data", key)
    if done is not None:
        require_prompts(recipe, read_prompt_sets(done), trains_draft=trains_draft)
        return done
    directory = context.directory("prepare_data")
    with tracked(context, recipe, "prepare_data") as tracker:
        if policy is None:
            write_policy_tokenizer(recipe.policy, policy_needs(recipe), directory / "tokenizer")
        else:
            tokenizer(policy).save_pretrained(directory / "tokenizer")
        words = tokenizer(directory / "tokenizer")
        sets = recipe_prompt_sets(recipe, words, directory / "sources", trains_draft=trains_draft)
        write_prompt_sets(sets, directory)
        tracker.log_artifact(directory / "manifest.json")
        for record in sets.records:
            logger.info("prepare_data: %s read %d, kept %d", record.name, record.num_read, record.num_kept)
    return publish(context, "prepare_data", key)
