"""Choose the draft length by measured time."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts import length
from slipstream.recipe import Recipe
from slipstream.records import SweepPoint, write_record
from slipstream.stages.context import RunContext
from slipstream.stages.support import recipe_engine, settled, tracked
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)


def tune_draft_length(context: RunContext, recipe: Recipe, *, policy: Path, data: Path, draft: Path) -> Path:
    """Measure generation time over draft length and batch, choose by time; a directory with tuning.json."""
    from slipstream.drafts.checks import check_draft
    from slipstream.report.figures import sweep as sweep_figure

    recipe = settled(context, recipe)
    directory = context.directory("tune_draft_length")
    check_draft(policy, draft / "draft", max_model_len=recipe.engine.max_model_len)

    def on_point(point: SweepPoint) -> None:
        logger.info(
            "tune_draft_length: k=%d batch %d: %.2f s, %.2fx, AL %.2f",
            point.k,
            point.batch,
            point.generation_s,
            point.speedup,
            point.mean_acceptance_length,
        )

    connect()
    with tracked(context, recipe, "tune_draft_length") as tracker:
        points = length.sweep(
            partial(recipe_engine, recipe, policy, draft),
            read_prompt_sets(data).train,
            config=recipe.tuning,
            sampling=recipe.sampling,
            seed=recipe.grpo.seed,
            group_size=recipe.grpo.group_size,
            on_point=on_point,
        )
        record = length.choose(
            points, config=recipe.tuning, batch=recipe.grpo.prompts_per_step * recipe.grpo.group_size
        )
        tracker.log_artifact(write_record(record, directory / "tuning.json"))
        figure = directory / "sweep.svg"
        figure.write_text(sweep_figure(record.points, record.chosen_k))
        tracker.log_artifact(figure)
        tracker.set_tags({"k": str(record.chosen_k)})
        for point in points:
            tracker.log({f"sweep/speedup_batch_{point.batch}": point.speedup}, point.k)
    logger.info("tune_draft_length: %s", record.reason)
    return directory
