"""Lag of a step's tokens behind the policy that learns from them, and its effect on their ratios.

Legend: `N` response tokens of a step, in the order of its rollouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.grpo.config import LossConfig
from slipstream.records.steps import LagStats
from slipstream.types import RolloutGroup, TrainBatch

_LARGEST_LOG_RATIO = 100.0  # larger ones are recorded as this: exp overflows at 709, and a record holds no infinity


def lag_stats(
    groups: Sequence[RolloutGroup], batch: TrainBatch, before_logprobs: Sequence[NDArray[np.float32]], loss: LossConfig
) -> tuple[LagStats, ...]:
    """Summarise ratios and correction of the tokens of each lag, the youngest first.

    Args:
        groups: groups whose rollouts are those of `batch`, in its order.
        before_logprobs: one array a rollout, under the policy before the step's first update.
    """
    spans = [span for group in groups for rollout in group.rollouts for span in rollout.spans]
    lags = [batch.policy_version - span.policy_version for span in spans]
    lag_N = np.repeat(lags, [span.num_tokens for span in spans])
    log_ratios = [
        np.asarray(before, dtype=np.float64) - np.asarray(rollout, dtype=np.float64)
        for before, rollout in zip(before_logprobs, batch.rollout_logprobs, strict=True)
    ]
    ratio_N = np.exp(np.minimum(np.concatenate(log_ratios), _LARGEST_LOG_RATIO))
    weight_N, changed_N = token_weights(log_ratios, loss)
    return tuple(
        LagStats(
            lag=int(lag),
            num_tokens=int(of_lag_N.sum()),
            ratio_mean=float(ratio_N[of_lag_N].mean()),
            ratio_max=float(ratio_N[of_lag_N].max()),
            clipped_fraction=float(changed_N[of_lag_N].mean()),
            effective_sample_size=effective_sample_size(weight_N[of_lag_N]),
        )
        for lag in np.unique(lag_N)
        for of_lag_N in [lag_N == lag]
    )


def token_weights(
    log_ratios: Sequence[NDArray[np.float64]], loss: LossConfig
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Compute the factor by which the loss multiplies each token.

    Args:
        log_ratios: one array a rollout, the log of trained policy / policy that sampled.
    Returns:
        Two arrays [N]: the factor, 0 for a token outside the band; and True where cap or band changed the ratio.
    """
    import torch  # slow to import, and the driver reads this module before it trains

    from slipstream.grpo.correction import corrected

    log_ratio_1N = torch.from_numpy(np.concatenate(log_ratios))[None]
    ends = itertools.accumulate(map(len, log_ratios), initial=0)
    places = [(0, slice(start, end)) for start, end in itertools.pairwise(ends)]
    found = corrected(log_ratio_1N, torch.ones_like(log_ratio_1N, dtype=torch.bool), places, loss)
    if found is None:
        return np.ones(log_ratio_1N.numel()), np.zeros(log_ratio_1N.numel(), dtype=bool)
    weight_1N = found.weight_BT if found.kept_BT is None else torch.where(found.kept_BT, found.weight_BT, 0.0)
    return weight_1N[0].numpy(), found.changed_BT[0].numpy()


def effective_sample_size(weight_N: NDArray[np.float64]) -> float:
    """Return (sum w)^2 / (N sum w^2): 1 for equal weights, 1 / N if one token has them all, 0 if none has any."""
    largest = float(weight_N.max(initial=0.0))
    if largest == 0.0:
        return 0.0
    share_N = weight_N / largest  # squares of tiny weights would lose their digits
    return float(share_N.sum()) ** 2 / (len(weight_N) * float((share_N**2).sum()))
