"""Overhead of our step over its parts: the loop on a finished run's policy and draft, beside the engine's own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.runs import FinishedRun
from slipstream.data.prompts import PromptStream, read_prompt_sets
from slipstream.engine.protocol import GenerationResult
from slipstream.recipe import Recipe
from slipstream.records.steps import StepRecord
from slipstream.refit.channel import open_channel
from slipstream.refit.gate import RefitGate
from slipstream.rewards.verifier import Verifier
from slipstream.stages.recipe_engines import recipe_engine
from slipstream.train.arm import score
from slipstream.train.loop import Draft, SyncLoop, Trainer
from slipstream.train.metrics import StageClock
from slipstream.train.turns import Turn
from slipstream.types import Arm
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.learners import start_learner

Decoder = Callable[[Sequence[int], Sequence[int]], str]

_MIN_EXPLAINED = 0.98  # smallest fraction of a step's wall time that its five stages explain


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedSteps:
    """Steps of one arm after the first; entry i of both fields belongs to step i."""

    k: int
    records: tuple[StepRecord, ...]
    engine_s: tuple[float, ...]  # seconds of generation by the engine's own clock

    @property
    def step_s(self) -> float:
        """Median wall time of a step."""
        return _median([record.times.step_s for record in self.records])


@dataclass
class NotingEngine:
    """Engine that records the generation time of the wrapped engine's own clock."""

    engine: RemoteEngine
    seconds: list[float]

    def generate(self, *args: Any, **kwargs: Any) -> GenerationResult:
        """Generate like `Engines.generate`."""
        result = self.engine.generate(*args, **kwargs)
        self.seconds.append(result.generation_s)
        return result


def _without_idle(recipe: Recipe) -> Recipe:
    """Keep no idle engine or learner, so that the next member is timed alone."""
    engine, learner = (replace(each, num_kept_idle=0) for each in (recipe.engine, recipe.learner))
    return replace(recipe, engine=engine, learner=learner)


def time_steps(run: FinishedRun, num_steps: int, k: int, decoder: Decoder, turn: Turn) -> TimedSteps:
    """Train `num_steps` steps with k draft tokens on a copy of the run's policy; the first step warms up.

    Args:
        decoder: text of a response from the tokens of prompt and response; made before arms run side by side, for
            transformers' import is not safe between threads.
        turn: turn of this arm, in which each step starts.
    """
    recipe = _without_idle(run.recipe)
    records: list[StepRecord] = []

    def start_clock() -> StageClock:
        turn.begin(len(records))
        return StageClock()

    with (
        start_learner(recipe.learner, layout=recipe.layout) as learner,
        recipe_engine(recipe, run.policy, run.draft, k) as remote,
        closing(Verifier(recipe.reward)) as verifier,
        ExitStack() as opened,
    ):
        engine = NotingEngine(engine=remote, seconds=[])
        learner.load(run.policy, recipe.grpo.optimizer, with_reference=recipe.grpo.loss.kl_coefficient > 0)
        SyncLoop(
            arm=Arm.SPECULATIVE if k else Arm.AUTOREGRESSIVE,
            engine=engine,
            prompts=PromptStream(
                prompts=read_prompt_sets(run.data).train,
                batch_size=recipe.grpo.prompts_per_step,
                seed=recipe.grpo.seed,
            ),
            score=partial(
                score,
                reward=verifier,
                decode=decoder,
                max_response_tokens=recipe.sampling.max_response_tokens,
                overlong=recipe.reward.overlong,
            ),
            trainer=Trainer(
                learner=learner,
                config=replace(recipe.grpo, num_steps=num_steps),
                sampling=recipe.sampling,
                draft=Draft(version=0 if k else None),
            ),
            gate=RefitGate(
                remote,
                learner,
                channel=opened.enter_context(open_channel(recipe.refit, learner, remote)),
                draft=run.draft if k else None,
                trains_draft=False,
                config=recipe.refit,
            ),
            on_step=records.append,
            start_clock=start_clock,
        ).run(start_step=0)
    return TimedSteps(k=k, records=tuple(records[1:]), engine_s=tuple(engine.seconds[1:]))


def show(steps: TimedSteps) -> None:
    """Print medians over the steps."""
    records = steps.records
    generation_s = [record.times.generation_s for record in records]
    learner_s = [record.times.logprob_s + record.times.train_s for record in records]
    explained = [sum(record.times.by_stage().values()) / record.times.step_s for record in records]
    overhead = [stage / engine - 1 for stage, engine in zip(generation_s, steps.engine_s, strict=True)]
    tokens = [record.num_response_tokens for record in records]
    refit_s = [record.times.prepare_s for record in records]
    check_s = [record.refit.elapsed_s for record in records]
    print(
        f"\nk={steps.k}, {records[0].num_rollouts} rollouts a step, {_median(tokens):.0f} response tokens, "
        f"medians of {len(records)} steps:"
    )
    print(f"  step                     {steps.step_s:8.3f} s")
    print(f"  generation, engine only  {_median(steps.engine_s):8.3f} s")
    print(f"  generation, our stage    {_median(generation_s):8.3f} s  ({_median(overhead):+.1%})")
    print(
        f"  learner                  {_median([t / s for t, s in zip(tokens, learner_s, strict=True)]):8.0f} tokens/s"
    )
    print(f"  refit (prepare)          {_median(refit_s):8.3f} s  ({_median(refit_s) / steps.step_s:.1%} of a step)")
    print(f"    of it the check        {_median(check_s):8.3f} s  ({_median(check_s) / steps.step_s:.1%} of a step)")
    print(f"  stages / step            {_median(explained):8.1%}    (limit: at least {_MIN_EXPLAINED:.0%})")


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
