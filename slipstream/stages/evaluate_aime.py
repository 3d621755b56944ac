"""Measure the accuracy of one policy on the validation problems."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream import evaluation
from slipstream.data.prompts import read_prompt_sets
from slipstream.recipe import Recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.steps import ArmRecord
from slipstream.rewards.function import open_reward
from slipstream.stages.context import RunContext
from slipstream.stages.runs import tracked
from slipstream.stages.store import finished
from slipstream.stages.support import decode, settled, tokenizer
from slipstream.train.metrics import accuracy_metrics
from slipstream.workers.engines import start_engine
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)

START = "start"
"""Name of the policy before RL."""


def trained_name(directory: Path) -> str:
    """Name of an arm's trained policy, from the directory with its arm.json."""
    return read_record(ArmRecord, directory / "arm.json").name


def evaluate_aime(context: RunContext, recipe: Recipe, policy: str, *, data: Path, model: Path) -> Path:
    """Measure the accuracy of the policy in `model`, named `policy`; return a directory with evaluation.json."""
    node = f"evaluate_aime_{policy}"
    if done := finished(context, node, "evaluation.json"):
        return done
    recipe = settled(context, recipe)
    directory = context.directory(node)
    prompts, config = read_prompt_sets(data).validation, recipe.evaluation
    sizes = len(prompts), config.num_samples_per_problem, config.sampling.max_response_tokens
    logger.info("%s: %d problems, %d samples each and up to %d tokens long, in one call", node, *sizes)
    connect()
    with tracked(context, recipe, node, {"policy": policy}) as tracker:
        with (
            start_engine(model, config=recipe.engine, layout=recipe.layout) as engine,
            open_reward(recipe.reward) as reward,
        ):
            record = evaluation.evaluate(
                engine,
                prompts,
                reward=reward,
                decode=decode(tokenizer(model)),
                config=config,
                policy=policy,
                seed=recipe.grpo.seed,
            )
        tracker.log(accuracy_metrics(record))
        write_record(record, directory / "evaluation.json")
    logger.info("evaluate_aime: %s avg@%d %.3f", policy, record.k, record.avg_at_k)
    return directory
