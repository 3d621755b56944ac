"""Generation that runs beside training, on GPUs of its own, with a policy at most `lag` versions old.

Engines are then never drained, so what bounds them is not the tail of a batch but two things, both in terms of the
number r of running sequences of an engine and the time t(r) of a token:

    throughput: the step takes at least (N / engines) E[L] t(r) / r, for N responses a step;
    latency: a response may start at most `lag` steps before the one that trains on it begins, so its longest must end
    within 1 + lag steps: the step takes at least L_max t(r) / (1 + lag).

More running sequences help the first and hurt the second. Both are equal at r = (N / engines) (1 + lag) E[L] / L_max:
more than that never helps, and less may, where t(r) jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.config import require
from slipstream.simulator.cost.arrays import Array
from slipstream.simulator.cost.lengths import Lengths, longest_of
from slipstream.simulator.cost.rollout import RolloutShape, Trace, slowest_engine, steady_state
from slipstream.types import StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How a step's generation is hidden. `period_s`: the shortest step that generation alone could sustain."""

    period_s: float
    step: StageTimes  # its generation_s is the exposed part


def overlap(
    trainer: StageTimes, *, lengths: Lengths, shape: RolloutShape, lag: int, seconds: Callable[[Trace], Array]
) -> Overlap:
    """Join a trainer's stages (`trainer.generation_s` is ignored) with engines that run `lag` steps ahead at most.

    Args:
        seconds: time of each span of a trace on one engine, with or without speculation.
        lag: 0 waits for every batch, as a synchronous step does.
    """
    require(lag >= 0, "lag", "must be >= 0", lag)
    drained_s = float(seconds(slowest_engine(lengths, shape)).sum())
    if lag == 0:
        return Overlap(period_s=drained_s, step=trainer.with_generation(drained_s))
    per_engine = shape.num_rollouts / shape.num_engines
    mean, longest = lengths.mean_tokens, longest_of(lengths, shape.num_rollouts)
    most = max(1.0, per_engine * (1 + lag) * mean / longest)
    running_R = np.append(np.arange(1.0, most), most)
    token_s_R = seconds(steady_state(lengths, running_S=running_R, prompt_tokens=shape.prompt_tokens)) / mean
    period_s_R = np.maximum(longest * token_s_R / (1 + lag), per_engine * mean * token_s_R / running_R)
    # A batch ahead, drained as a synchronous one, is always allowed: lag 1 or more can use it.
    period_s = min(float(period_s_R.min()), drained_s)
    return Overlap(period_s=period_s, step=trainer.with_generation(max(0.0, period_s - trainer.other_s)))
