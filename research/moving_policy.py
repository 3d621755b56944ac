"""Acceptance of a draft while the policy moves away from it: `python -m research.moving_policy --run RUN`.

A finished run's policy is first trained to answer without work (`research/habit.py`), and a draft on its answers.
Arms of GRPO start from there: the policy learns to show work, and a frozen draft is accepted less. The arms differ in
`draft.online` alone and take their steps in turn. The table shows acceptance and the cost of draft training of each
arm. `--habit-steps 0` starts from the run's own policy and draft.

Different drafts lead to different rollouts, so the arms' policies diverge; at a learning rate that breaks the policy
they diverge widely, and one run does not show which arm is better. An arm that the acceptance guard stops is shown with
its steps until then.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runs import FinishedRun, open_run
from research.habit import Lessons, Start, start_with_habit
from slipstream import logs
from slipstream.config import from_mapping, merge, parse_overrides, to_mapping
from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts.config import DraftOnline
from slipstream.drafts.length import DraftLength
from slipstream.recipe import Recipe
from slipstream.stages.support import decode, tokenizer
from slipstream.stages.train_grpo import arm_plan
from slipstream.train.acceptance_guard import AcceptanceCollapse
from slipstream.train.arm import Run
from slipstream.train.turns import Turn, in_turn
from slipstream.types import Arm
from slipstream.workers.placement.plan import table
from slipstream.workers.session import connect

Metrics = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """Arm with its training of the draft, the draft's learning rate (None: the recipe's) and the policy's."""

    online: DraftOnline
    learning_rate: float
    draft_rate: float | None = None

    @property
    def name(self) -> str:
        """Name of the arm in the table."""
        draft = "" if self.draft_rate is None else f" at {self.draft_rate:.1e}"
        return f"{self.online.value}{draft}, {self.learning_rate:.1e}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[3e-4])
    parser.add_argument("--habit-steps", type=int, default=24, help="training steps on answers that rarely show work")
    parser.add_argument("--habit-work", type=float, default=0.05, help="fraction of these answers that show work")
    parser.add_argument("--habit-rate", type=float, default=1e-3, help="learning rate of these steps")
    parser.add_argument("--start", type=Path, help="directory of policy and draft with the habit; made if missing")
    parser.add_argument("--online", nargs="+", choices=list(DraftOnline), default=list(DraftOnline))
    parser.add_argument("--draft-rates", nargs="+", type=float, help="learning rates of drafts; default: the recipe's")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--overrides", nargs="+", default=[], metavar="FIELD=VALUE", help="of the run's recipe")
    parser.add_argument("--records", type=Path, help="file for the metrics of all steps")
    options = parser.parse_args(arguments)
    logs.configure()
    run = open_run(options.run)
    connect()
    print(run.described())
    contestants = [
        Contestant(online=DraftOnline(online), learning_rate=rate, draft_rate=draft_rate)
        for rate in options.learning_rates
        for online in options.online
        for draft_rate in ((None,) if online == DraftOnline.OFF else options.draft_rates or (None,))
    ]
    changes = merge(parse_overrides(options.overrides), {"grpo": {"num_steps": options.steps}})
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        start = Start(policy=run.policy, draft=run.draft.parent)
        if options.habit_steps:
            at = options.start or directory / "start"
            lessons = Lessons(
                num_steps=options.habit_steps, share_of_work=options.habit_work, learning_rate=options.habit_rate
            )
            start = start_with_habit(run, at, lessons)
        print(start.described(), flush=True)
        k = options.num_speculative_tokens
        steps, ends = measured(run, start, contestants, changes, k=k, directory=directory / "arms")
    if options.records is not None:
        options.records.write_text(json.dumps(steps))
    print(table([HEADINGS, *(row(name, found, ends[name]) for name, found in steps.items())]), flush=True)


def measured(
    run: FinishedRun,
    start: Start,
    contestants: Sequence[Contestant],
    changes: Mapping[str, Any],
    *,
    k: int,
    directory: Path,
) -> tuple[dict[str, list[Metrics]], dict[str, str]]:
    """Train the arms in turn; returns the metrics of each arm's steps, and how each arm ended."""
    prompts = read_prompt_sets(run.data).train
    steps: dict[str, list[Metrics]] = {each.name: [] for each in contestants}

    def arm(contestant: Contestant, turn: Turn) -> str:
        recipe = recipe_of(run.recipe, contestant, changes, k=k)
        plan = arm_plan(
            recipe,
            Arm.SPECULATIVE,
            policy=start.policy,
            draft=start.draft,
            length=DraftLength(num_speculative_tokens=k),
            label=contestant.name,
        )
        try:
            Run(
                recipe=recipe,
                plan=plan,
                policy=start.policy,
                prompts=prompts,
                decode=decode(tokenizer(start.policy)),
                directory=directory / contestant.name,
                log=lambda metrics, step: steps[contestant.name].append(metrics),
                turn=turn,
            ).train()
        except AcceptanceCollapse:
            return "acceptance guard"
        return "whole"

    ends = in_turn({each.name: partial(arm, each) for each in contestants})
    for end in ends.values():
        if isinstance(end, BaseException):
            raise end
    return steps, ends


def recipe_of(recipe: Recipe, contestant: Contestant, changes: Mapping[str, Any], *, k: int) -> Recipe:
    """Return the run's recipe with the changes of one arm."""
    draft: dict[str, Any] = {"online": {"when": contestant.online.value}}
    if contestant.draft_rate is not None:
        draft["online"]["optimizer"] = {"learning_rate": contestant.draft_rate}
    own = {
        "draft": draft,
        "grpo": {"optimizer": {"learning_rate": contestant.learning_rate}},
        "tuning": {"candidate_ks": [0, k]},
        "engine": {"num_kept_idle": 0},
        "learner": {"num_kept_idle": 0},
    }
    return from_mapping(Recipe, merge(merge(to_mapping(recipe), changes), own))


HEADINGS = [
    "draft.online, policy's rate",
    "steps",
    "ended by",
    "acceptance length: first quarter",
    "last quarter",
    "all",
    "trainings",
    "training s",
    "step s",
    "reward: first, last quarter",
]


def row(name: str, steps: Sequence[Metrics], end: str) -> list[str]:
    """Format an arm's acceptance, cost and reward, as means over its steps."""
    quarter = max(1, len(steps) // 4)
    first, last = steps[:quarter], steps[-quarter:]
    trained = [step["draft/train_s"] for step in steps if step.get("draft/trained")]
    return [
        name,
        str(len(steps)),
        "" if end == "whole" else end,
        *(f"{_mean(part, 'spec/mean_acceptance_length'):.2f}" for part in (first, last, steps)),
        str(len(trained)),
        f"{sum(trained):.1f}",
        f"{np.median([step['time/step_s'] for step in steps[1:]]):.2f}",
        ", ".join(f"{_mean(part, 'train/reward'):.3f}" for part in (first, last)),
    ]


def _mean(steps: Sequence[Metrics], name: str) -> float:
    return float(np.mean([step[name] for step in steps]))


if __name__ == "__main__":
    main()
