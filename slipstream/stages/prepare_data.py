"""Load, filter and tokenize the prompt sets."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.data.prompts import load_prompt_sets, write_prompt_sets
from slipstream.recipe import Recipe
from slipstream.rewards import Verifier
from slipstream.stages.context import RunContext
from slipstream.stages.support import tokenizer, tracked

logger = logging.getLogger(__name__)


def prepare_data(context: RunContext, recipe: Recipe, policy: Path) -> Path:
    """Load, filter and tokenize the four prompt sets; a directory with them and their manifest."""
    directory = context.directory("prepare_data")
    with tracked(context, recipe, "prepare_data") as tracker, Verifier(recipe.reward) as verifier:
        sets = load_prompt_sets(
            recipe.data, tokenizer=tokenizer(policy), parseable=verifier.parseable, directory=directory / "sources"
        )
        write_prompt_sets(sets, directory)
        tracker.log_artifact(directory / "manifest.json")
        for record in sets.records:
            logger.info("prepare_data: %s read %d, kept %d", record.name, record.num_read, record.num_kept)
    return directory
