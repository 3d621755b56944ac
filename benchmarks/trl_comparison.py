"""Our step beside TRL's in the run's floating-point type, because the ratio needs equal numerics on both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.runs import FinishedRun
from benchmarks.trl_step import MARK, READY
from slipstream.config import require
from slipstream.train.turns import Turn
from slipstream.types import Dtype

_LIMITS = {"autoregressive": 0.70, "speculative": 0.50}  # largest ratio to TRL's step


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlSteps:
    """TRL's steps after the first."""

    dtype: Dtype
    step_s: float  # median
    mean_response_tokens: float


def require_packages(packages: Path) -> None:
    """Check that a directory holds TRL, before our own steps take minutes.

    Raises:
        ConfigError: the directory does not hold the package.
    """
    found = (packages / "trl").is_dir()
    require(found, "--trl", "must be a directory with the package trl", str(packages), "run `make bench-setup` first")


def dtypes(settled: Dtype) -> tuple[Dtype, ...]:
    """List the types in which TRL is timed, that of the comparison first.

    Without bfloat16 instructions bfloat16 is ten times slower, so it is timed only if the run chose it.
    """
    return (settled, Dtype.FLOAT32) if settled is Dtype.BFLOAT16 else (settled,)


def time_trl(run: FinishedRun, packages: Path, num_steps: int, dtype: Dtype, turn: Turn) -> TrlSteps:
    """Time TRL's trainer on the run's policy and prompts, in its own process; the first step warms up.

    Args:
        turn: turn of TRL, in which each step starts.
    """
    path = os.pathsep.join([str(packages.resolve()), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "benchmarks.trl_step", str(run.execution), "--num-steps", str(num_steps)]
    with subprocess.Popen(
        [*command, "--dtype", dtype.value],
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = messages(process.stdout)
        seconds = []
        try:
            for step in range(num_steps):
                assert next(said) == READY
                turn.begin(step)
                process.stdin.write("\n")
                process.stdin.flush()
                seconds.append(float(next(said)))
            lengths = json.loads(next(said))
        except BaseException:
            process.kill()
            raise
    return TrlSteps(dtype=dtype, step_s=float(np.median(seconds[1:])), mean_response_tokens=float(np.mean(lengths[1:])))


def messages(lines: Iterable[str]) -> Iterator[str]:
    """Filter the lines of `benchmarks.trl_step` from TRL's output.

    Raises:
        RuntimeError: the output ended.
    """
    for line in lines:
        if line.startswith(MARK):
            yield line.removeprefix(MARK).strip()
    raise RuntimeError("TRL's trainer ended before its last step: its error stands above")


def comparison(ours: Mapping[str, float], trl: Sequence[TrlSteps]) -> str:
    """Format the table of steps, and the ratios to TRL of the same type.

    Args:
        ours: median seconds of a step by arm.
        trl: TRL's steps, those in the run's type first.
    """
    same = trl[0]
    lines = [f"{'median seconds a step':32}{'step':>10}  of TRL in {same.dtype.value}"]
    for steps in trl:
        note = "" if steps is same else ", the other type"
        label = f"TRL, {steps.dtype.value}{note}"
        tokens = f"  {steps.mean_response_tokens:.0f} tokens a response"
        lines.append(f"{label:32}{steps.step_s:8.3f} s  {steps.step_s / same.step_s:.2f}{tokens}")
    for arm, step_s in ours.items():
        lines.append(f"{f'ours, {arm}':32}{step_s:8.3f} s  {step_s / same.step_s:.2f}")
    ratios = ", ".join(f"{arm} {_ratio(ours, arm, same)} (limit {limit:.2f})" for arm, limit in _LIMITS.items())
    return "\n".join([*lines, f"ratio to TRL, same dtype: {ratios}"])


def _ratio(ours: Mapping[str, float], arm: str, same: TrlSteps) -> str:
    """Format the ratio to TRL's step; an arm is absent if the run's sweep chose no speculation."""
    return f"{ours[arm] / same.step_s:.2f}" if arm in ours else "not run: the sweep chose k = 0"
