"""Generation that runs beside training, on GPUs of its own, with a policy at most `lag` versions old.

Engines are never drained, so what bounds them is not the tail of a batch but two things. Throughput: N responses a
step. Latency: a response may start at most `lag` steps before the one that trains on it begins, so its longest must
end within 1 + lag steps. More running sequences help the first and hurt the second; at the best number both hold with
equality, r = (N / engines) (1 + lag) E[L] / L_max, and the period is (1 + lag)-th of the longest response's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.config import require
from slipstream.sim.lengths import Lengths, longest_of, mean_tokens
from slipstream.sim.rollout import RolloutShape, Trace, slowest_engine, steady_state
from slipstream.sim.step import Step, exposed_generation_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How a step's generation is hidden. `period_s`: the shortest step that generation alone could sustain."""

    lag: int
    period_s: float
    latency_bound_s: float  # longest response / (1 + lag)
    running: float  # sequences of an engine at that period
    step: Step  # its generation_s is the exposed part


def overlap(
    trainer: Step, *, lengths: Lengths, shape: RolloutShape, lag: int, seconds: Callable[[Trace], float]
) -> Overlap:
    """Join a trainer's stages (`trainer.generation_s` is ignored) with engines that run `lag` steps ahead at most.

    Args:
        seconds: time of a trace on one engine, with or without speculation.
        lag: 0 waits for every batch, as a synchronous step does.
    """
    require(lag >= 0, "lag", "must be >= 0", lag)
    drained_s = seconds(slowest_engine(lengths, shape))
    if lag == 0:
        return Overlap(
            lag=0,
            period_s=drained_s,
            latency_bound_s=drained_s,
            running=float(shape.per_engine),
            step=trainer.with_generation(drained_s),
        )
    per_engine = shape.num_rollouts / shape.num_engines
    mean, longest = mean_tokens(lengths), longest_of(lengths, shape.num_rollouts)
    running = max(1.0, min(per_engine * (1 + lag) * mean / longest, float(shape.max_running)))
    token_s = seconds(steady_state(lengths, running=running, prompt_tokens=shape.prompt_tokens)) / mean
    latency_s = longest * token_s / (1 + lag)
    throughput_s = per_engine * mean * token_s / running
    # A batch ahead, drained as a synchronous one, is always allowed: lag 1 or more can use it.
    period_s = min(max(latency_s, throughput_s), drained_s)
    exposed_s = exposed_generation_s(period_s, trainer.other_s)
    return Overlap(
        lag=lag,
        period_s=period_s,
        latency_bound_s=latency_s,
        running=running,
        step=trainer.with_generation(exposed_s),
    )
