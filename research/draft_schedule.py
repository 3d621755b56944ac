"""Fixed draft lengths beside a schedule by running batch, on a finished run's policy, round by round in turn.

`python -m research.draft_schedule --draft-steps 24 --batch 192` first trains a weak draft for the run's policy; with
0 steps the run's own draft is used. A sweep on the run's prompts gives the best fixed k and the schedule. Then the
schedule and every fixed k generate other prompts in turn, and the schedule is compared with the fastest fixed k on
these prompts.

`--num-long 1 --long-terms 18` adds one problem of 18 terms to the short problems of each generation. This makes a long
tail, in which few rollouts run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.runs import FinishedRun, open_run
from research.widen import widened
from slipstream import logs
from slipstream.config import ConfigError, require
from slipstream.data.chat import render
from slipstream.data.prompts import read_prompt_sets
from slipstream.data.synthetic import dapo_rows
from slipstream.drafts.config import DraftLengthRule
from slipstream.drafts.length import TuningConfig, choose, constant, described, sweep
from slipstream.engine.acceptance import combine
from slipstream.engine.protocol import GenerationResult
from slipstream.recipe import Recipe
from slipstream.records.stages import RunningPoint, TuningRecord
from slipstream.records.steps import ScheduleEntry
from slipstream.stages.pretrain_draft import train_on
from slipstream.stages.recipe_engines import recipe_engine, swept_engine, switch_length
from slipstream.stages.support import tokenizer
from slipstream.statistics import Estimate, ratio
from slipstream.types import Prompt
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.session import connect

_SEED = 90_000  # first seed of the comparison, apart from the seeds of the sweep
_BY_BATCH, _SWITCHED_OFF = "by batch", "k=0 by switch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """Engine and the schedule set before each generation; an empty schedule keeps the engine's draft length."""

    engine: RemoteEngine
    table: tuple[ScheduleEntry, ...] = ()

    def generate(self, recipe: Recipe, prompts: Sequence[Prompt], seed: int) -> GenerationResult:
        """Generate a round's rollouts after a warm-up of two tokens each, because an idle engine may start slowly."""
        if self.table:
            self.engine.draft_by(self.table)
        group_size = recipe.grpo.group_size
        short = replace(recipe.sampling, max_response_tokens=2)
        self.engine.generate(prompts, sampling=short, group_size=group_size, seed=seed)
        return self.engine.generate(prompts, sampling=recipe.sampling, group_size=group_size, seed=seed)


def weak_draft(run: FinishedRun, num_steps: int, directory: Path) -> Path:
    """Train a draft of the run's policy for `num_steps`; 0 returns the run's own draft."""
    if not num_steps:
        return run.draft
    if not (directory / "draft").is_dir():
        plan = run.recipe.draft.pretrain
        optimizer = replace(plan.optimizer, warmup_steps=min(20, num_steps))
        plan = replace(plan, num_steps=num_steps, num_prompts=256, optimizer=optimizer)
        shorter = replace(run.recipe.draft, pretrain=plan)
        recipe = replace(run.recipe, draft=shorter, learner=replace(run.recipe.learner, num_kept_idle=0))
        record = train_on(
            read_prompt_sets(run.data).draft_in_domain,
            recipe,
            policy=run.policy,
            directory=directory,
            on_step=lambda step, loss: None,
        )
        print(f"draft of {num_steps} steps: held-out acceptance length {record.heldout_mean_acceptance_length:.2f}")
    return directory / "draft"


def halves(
    prompts: Sequence[Prompt], size: int, num_long: int, long: Sequence[Prompt] = ()
) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into those of the sweep and those of the comparison, in groups of `size`.

    Args:
        num_long: number of problems with long answers in each group, beside the shortest problems, so that answers have
            a long tail as those of real problems do. 0 keeps the order of the prompts.
        long: the problems with long answers; empty takes the longest of `prompts`.
    """
    if num_long:
        ordered = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
        longest = list(long) or ordered[-(len(ordered) // 10) :]
        num_groups = min(len(longest) // num_long, len(ordered) // 3 // (size - num_long)) // 2 * 2
        slow, short = longest[-num_groups * num_long :], ordered[: num_groups * (size - num_long)]
        prompts = [p for i in range(num_groups) for p in (*short[i::num_groups], *slow[i::num_groups])]
    middle = len(prompts) // size // 2 * size
    return list(prompts[:middle]), list(prompts[middle : 2 * middle])


def long_problems(run: FinishedRun, num_terms: int) -> list[Prompt]:
    """Build prompts of sums with `num_terms` one-digit terms; 0 gives none."""
    if not num_terms:
        return []
    data, words = run.recipe.data, tokenizer(run.policy)
    config = replace(
        data.synthetic, min_terms=num_terms, max_terms=num_terms, one_digit_rate=1.0, max_term=10, num_draft_rows=64
    )
    rows = dapo_rows(config, split="draft_in_domain", seed=data.seed + 1)
    problems = [row["prompt"][0]["content"] for row in rows]
    return [
        Prompt(
            id=f"long-{i}",
            text=problem,
            token_ids=render(problem, config=data, tokenizer=words),
            answer=rows[i]["reward_model"]["ground_truth"],
        )
        for i, problem in enumerate(problems)
    ]


def tuned(recipe: Recipe, policy: Path, draft: Path, prompts: Sequence[Prompt]) -> TuningRecord:
    """Find the best fixed k and the schedule by a sweep."""
    swept = sweep(
        partial(swept_engine, recipe, policy, draft),
        prompts,
        config=recipe.tuning,
        sampling=recipe.sampling,
        seed=recipe.grpo.seed,
        group_size=recipe.grpo.group_size,
        switch=switch_length,
    )
    return choose(swept.points, config=recipe.tuning, batch=recipe.tuning.batch_sizes[-1], rounds=swept.rounds)


def compare(
    recipe: Recipe, policy: Path, draft: Path, record: TuningRecord, prompts: Sequence[Prompt], num_rounds: int
) -> dict[str, list[GenerationResult]]:
    """Generate with every fixed k, the schedule, and the schedule's engine at k=0; entry i belongs to round i."""
    size = recipe.tuning.batch_sizes[-1] // recipe.grpo.group_size
    longest = max(entry.num_speculative_tokens for entry in record.schedule)
    ks = recipe.tuning.candidate_ks

    def start(k: int, stack: ExitStack, schedule: Sequence[ScheduleEntry] = ()) -> RemoteEngine:
        return stack.enter_context(recipe_engine(recipe, policy, draft, k, schedule=schedule))

    with ExitStack() as stack:
        contestants = {f"k={k}": Contestant(engine=start(k, stack)) for k in ks}
        table = start(longest, stack, record.schedule)
        contestants[_BY_BATCH] = Contestant(engine=table, table=record.schedule)
        contestants[_SWITCHED_OFF] = Contestant(engine=table, table=constant(0))
        results: dict[str, list[GenerationResult]] = {name: [] for name in contestants}
        names = list(contestants)
        for number in range(num_rounds + 1):
            batch = [prompts[(number * size + i) % len(prompts)] for i in range(size)]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                results[name].append(contestants[name].generate(recipe, batch, _SEED + number))
    return {name: made[1:] for name, made in results.items()}  # the first round warms up


def show_tuned(record: TuningRecord) -> None:
    """Print the sweep and the speedups at every running batch."""
    print(f"sweep: {record.reason}")
    for point in record.points:
        print(f"  k={point.k} {point.speedup:.2f}x, AL {point.mean_acceptance_length:.2f}")
    kinds = sorted({_kind(point) for point in record.running})
    heading = f"over k={record.chosen_k} (slowest rounds)"
    print(heading.ljust(30), *((_SWITCHED_OFF if is_off else f"k={k}").rjust(15) for k, is_off in kinds))
    for start, end in sorted({(point.batch_from, point.batch_to) for point in record.running}):
        here = {_kind(point): point for point in record.running if point.batch_from == start}
        told = {kind: f"{point.gain:.3f} ({point.gain_low:.3f})" for kind, point in here.items()}
        chosen = here.get((record.chosen_k, False))
        num_steps = chosen.num_steps if chosen else 0
        print(f"  {start:3d} to {end:3d}, {num_steps:5d} steps     ", *(told.get(k, "").rjust(15) for k in kinds))
    print(f"table: {described(record.schedule)}; expected {record.schedule_gain:.3f}x over k={record.chosen_k}")


def _kind(point: RunningPoint) -> tuple[int, bool]:
    return point.k, point.is_switched_off


def show_compared(results: Mapping[str, Sequence[GenerationResult]]) -> None:
    """Print medians, and the schedule beside every fixed k."""
    table = [result.generation_s for result in results[_BY_BATCH]]
    print(f"medians of {len(table)} rounds:   generation s   tokens/s     AL   time over by batch's (95 %)")
    for name, made in results.items():
        seconds = [result.generation_s for result in made]
        rate = float(np.median([_num_tokens(result) / result.generation_s for result in made]))
        known = [result.acceptance for result in made if result.acceptance is not None]
        length = combine(known).mean_acceptance_length if known else 1.0
        over = ratio(seconds, table, paired=True)
        print(f"  {name:18} {float(np.median(seconds)):12.3f} {rate:12.0f} {length:8.2f}   {_interval(over)}")
    fixed = {name: float(np.median([r.generation_s for r in made])) for name, made in results.items() if "=" in name}
    fixed.pop(_SWITCHED_OFF)
    best = min(fixed, key=lambda name: fixed[name])
    gain = ratio([r.generation_s for r in results[best]], table, paired=True)
    per_token = ratio(
        [r.generation_s / _num_tokens(r) for r in results[best]],
        [r.generation_s / _num_tokens(r) for r in results[_BY_BATCH]],
        paired=True,
    )
    print(f"best fixed is {best}: by batch is {_interval(gain)} as fast, {_interval(per_token)} by generated token")


def _num_tokens(result: GenerationResult) -> int:
    return sum(len(rollout.token_ids) for group in result.groups for rollout in group.rollouts)


def _interval(estimate: Estimate) -> str:
    low, high = estimate.ci95 or (estimate.value, estimate.value)
    return f"{estimate.value:.3f} ({low:.3f} to {high:.3f})"


def main() -> int:
    """Run the benchmark; status 2 for invalid input."""
    parser = argparse.ArgumentParser(prog="research.draft_schedule")
    parser.add_argument("--run", type=Path, default=Path("runs/latest"), help="directory of a finished run")
    parser.add_argument("--draft-steps", type=int, default=24, help="steps of a weak draft; 0: the run's own draft")
    parser.add_argument("--draft", type=Path, default=None, help="directory of the weak draft; made if missing")
    parser.add_argument("--widen", type=int, default=1, help="factor on the policy's feed-forward width")
    parser.add_argument("--wide", type=Path, default=None, help="directory of the wider policy; made if missing")
    parser.add_argument("--batch", type=int, default=192, help="rollouts of a generation")
    parser.add_argument("--num-long", type=int, default=0, help="prompts with long answers beside short ones")
    parser.add_argument(
        "--long-terms", type=int, default=0, help="terms of the long problems; 0: the run's longest prompts"
    )
    parser.add_argument("--ks", type=int, nargs="+", default=[0, 1, 2, 3, 5, 7], help="draft lengths, 0 among them")
    parser.add_argument("--sweep-rounds", type=int, default=6)
    parser.add_argument("--num-rounds", type=int, default=16, help="rounds of the comparison; 0 ends after the sweep")
    options = parser.parse_args()
    logs.configure()
    try:
        run = open_run(options.run)
        require(options.batch % run.recipe.grpo.group_size == 0, "--batch", "must be whole groups", options.batch)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(run.described())
    connect()
    policy = widened(run.policy, options.wide or run.execution / f"policy-{options.widen}", options.widen)
    draft = weak_draft(run, options.draft_steps, options.draft or run.execution / f"draft-{options.draft_steps}")
    engine = replace(run.recipe.engine, max_num_seqs=options.batch, kv_cache_gib=0.8, num_kept_idle=len(options.ks) + 1)
    tuning = TuningConfig(
        candidate_ks=tuple(options.ks),
        batch_sizes=(options.batch,),
        num_repeats=options.sweep_rounds,
        max_live_engines=len(options.ks),
    )
    by_batch = replace(run.recipe.draft, length=DraftLengthRule.BY_BATCH)
    recipe = replace(run.recipe, engine=engine, tuning=tuning, draft=by_batch)
    size = options.batch // recipe.grpo.group_size
    long = long_problems(run, options.long_terms)
    prompts, others = halves(read_prompt_sets(run.data).train, size, options.num_long, long)
    record = tuned(recipe, policy, draft, prompts)
    show_tuned(record)
    if options.num_rounds:
        show_compared(compare(recipe, policy, draft, record, others, options.num_rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
