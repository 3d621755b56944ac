"""Guard against a draft that no longer fits the policy: acceptance far below its recent band stops the run.

A half-written draft, or one of another policy, raises no error. Its tokens are accepted less often, and speculation
becomes slower than none. Such a fault appears from one step to the next. A policy that drifts away from its draft loses
acceptance step by step; the guard only warns about that, once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import numpy as np

from slipstream.engine.acceptance import sampling_deviation
from slipstream.records.steps import AcceptanceStats

logger = logging.getLogger(__name__)

_WINDOW = 20  # steps of the band, which follows a policy that drifts
_MIN_HISTORY = 6  # steps before the guard judges
_NUM_DEVIATIONS = 6.0
_MAD_TO_DEVIATION = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
# Share of the expected accepted draft tokens below which a step must fall: a few long answers of another style, drafted
# less well, can make up most of a step's drafts, and the number of drafts does not show that.
_LEAST_SHARE = 0.5
_PACE_STEPS = 3  # steps over which the speed of a fall is measured
_HASTE = 2.0  # a step that falls up to this many times as fast continues the same fall
_FIX = "draft.online.when: when_stale trains during RL, and draft.autopilot switches off where it loses"


class AcceptanceCollapse(RuntimeError):  # noqa: N818  # named after the event
    """Acceptance fell far below its recent band."""


class AcceptanceGuard:
    """Band of the mean acceptance lengths of recent steps; a run that drops out of it is stopped."""

    def __init__(self, history: Iterable[AcceptanceStats] = (), *, may_rest: bool = False) -> None:
        """Begin with the steps of `history`; one that drafted nothing counts unless the drafts' schedule `may_rest`."""
        drafted = (stats.mean_acceptance_length for stats in history if stats.num_drafts or not may_rest)
        self._recent: deque[float] = deque(drafted, maxlen=_WINDOW)
        self._may_rest, self._has_warned = may_rest, False

    def check(self, stats: AcceptanceStats, *, policy_version: int) -> None:
        """Add a step to the band, and warn once about a fall that lasts.

        Raises:
            AcceptanceCollapse: the step lies far below the band, and no gradual fall led there.
        """
        length = stats.mean_acceptance_length
        if self._may_rest and not stats.num_drafts:
            return
        if len(self._recent) >= _MIN_HISTORY:
            center = float(np.median(self._recent))
            below_band = center - _NUM_DEVIATIONS * self._deviation(stats)
            expected = self._going_on()
            chance = _NUM_DEVIATIONS * max(sampling_deviation(stats), _widest_deviation(stats, expected))
            lowest = min(below_band, expected - chance, 1.0 + _LEAST_SHARE * (expected - 1.0))
            if length < lowest:
                raise AcceptanceCollapse(
                    f"mean acceptance length must stay near that of the last {len(self._recent)} steps, {center:.2f}, "
                    f"and at least at {lowest:.2f}, got {length:.2f} at policy version {policy_version}. Likely: the "
                    "draft was not refitted with the policy, or twice for one; the prefix cache is stale; the draft's "
                    "positions end before max_model_len; prompts of another kind; a policy that a few steps moved far "
                    f"from its draft, which {_FIX}"
                )
            if length < below_band and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "mean acceptance length fell from %.2f to %.2f, step by step, up to policy version %d: the policy "
                    "moves away from its draft, which %s",
                    center,
                    length,
                    policy_version,
                    _FIX,
                )
        self._recent.append(length)

    def _going_on(self) -> float:
        """Extrapolate the fall of the last steps to this one, `_HASTE` times as fast."""
        last = list(self._recent)[-_PACE_STEPS - 1 :]
        return last[-1] - _HASTE * max(0.0, (last[0] - last[-1]) / _PACE_STEPS)

    def _deviation(self, stats: AcceptanceStats) -> float:
        """Deviation of the band: the larger of the steps' scatter and of sampling noise at this number of drafts."""
        values = np.asarray(self._recent)
        scatter = _MAD_TO_DEVIATION * float(np.median(np.abs(values - np.median(values))))
        return max(scatter, float(values.std(ddof=1)), sampling_deviation(stats))


def _widest_deviation(stats: AcceptanceStats, expected: float) -> float:
    """Bound the standard error of the mean acceptance length around `expected`, of which few drafts show nothing.

    It is widest where each draft is accepted whole or not at all.
    """
    accepted, most = expected - 1.0, len(stats.accepted_by_position)
    return float(np.sqrt(max(0.0, accepted * (most - accepted)) / stats.num_drafts)) if stats.num_drafts else 0.0
