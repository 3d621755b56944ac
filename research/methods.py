"""Speculation methods beside autoregressive decoding, on one policy: `python -m research.methods --run RUN`.

Policy and prompts are those of a finished run. Lookup methods need nothing more; a small draft model is trained on the
policy's answers as in `pretrain_draft`; the EAGLE-3 draft is the run's own. Every draft length is timed in turn with
k = 0, as in `tune_draft_length`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.runs import FinishedRun, open_run
from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts import length
from slipstream.drafts.config import DraftConfig, NgramConfig
from slipstream.drafts.methods import DraftMethod, Training
from slipstream.recipe import Recipe
from slipstream.records.stages import SweepPoint
from slipstream.stages.pretrain_draft import train_on
from slipstream.stages.recipe_engines import recipe_engine
from slipstream.workers.placement.plan import table
from slipstream.workers.session import connect


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=list(DraftMethod), default=[DraftMethod.NGRAM])
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 3, 5])
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 48])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--lookup", nargs=2, type=int, metavar=("MIN", "MAX"), default=[2, 5])
    parser.add_argument("--draft-steps", type=int, default=None)
    options = parser.parse_args(arguments)
    run = open_run(options.run)
    connect()
    print(run.described())
    for name in options.methods:
        draft = _config(run.recipe.draft, DraftMethod(name), options.lookup, options.draft_steps)
        tuning = replace(
            run.recipe.tuning,
            candidate_ks=(0, *options.ks),
            batch_sizes=tuple(options.batches),
            num_repeats=options.repeats,
            max_live_engines=len(options.ks) + 1,
        )
        measure(run, replace(run.recipe, draft=draft, tuning=tuning))


def _config(draft: DraftConfig, method: DraftMethod, lookup: Sequence[int], steps: int | None) -> DraftConfig:
    shortest, longest = lookup
    ngram = NgramConfig(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    found = replace(draft, method=method, ngram=ngram)
    return found if steps is None else replace(found, pretrain=replace(draft.pretrain, num_steps=steps))


def measure(run: FinishedRun, recipe: Recipe) -> None:
    """Train the draft if the method needs it, then time every draft length at every batch size."""
    sets = read_prompt_sets(run.data)
    with tempfile.TemporaryDirectory() as directory:
        draft = run.draft
        if recipe.draft.trains is Training.RESPONSES:
            draft = Path(directory)
            record = train_on(
                sets.draft_in_domain, recipe, policy=run.policy, directory=draft, on_step=lambda step, loss: None
            )
            print(
                f"{recipe.draft.method.value}: {record.num_parameters:,} parameters, {record.num_steps} steps, last "
                f"loss {record.losses[-1]:.3f}, held-out acceptance length {record.heldout_mean_acceptance_length:.2f} "
                f"at k={recipe.draft.pretrain.ttt_steps}, {record.elapsed_s:.0f} s with the policy's answers"
            )
        found = length.sweep(
            partial(recipe_engine, recipe, run.policy, draft),
            sets.train,
            config=recipe.tuning,
            sampling=recipe.sampling,
            seed=recipe.grpo.seed,
            group_size=recipe.grpo.group_size,
        )
    print(f"\n{recipe.draft.method.value}\n{table([_HEADER, *map(_row, found.points)])}", flush=True)


_HEADER = ["k", "batch", "s", "speedup", "acceptance length", "tokens a response"]


def _row(point: SweepPoint) -> list[str]:
    return [
        str(point.k),
        str(point.batch),
        f"{point.generation_s:.2f} ({point.generation_p10_s:.2f}-{point.generation_p90_s:.2f})",
        f"{point.speedup:.2f}",
        f"{point.mean_acceptance_length:.2f}",
        f"{point.mean_response_tokens:.0f}",
    ]


if __name__ == "__main__":
    main()
