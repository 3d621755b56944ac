"""`make bench`: what our step adds to its parts, and our step beside TRL's, on the policy and the draft of a demo.

Both arms and TRL take their steps in turn, one at a time, so that a slower minute of the machine is everybody's.

Limits are printed beside the figures; the exit status never judges a time, for machines differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_idle import compare_dealing, show_dealing
from benchmarks.runs import FinishedRun, open_run
from benchmarks.step import TimedSteps, show, time_steps
from benchmarks.trl_comparison import TrlSteps, comparison, dtypes, require_packages, time_trl
from benchmarks.turns import Turns, in_turn
from slipstream import logs
from slipstream.config import ConfigError, require
from slipstream.types import Dtype
from slipstream.workers.session import connect


def main() -> int:
    """Run the benchmark; status 2 for bad input, as without a finished demo."""
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/latest"), help="directory of a finished run, or of its report"
    )
    parser.add_argument("--num-steps", type=int, default=8, help="of each arm; the first warms up and is left out")
    parser.add_argument("--trl", type=Path, default=None, help="directory with TRL's packages: compares with it")
    options = parser.parse_args()
    try:
        _measure(options.run, options.num_steps, options.trl)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(path: Path, num_steps: int, packages: Path | None) -> None:
    require(num_steps >= 2, "--num-steps", "must be >= 2", num_steps, "the first step warms up and is left out")
    if packages is not None:
        require_packages(packages)
    logs.configure()
    run = open_run(path)
    print(run.described())
    connect()
    members: dict[str, Callable[[Turns, str], Any]] = {
        ("speculative" if k else "autoregressive"): partial(_ours, run, num_steps, k) for k in sorted({0, run.chosen_k})
    }
    timed_dtypes: tuple[Dtype, ...] = ()
    if packages is not None:
        timed_dtypes = dtypes(run.recipe.learner.dtype)
        members |= {f"TRL {dtype.value}": partial(_trl, run, packages, num_steps, dtype) for dtype in timed_dtypes}
    found = in_turn(members)
    ours = {name: steps.step_s for name, steps in found.items() if isinstance(steps, TimedSteps)}
    for name in ours:
        show(found[name])
    if timed_dtypes:
        print(f"\n{comparison(ours, [found[f'TRL {dtype.value}'] for dtype in timed_dtypes])}")
    show_dealing(compare_dealing(run, num_steps), run.chosen_k)


def _ours(run: FinishedRun, num_steps: int, k: int, turns: Turns, name: str) -> TimedSteps:
    return time_steps(run, num_steps, k, turns=turns, name=name)


def _trl(run: FinishedRun, packages: Path, num_steps: int, dtype: Dtype, turns: Turns, name: str) -> TrlSteps:
    return time_trl(run, packages, num_steps, dtype, turns=turns, name=name)


if __name__ == "__main__":
    sys.exit(main())
