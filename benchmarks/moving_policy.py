"""A policy that moves away from its draft: `python -m benchmarks.moving_policy --run RUN`.

Arms of GRPO train from a finished run's policy and in-domain draft, at a learning rate that shifts the answers so far
that a frozen draft is accepted less; the arms differ in `draft.online` alone and take their steps in turn. Shown is
what each keeps of the acceptance, and what its training of the draft took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.runs import FinishedRun, open_run
from slipstream import logs
from slipstream.config import from_mapping, merge, parse_overrides, to_mapping
from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts.config import DraftOnline
from slipstream.drafts.schedule import DraftLength
from slipstream.placement.table import table
from slipstream.recipe import Recipe
from slipstream.records import ArmRecord, StepRecord
from slipstream.rollout.acceptance import combine
from slipstream.stages.support import decode, tokenizer
from slipstream.stages.train_grpo import arm_plan
from slipstream.train.arm import train
from slipstream.train.turns import Turn, in_turn
from slipstream.types import Arm
from slipstream.workers.session import connect


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One arm: how its draft learns, and the policy's learning rate."""

    online: DraftOnline
    learning_rate: float

    @property
    def name(self) -> str:
        """In the table."""
        return f"{self.online.value}, {self.learning_rate:.1e}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[2e-3])
    parser.add_argument("--online", nargs="+", choices=list(DraftOnline), default=list(DraftOnline))
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--overrides", nargs="+", default=[], metavar="FIELD=VALUE", help="of the run's recipe")
    parser.add_argument("--records", type=Path, help="where to write the arms' records")
    options = parser.parse_args(arguments)
    logs.configure()
    run = open_run(options.run)
    connect()
    print(run.described())
    contestants = [
        Contestant(online=DraftOnline(online), learning_rate=rate)
        for rate in options.learning_rates
        for online in options.online
    ]
    changes = merge(parse_overrides(options.overrides), {"grpo": {"num_steps": options.steps}})
    arms = measured(run, contestants, changes, k=options.num_speculative_tokens)
    if options.records is not None:
        options.records.write_text(json.dumps({name: asdict(arm) for name, arm in arms.items()}))
    print(table([HEADINGS, *(row(name, arm) for name, arm in arms.items())]), flush=True)


def measured(
    run: FinishedRun, contestants: Sequence[Contestant], changes: dict[str, object], *, k: int
) -> dict[str, ArmRecord]:
    """The arms of all contestants.

    Raises:
        Exception: what ended one of them.
    """
    prompts = read_prompt_sets(run.data).train
    draft = run.draft.parent  # with its record beside the weights: the length that it is known to reach
    with tempfile.TemporaryDirectory() as directory:

        def arm(contestant: Contestant, turn: Turn) -> ArmRecord:
            recipe = recipe_of(run.recipe, contestant, changes, k=k)
            plan = arm_plan(
                recipe,
                Arm.SPECULATIVE,
                policy=run.policy,
                draft=draft,
                length=DraftLength(num_speculative_tokens=k),
                label=contestant.name,
            )
            return train(
                recipe,
                plan,
                policy=run.policy,
                prompts=prompts,
                decode=decode(tokenizer(run.policy)),
                directory=Path(directory) / contestant.name,
                log=lambda metrics, step: None,
                turn=turn,
            )

        found = in_turn({each.name: partial(arm, each) for each in contestants})
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return found


def recipe_of(recipe: Recipe, contestant: Contestant, changes: dict[str, object], *, k: int) -> Recipe:
    """The run's recipe, changed for one contestant."""
    own = {
        "draft": {"online": contestant.online.value},
        "grpo": {"optimizer": {"learning_rate": contestant.learning_rate}},
        "tuning": {"candidate_ks": [0, k]},
        "engine": {"num_kept_idle": 0},
        "learner": {"num_kept_idle": 0},
    }
    return from_mapping(Recipe, merge(merge(to_mapping(recipe), changes), own))


HEADINGS = [
    "draft.online, policy's rate",
    "acceptance length: first quarter",
    "last quarter",
    "all steps",
    "steps that trained it",
    "training s",
    "step s",
    "reward: first, last quarter",
]


def row(name: str, arm: ArmRecord) -> list[str]:
    """What the arm kept, and what it paid."""
    quarter = max(1, len(arm.steps) // 4)
    first, last = arm.steps[:quarter], arm.steps[-quarter:]
    updates = [step.draft_update for step in arm.steps if step.draft_update is not None]
    rewards = [np.mean([step.reward_mean for step in part]) for part in (first, last)]
    return [
        name,
        *(f"{acceptance_length(part):.2f}" for part in (first, last, arm.steps)),
        str(len(updates)),
        f"{sum(update.elapsed_s for update in updates):.1f}",
        f"{np.median([step.times.step_s for step in arm.timed_steps]):.2f}",
        ", ".join(f"{reward:.3f}" for reward in rewards),
    ]


def acceptance_length(steps: Sequence[StepRecord]) -> float:
    """Of all drafts of these steps together, the bonus token included."""
    return combine([step.acceptance for step in steps if step.acceptance is not None]).mean_acceptance_length


if __name__ == "__main__":
    main()
