"""Idle time of two engines, each on its own core, under two assignments of prompts: in turn, and as in training.

In turn, each engine gets every other prompt, whatever its length, and keeps its own queue. Both assignments have the
same prompts and seeds in each round, so they generate the same tokens; the order of the assignments alternates.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from benchmarks.runs import FinishedRun
from slipstream.config import require
from slipstream.data.prompts import PromptStream, read_prompt_sets
from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import GenerationResult, group_requests
from slipstream.engine.vllm_engine import VllmEngine, process_environment
from slipstream.stages.recipe_engines import draft_weights
from slipstream.types import Prompt
from slipstream.workers.calls import Crew, Deadline, Worker, started
from slipstream.workers.engines import generate_dealt
from slipstream.workers.scheduler import Deal, SeenLengths, deal, joined
from slipstream.workers.session import actor_environment, connect

_NUM_ENGINES = 2
_STARTING = Deadline(900.0, "fixed")


class PinnedEngine(VllmEngine):
    """Engine on a single core."""

    def __init__(self, core: int, *args: Any, **kwargs: Any) -> None:
        os.sched_setaffinity(0, {core})  # before any library starts threads
        super().__init__(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Rounds of both assignments with `num_slots` slots an engine; entry i of both belongs to round i."""

    num_slots: int
    num_rollouts: int
    in_turn: tuple[GenerationResult, ...]
    by_length: tuple[GenerationResult, ...]


def compare_dealing(run: FinishedRun, num_rounds: int) -> list[Comparison]:
    """Compare both assignments with slots for all rollouts of a step, and for a third of them.

    Raises:
        ConfigError: this process may use fewer than two cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    require(len(cores) >= _NUM_ENGINES, "cores", f"must be at least {_NUM_ENGINES} for an engine on each", len(cores))
    grpo, sampling = run.recipe.grpo, run.recipe.sampling
    prompts = PromptStream(prompts=read_prompt_sets(run.data).train, batch_size=grpo.prompts_per_step, seed=grpo.seed)
    num_rollouts = grpo.prompts_per_step * grpo.group_size
    found = []
    connect()
    for num_slots in (num_rollouts, max(grpo.group_size, num_rollouts // (3 * _NUM_ENGINES))):
        config = replace(run.recipe.engine, num_threads=1, max_num_seqs=num_slots)
        with _pinned(run, config, cores[:_NUM_ENGINES]) as crew:
            in_turn, by_length = _rounds(
                crew, [prompts.batch(i) for i in range(num_rounds + 1)], sampling, grpo.group_size, num_slots
            )
        found.append(
            Comparison(
                num_slots=num_slots, num_rollouts=num_rollouts, in_turn=tuple(in_turn), by_length=tuple(by_length)
            )
        )
    return found


def show_dealing(found: Sequence[Comparison], k: int) -> None:
    """Print medians of idle fractions and times over the rounds."""
    print(f"\n{_NUM_ENGINES} engines, each on one core, k={k}, medians of {len(found[0].in_turn)} rounds:")
    for one in found:
        print(f"  {one.num_rollouts} rollouts, {one.num_slots} at once an engine")
        for name, results in (("in turn", one.in_turn), ("by expected length", one.by_length)):
            idle = float(np.median([result.engine_idle_fraction for result in results]))
            seconds = float(np.median([result.generation_s for result in results]))
            print(f"    {name:20} idle {idle:6.1%}    generation {seconds:7.3f} s")


@contextmanager
def _pinned(run: FinishedRun, config: EngineConfig, cores: Sequence[int]) -> Iterator[Crew]:
    k = run.chosen_k
    draft = speculative_config(run.recipe.draft, draft_weights(run.recipe.draft, run.draft), k) if k else None
    options = {"num_cpus": 0, "runtime_env": {"env_vars": actor_environment(process_environment(config))}}
    actor: Any = ray.remote(PinnedEngine).options(**options)
    actors = [actor.remote(core, run.policy, config=config, speculative_config=draft) for core in cores]
    workers = [Worker(one, f"engine {index}") for index, one in enumerate(actors)]
    try:
        yield Crew(started(workers, _STARTING), _STARTING)
    finally:
        for one in actors:
            ray.kill(one)


def _rounds(
    crew: Crew,
    batches: Sequence[Sequence[Prompt]],
    sampling: SamplingConfig,
    group_size: int,
    num_slots: int,
) -> tuple[list[GenerationResult], list[GenerationResult]]:
    """Run both assignments in each round; the first round warms up and gives the first known lengths."""
    lengths, num_engines = SeenLengths(), len(crew.workers)
    results: dict[str, list[GenerationResult]] = {"in turn": [], "by length": []}
    for number, prompts in enumerate(batches):
        requests = group_requests(prompts, group_size=group_size, seed=number)
        dealt = {
            "in turn": Deal(shares=tuple(requests[i::num_engines] for i in range(num_engines)), queue=()),
            "by length": deal(requests, lengths, num_engines=num_engines, num_slots=num_slots),
        }
        for way in sorted(dealt, reverse=number % 2 == 1):
            results[way].append(joined(requests, generate_dealt(crew, dealt[way], sampling, way)))
        lengths.note(results["by length"][-1].groups)
    return results["in turn"][1:], results["by length"][1:]
