"""`make bench`: what our step adds to its parts, and our step beside TRL's, on the policy and the draft of a demo.

Limits are printed beside the figures; the exit status never judges a time, for machines differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.engine_idle import compare_dealing, show_dealing
from benchmarks.runs import open_run
from benchmarks.step import show, time_steps
from benchmarks.trl_comparison import comparison, dtypes, require_packages, time_trl
from slipstream import logs
from slipstream.config import ConfigError, require


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
    ours = {}
    for k in sorted({0, run.chosen_k}):
        steps = time_steps(run, num_steps, k)
        show(steps)
        ours["speculative" if k else "autoregressive"] = steps.step_s
    show_dealing(compare_dealing(run, num_steps), run.chosen_k)
    if packages is not None:  # after our own engines and learners have ended
        trl = [time_trl(run, packages, num_steps, dtype) for dtype in dtypes(run.recipe.learner.dtype)]
        print(f"\n{comparison(ours, trl)}")


if __name__ == "__main__":
    sys.exit(main())
