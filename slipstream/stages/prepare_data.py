"""Load, filter and tokenize the prompt sets, check their sizes, and show them before a run."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import numpy as np

from slipstream.data.prompts import REASONS, PromptSets, read_prompt_sets, write_prompt_sets
from slipstream.learner.policy_source import write_policy_tokenizer
from slipstream.recipe import Recipe
from slipstream.stages.context import RunContext
from slipstream.stages.runs import tracked
from slipstream.stages.store import data_key, kept, publish
from slipstream.stages.support import policy_needs, recipe_prompt_sets, require_prompts, tokenizer, usable_prompts
from slipstream.workers.placement.plan import table

logger = logging.getLogger(__name__)


def prepare_data(context: RunContext, recipe: Recipe, *, policy: Path | None = None, trains_draft: bool = True) -> Path:
    """Load, filter and tokenize the four prompt sets; return a directory with them, their manifest and the tokenizer.

    This stage precedes the policy's, so that a prompt set that is too small fails before minutes of training.

    Args:
        policy: model directory whose tokenizer is used; None: the recipe's policy has it.
        trains_draft: False where no draft is trained, so that its prompts need not suffice.
    """
    key = data_key(recipe, policy=policy)
    if done := kept(context, recipe, "prepare_data", key):
        require_prompts(recipe, read_prompt_sets(done), trains_draft=trains_draft)
        return done
    directory = context.directory("prepare_data")
    with tracked(context, recipe, "prepare_data") as tracker:
        if policy is None:
            write_policy_tokenizer(recipe.policy, policy_needs(recipe), directory / "tokenizer")
        else:
            tokenizer(policy).save_pretrained(directory / "tokenizer")
        words = tokenizer(directory / "tokenizer")
        sets = recipe_prompt_sets(recipe, words, trains_draft=trains_draft)
        write_prompt_sets(sets, directory)
        tracker.log_artifact(directory / "manifest.json")
        for record in sets.records:
            logger.info("prepare_data: %s read %d, kept %d", record.name, record.num_read, record.num_kept)
    return publish(context, "prepare_data", key)


def shown_data(recipe: Recipe) -> str:
    """Render the first ten training prompts as the policy reads them, the lengths of all sets, and what was dropped."""
    with tempfile.TemporaryDirectory() as directory:
        write_policy_tokenizer(recipe.policy, policy_needs(recipe), Path(directory) / "tokenizer")
        words = tokenizer(Path(directory) / "tokenizer")
        sets = usable_prompts(recipe, words)
    texts = []
    for prompt in sets.train[:10]:
        of = f", data source {prompt.data_source}" if prompt.data_source else ""
        head = f"prompt {prompt.id}, {len(prompt.token_ids)} tokens, answer {prompt.answer!r}{of}"
        texts.append(f"{head}\n{words.decode(list(prompt.token_ids))}")
    return "\n\n".join([*texts, table(_lengths(sets)), table(_sources(sets))])


def _lengths(sets: PromptSets) -> list[list[str]]:
    """Rows of a table: the tokens of each set's prompts by percentile."""
    percentiles = (10, 50, 90, 99, 100)
    rows = [["set", "prompts", *(f"p{each} tokens" if each < 100 else "longest" for each in percentiles)]]
    for split, size in sets.sizes().items():
        lengths = [len(prompt.token_ids) for prompt in getattr(sets, split)]
        found = np.percentile(lengths, percentiles, method="inverted_cdf")
        rows.append([split, str(size), *(str(int(each)) for each in found)])
    return rows


def _sources(sets: PromptSets) -> list[list[str]]:
    """Rows of a table: what was read and kept of each source, and why the rest was dropped."""
    rows = [["set", "source", "rows", "kept", "dropped"]]
    for record in sets.records:
        reasons = [f"{num} {reason}" for name, reason in REASONS.items() if (num := getattr(record, name))]
        counts = [str(record.num_read), str(record.num_kept)]
        rows.append([record.name, record.source, *counts, ", ".join(reasons) or "none"])
    return rows
