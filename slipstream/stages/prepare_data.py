"""Load, filter and tokenize the prompt sets, and check that they suffice."""

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
    """Load, filter and tokenize the four prompt sets; a directory with them, their manifest and the tokenizer.

    This comes before the policy, so that minutes of its training are not lost to prompts that do not suffice.

    Args:
        policy: a model directory whose tokenizer is taken; None takes that of the recipe's policy.
        trains_draft: False where no draft will be: then its prompts need not suffice.
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
