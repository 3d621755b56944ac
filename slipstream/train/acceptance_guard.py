"""A guard against drafts and policies that no longer belong together: acceptance far below its own recent band.

A stale or half-written draft does not fail. It is merely accepted less, and speculation becomes slower than none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from slipstream.records import AcceptanceStats
from slipstream.rollout.acceptance import sampling_deviation

_WINDOW = 20  # steps that make the band: a policy that drifts takes its band along
_MIN_HISTORY = 6  # steps before the guard says anything
_NUM_DEVIATIONS = 6.0
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution


class AcceptanceCollapse(RuntimeError):  # noqa: N818  # what it is, not that it is an error
    """Acceptance fell far below its recent band."""


class AcceptanceGuard:
    """Learns the band of the mean acceptance length from the last steps and stops a run that falls out of it."""

    def __init__(self, history: Iterable[AcceptanceStats] = ()) -> None:
        self._recent: deque[float] = deque((stats.mean_acceptance_length for stats in history), maxlen=_WINDOW)

    def check(self, stats: AcceptanceStats, *, policy_version: int) -> None:
        """Add a step to the band.

        Raises:
            AcceptanceCollapse: the step lies far below the band of those before it.
        """
        length = stats.mean_acceptance_length
        if len(self._recent) >= _MIN_HISTORY:
            center = float(np.median(self._recent))
            lowest = center - _NUM_DEVIATIONS * self._deviation(stats)
            if length < lowest:
                raise AcceptanceCollapse(
                    f"mean acceptance length must stay near that of the last {len(self._recent)} steps, {center:.2f}, "
                    f"and at least at {lowest:.2f}, got {length:.2f} at policy version {policy_version}. Likely: the "
                    "draft was not refitted with the policy, or twice for one; the prefix cache is stale; the draft's "
                    "positions end before max_model_len; prompts of another kind"
                )
        self._recent.append(length)

    def _deviation(self, stats: AcceptanceStats) -> float:
        """The larger of the steps' own scatter and what the number of drafts alone would scatter."""
        values = np.asarray(self._recent)
        scatter = _MAD_TO_DEVIATION * float(np.median(np.abs(values - np.median(values))))
        return max(scatter, float(values.std(ddof=1)), sampling_deviation(stats))
