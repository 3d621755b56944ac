"""One seed of the learning benchmark in its own process: the chain's stages with a fixed draft length.

`python -m benchmarks.learning` starts this module with a core, a directory and the settings as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.study import SeedResult, Study, append
from slipstream import logs
from slipstream.config import from_mapping, merge
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord, EvaluationRecord
from slipstream.report.summary import summarise_arms
from slipstream.stages.context import RunContext
from slipstream.stages.evaluate_aime import evaluate_aime
from slipstream.stages.prepare_data import prepare_data
from slipstream.stages.prepare_policy import prepare_policy
from slipstream.stages.pretrain_draft import pretrain_draft
from slipstream.stages.start_run import start_run
from slipstream.stages.support import settled
from slipstream.stages.train_grpo import train_grpo
from slipstream.types import Arm, ArmLoop


def main() -> int:
    """Run the seed and append its line to the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.learning_seed")
    parser.add_argument("--study", required=True, help="as JSON")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--root", type=Path, required=True, help="run root of this seed alone")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    logs.configure()
    study = from_mapping(Study, json.loads(options.study), "study")
    append(run_seed(study, options.seed, options.root), options.output)
    return 0


def run_seed(study: Study, seed: int, root: Path) -> SeedResult:
    """Make policy, draft and both arms from `seed` alone."""
    start = time.perf_counter()
    context, resolved = start_run(
        study.recipe,
        root=root,
        execution=f"seed-{seed}-{datetime.now(tz=UTC):%Y%m%d-%H%M%S}",  # one that was interrupted starts afresh
        overrides=merge(study.overrides_of(seed), {"workload": study.workload.value}),
    )
    recipe = load_recipe(str(resolved))
    data = prepare_data(context, recipe)
    policy = prepare_policy(context, recipe, data=data)
    draft = pretrain_draft(context, recipe, policy=policy, data=data)
    tuning = fix_draft_length(context, study.k)
    loop = ArmLoop.SYNCHRONOUS if recipe.loop.is_synchronous else ArmLoop.ASYNCHRONOUS
    trained = train_grpo(context, recipe, list(Arm), policy=policy, data=data, draft=draft, tuning=tuning, loop=loop)
    arms = [with_whole_generation(read_record(ArmRecord, directory / "arm.json")) for directory in trained]
    evaluated = evaluate_aime(context, recipe, "start", data=data, model=policy) if study.evaluate else None
    return _result(
        study,
        settled(context, recipe),
        arms,
        evaluation=None if evaluated is None else read_record(EvaluationRecord, evaluated / "evaluation.json"),
        execution=resolved.parents[1],
        elapsed_s=time.perf_counter() - start,
    )


def with_whole_generation(arm: ArmRecord) -> ArmRecord:
    """Replace an asynchronous arm's exposed generation by the whole generation of its engines.

    Generation is spread evenly over the steps: the first step generates more than its own batch, and the last none.
    """
    overlaps = [step.overlap for step in arm.steps if step.overlap is not None]
    if not overlaps:
        return arm
    mean_s = sum(overlap.generation_s for overlap in overlaps) / len(arm.steps)
    steps = tuple(replace(step, times=replace(step.times, generation_s=mean_s)) for step in arm.steps)
    return replace(arm, steps=steps)


def fix_draft_length(context: RunContext, k: int) -> Path:
    """Write a tuning.json with a fixed k, in place of the sweep; returns its directory."""
    directory = context.directory("tune_draft_length")
    reason = f"k={k} was given to the learning benchmark, which runs no sweep"
    write_record(TuningRecord(chosen_k=k, reason=reason, points=(), schedule=()), directory / "tuning.json")
    return directory


def _result(
    study: Study,
    recipe: Recipe,
    arms: list[ArmRecord],
    *,
    evaluation: EvaluationRecord | None,
    execution: Path,
    elapsed_s: float,
) -> SeedResult:
    summary = summarise_arms(arms)
    base, spec = summary.autoregressive, summary.speculative
    assert base is not None and spec is not None and summary.comparison is not None, "both arms ran"
    assert summary.acceptance is not None, "the speculative arm drafted"
    seed = recipe.grpo.seed
    return SeedResult(
        seed=seed,
        key=study.key(seed),
        recipe=recipe.name,
        workload=recipe.workload.value,
        k=spec.k,
        num_steps=base.num_steps,
        pinned=study.pinned,
        dtype=recipe.learner.dtype.value,
        commit=_commit(),
        execution=str(execution),
        start_reward=(base.rewards[0] + spec.rewards[0]) / 2,
        gain_autoregressive=base.reward_gain.value,
        gain_speculative=spec.reward_gain.value,
        mean_acceptance_length=summary.acceptance.mean_acceptance_length,
        generation_speedup=summary.comparison.generation.value,
        step_speedup=summary.comparison.step.value,
        start_accuracy=None if evaluation is None else evaluation.avg_at_k,
        rewards_autoregressive=base.rewards,
        rewards_speculative=spec.rewards,
        elapsed_s=elapsed_s,
    )


def _commit() -> str:
    """Return the commit of the checkout, with `-dirty` if files differ; `unknown` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
