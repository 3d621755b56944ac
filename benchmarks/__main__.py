"""`make bench`: overhead of our step over its parts, and our step beside TRL's, on the policy and draft of a demo.

Both arms and TRL take their steps in turn, one at a time, so that a slower minute of the machine affects all alike.

Limits are printed beside the figures; the exit status is independent of times, because machines differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_idle import compare_dealing, show_dealing
from benchmarks.runs import open_run
from benchmarks.step import TimedSteps, show, time_steps
from benchmarks.trl_comparison import comparison, dtypes, require_packages, time_trl
from slipstream import logs
from slipstream.config import ConfigError, require
from slipstream.stages.support import decode, tokenizer
from slipstream.train.turns import Turn, in_turn
from slipstream.types import Dtype
from slipstream.workers.session import connect


def main() -> int:
    """Run the benchmark; status 2 for invalid input, such as a missing demo."""
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/latest"), help="directory of a finished run, or of its report"
    )
    parser.add_argument("--num-steps", type=int, default=8, help="steps of each arm; the first warms up")
    parser.add_argument("--trl", type=Path, default=None, help="directory of TRL's packages; adds TRL to the table")
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
    decoder = decode(tokenizer(run.policy))
    members: dict[str, Callable[[Turn], Any]] = {
        ("speculative" if k else "autoregressive"): partial(time_steps, run, num_steps, k, decoder)
        for k in sorted({0, run.chosen_k})
    }
    timed_dtypes: tuple[Dtype, ...] = ()
    if packages is not None:
        timed_dtypes = dtypes(run.recipe.learner.dtype)
        members |= {f"TRL {dtype.value}": partial(time_trl, run, packages, num_steps, dtype) for dtype in timed_dtypes}
    found = in_turn(members)
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    ours = {name: steps.step_s for name, steps in found.items() if isinstance(steps, TimedSteps)}
    for name in ours:
        show(found[name])
    if timed_dtypes:
        print(f"\n{comparison(ours, [found[f'TRL {dtype.value}'] for dtype in timed_dtypes])}")
    show_dealing(compare_dealing(run, num_steps), run.chosen_k)


if __name__ == "__main__":
    sys.exit(main())
