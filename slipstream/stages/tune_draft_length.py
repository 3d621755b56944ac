"""Choose the draft length by measured generation time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Semaphore

from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts import length
from slipstream.drafts.methods import DraftSampling
from slipstream.engine.config import SamplingConfig
from slipstream.logs import progress
from slipstream.recipe import Recipe
from slipstream.records.files import write_record
from slipstream.records.stages import SweepPoint, TuningRecord
from slipstream.stages.context import RunContext
from slipstream.stages.recipe_engines import (
    drafts_by_batch,
    fitting_weights,
    sampled,
    started,
    swept_engine,
    switch_length,
)
from slipstream.stages.runs import tracked
from slipstream.stages.store import finished
from slipstream.stages.support import settled, versions
from slipstream.workers.calls import Worker, machines
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)

_NODE = "tune_draft_length"
_LINE = "tune_draft_length: k=%d batch %d: %.2f s, %.2fx, AL %.2f"


def tune_draft_length(context: RunContext, recipe: Recipe, *, policy: Path, data: Path, draft: Path) -> Path:
    """Measure generation time by draft length and batch, and choose by time; return a directory with tuning.json.

    With `draft.sampling: auto` the lengths are those of probabilistic drafts, and greedy ones are compared with them at
    the chosen k.
    """
    from slipstream.report.figures import sweep as sweep_figure

    if done := finished(context, _NODE, "tuning.json"):
        return done
    recipe = settled(context, recipe)
    directory = context.directory(_NODE)
    fitting_weights(recipe, policy, draft)
    connect()
    with tracked(context, recipe, _NODE) as tracker:
        timed: set[Worker] = set()
        is_auto = recipe.draft.sampling is DraftSampling.AUTO
        tuned = sampled(recipe, DraftSampling.PROBABILISTIC) if is_auto else recipe
        swept = _sweep(tuned, policy=policy, data=data, draft=draft, timed=timed)
        batch = recipe.grpo.prompts_per_step * recipe.grpo.group_size
        record = length.choose(swept.points, config=recipe.tuning, batch=batch, rounds=swept.rounds)
        record = replace(record, sampling=tuned.draft.sampling.value, machine=machines(timed), versions=versions())
        if is_auto and record.chosen_k:
            record = _compared(tuned, record, policy=policy, data=data, draft=draft)
        figure = directory / "sweep.svg"
        figure.write_text(sweep_figure(record.points, record.chosen_k))
        tracker.log_artifact(figure)
        tracker.log_artifact(write_record(record, directory / "tuning.json"))
        tracker.set_tags({"k": str(record.chosen_k), "draft.sampling": record.sampling})
        for point in swept.points:
            tracker.log({f"sweep/speedup_batch_{point.batch}": point.speedup}, point.k)
        tracker.log({"sweep/schedule_gain": record.schedule_gain})
    logger.info("tune_draft_length: %s", record.reason)
    gain = f"a generation takes 1/{record.schedule_gain:.3f} of what k={record.chosen_k} throughout takes"
    logger.info("tune_draft_length: by running batch: %s; %s", length.described(record.schedule), gain)
    return directory


def first_speedup(points: Sequence[SweepPoint]) -> str:
    """Sentence about the best of the first measured points: the first measured speedup of a run."""
    best = max(points, key=lambda point: point.speedup)
    return (
        f"first measured speedup: k={best.k} generates {best.speedup:.2f}x as fast as autoregressive at batch "
        f"{best.batch} ({best.autoregressive_s:.2f} -> {best.generation_s:.2f} s, median of {best.num_repeats})"
    )


def _sweep(recipe: Recipe, *, policy: Path, data: Path, draft: Path, timed: set[Worker]) -> length.Sweep:
    """Run `length.sweep` with a progress bar, log points and first speedup, and add the workers to `timed`."""
    is_first = True
    starting = Semaphore(recipe.layout.num_starting)
    ks = ", ".join(map(str, recipe.tuning.candidate_ks))
    logger.info("tune_draft_length: comparing k = %s; the engines start first", ks)
    total = (len(recipe.tuning.candidate_ks) - 1) * len(recipe.tuning.batch_sizes)
    with progress(_NODE, total=total, unit="point") as bar:

        @contextmanager
        def start(k: int) -> Iterator[RemoteEngine]:
            with started(swept_engine(recipe, policy, draft, k), starting) as engine:
                timed.update(engine.workers)
                yield engine

        def on_points(points: Sequence[SweepPoint]) -> None:
            nonlocal is_first
            for point in points:
                logger.info(
                    _LINE, point.k, point.batch, point.generation_s, point.speedup, point.mean_acceptance_length
                )
            if is_first:
                logger.info("tune_draft_length: %s", first_speedup(points))
            is_first = False
            bar.advance(len(points))

        return length.sweep(
            start,
            read_prompt_sets(data).train,
            config=recipe.tuning,
            sampling=_sampling(recipe),
            seed=recipe.grpo.seed,
            group_size=recipe.grpo.group_size,
            switch=switch_length if drafts_by_batch(recipe) else None,
            on_points=on_points,
        )


def _compared(recipe: Recipe, record: TuningRecord, *, policy: Path, data: Path, draft: Path) -> TuningRecord:
    starting = Semaphore(recipe.layout.num_starting)
    logger.info("tune_draft_length: comparing probabilistic and greedy drafts of k=%d", record.chosen_k)

    def start(kind: DraftSampling) -> AbstractContextManager[RemoteEngine]:
        return started(swept_engine(sampled(recipe, kind), policy, draft, record.chosen_k), starting)

    points = length.compare(
        start,
        read_prompt_sets(data).train,
        config=recipe.tuning,
        sampling=_sampling(recipe),
        seed=recipe.grpo.seed,
        batch=recipe.grpo.prompts_per_step * recipe.grpo.group_size,
        group_size=recipe.grpo.group_size,
    )
    return length.with_faster_drafts(record, points)


def _sampling(recipe: Recipe) -> SamplingConfig:
    """Sampling of responses, which tuning may cut off earlier than training does."""
    if recipe.tuning.max_response_tokens is None:
        return recipe.sampling
    longest = min(recipe.tuning.max_response_tokens, recipe.sampling.max_response_tokens)
    return replace(recipe.sampling, max_response_tokens=longest)
