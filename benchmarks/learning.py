"""`make bench-learning`: reward gain of GRPO in both arms, and speedups, over seeds of everything random.

Each seed runs the chain's stages in its own process, with a fixed draft length instead of a sweep. A finished seed adds
a line to the output, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks.study import Study, finished, table
from slipstream.config import ConfigError, require, to_mapping
from slipstream.recipe import load_recipe
from slipstream.types import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Paths of a study: run root of the seeds, and file of the results."""

    root: Path
    output: Path


RunSeed = Callable[[Study, int, Places], int]
"""Function that runs one seed to its line in the output and returns the exit status."""


def main(arguments: Sequence[str] | None = None, *, run_seed: RunSeed | None = None) -> int:
    """Run missing seeds and print the table; status 1 if a seed failed, 2 for invalid input.

    Args:
        run_seed: None runs each seed in its own process.
    """
    options = _parser().parse_args(arguments)
    try:
        return _run(options, run_seed or _run_in_process)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.learning", description=__doc__)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--workload", choices=list(Workload), type=Workload, help="default: the recipe's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--k", type=int, default=7, help="draft tokens of the speculative arm; the sweep is skipped")
    parser.add_argument("--evaluate", action="store_true", help="measure the accuracy of the policy before GRPO, too")
    parser.add_argument("--pin", action="store_true", help="pin each seed to its own core, with one thread")
    parser.add_argument("--parallel", type=int, default=1, help="seeds at once; more than one needs --pin")
    parser.add_argument("--override", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="recipe field")
    parser.add_argument("--root", type=Path, default=Path("runs/learning"), help="parent of the seeds' run roots")
    parser.add_argument("--output", type=Path, default=None, help="default: results.jsonl in --root")
    return parser


def _run(options: argparse.Namespace, run_seed: RunSeed) -> int:
    study = Study(
        recipe=options.recipe,
        workload=options.workload or load_recipe(options.recipe).workload,
        k=options.k,
        evaluate=options.evaluate,
        pinned=options.pin,
        overrides=tuple(options.override),
    )
    seeds = sorted(set(options.seeds))
    cores = _cores(options.parallel, pin=options.pin)
    places = Places(root=options.root.resolve(), output=(options.output or options.root / "results.jsonl").resolve())
    done = finished(places.output, study, seeds)
    todo = [seed for seed in seeds if seed not in done]
    print(
        f"{study.recipe}, {study.workload.value}: k = {study.k} is fixed, no sweep is run; results in {places.output}"
    )
    print(f"seeds finished before: {sorted(done) or 'none'}, to run: {todo or 'none'}, {options.parallel} at once")
    failed = _run_all(lambda seed: run_seed(study, seed, places), todo, cores=cores)
    results = finished(places.output, study, seeds)
    commits = ", ".join(sorted({result.commit for result in results.values()}))
    types = ", ".join(sorted({result.dtype for result in results.values()}))
    print(f"\n{table(results)}\ncommit: {commits or 'none'}; type: {types or 'none'}")
    return 1 if failed else 0


def _cores(parallel: int, *, pin: bool) -> list[int | None]:
    """List a core for each concurrent seed; None leaves the choice to the system."""
    require(parallel >= 1, "--parallel", "must be >= 1", parallel)
    if not pin:
        require(
            parallel == 1, "--parallel", "must be 1 without --pin", parallel, "seeds on shared cores slow each other"
        )
        return [None]
    allowed = sorted(os.sched_getaffinity(0))
    require(
        parallel <= len(allowed), "--parallel", f"must be at most the {len(allowed)} cores of this process", parallel
    )
    return list(allowed[:parallel])


def _run_all(run_seed: Callable[[int], int], seeds: Sequence[int], *, cores: Sequence[int | None]) -> list[int]:
    """Run `seeds`, one at a time on each of `cores`; returns the failed seeds, which do not stop the others."""
    free: SimpleQueue[int | None] = SimpleQueue()
    for core in cores:
        free.put(core)

    def take_core() -> None:
        """Pin the calling thread, so that its child processes inherit the core before any library starts threads."""
        core = free.get()
        if core is not None:
            os.sched_setaffinity(0, {core})

    with ThreadPoolExecutor(len(cores), initializer=take_core) as pool:
        statuses = pool.map(run_seed, seeds)
        return [seed for seed, status in zip(seeds, statuses, strict=True) if status]


def _run_in_process(study: Study, seed: int, places: Places) -> int:
    """Run one seed in its own process; its log goes to a file beside its run root."""
    places.root.mkdir(parents=True, exist_ok=True)
    log = places.root / f"seed-{seed}.log"
    command = [sys.executable, "-m", "benchmarks.learning_seed", "--study", json.dumps(to_mapping(study))]
    command += ["--seed", str(seed), "--root", str(places.root / f"seed-{seed}"), "--output", str(places.output)]
    threads = {"OMP_NUM_THREADS": "1"} if study.pinned else {}
    print(f"seed {seed}: started, log in {log}", flush=True)
    with log.open("a") as file:
        environment = {**os.environ, **threads, "PYTHONWARNINGS": "ignore"}
        status = subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode
    print(f"seed {seed}: {'finished' if status == 0 else f'failed with status {status}, see {log}'}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
