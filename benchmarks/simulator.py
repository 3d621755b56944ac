"""Timings of the simulator: `python -m benchmarks.simulator`. Needs no GPU, no engine and no run."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from slipstream.simulator.calibration import calibrate
from slipstream.simulator.observed import PAPER_SETTING, calibrate_paper, paper_cells, paper_learner
from slipstream.simulator.projection import ProjectionRequest, project
from slipstream.simulator.settings import load_setting

_NUM_REPEATS = 9
_PROJECTION_LIMIT_MS = 50.0


def main() -> None:
    """Print the median of each timing beside its limit; the limit judges nothing, because machines differ."""
    setting, ensemble, learner = load_setting(PAPER_SETTING), calibrate_paper(), paper_learner()
    scenario = ProjectionRequest(model="qwen3-235b-a22b", num_gpus=2048, k=5, acceptance_length=4.0, lag=2).scenario()
    timings = (
        ("calibration on 16 cells, 3 variants", lambda: calibrate(setting, paper_cells()), None),
        ("one projection, both arms, with bands", lambda: project(scenario, ensemble, learner), _PROJECTION_LIMIT_MS),
    )
    for label, run, limit_ms in timings:
        limit = "" if limit_ms is None else f"  (limit {limit_ms:.0f} ms)"
        print(f"{label:40} {_median_ms(run):8.1f} ms{limit}")


def _median_ms(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_NUM_REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))


if __name__ == "__main__":
    main()
