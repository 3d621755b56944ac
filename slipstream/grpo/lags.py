"""By how many versions the tokens of a step lag behind the policy that learns from them, and what that does to ratios.

Legend: `N` response tokens of a step, in the order of its rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.grpo.config import Correction, Level, LossConfig
from slipstream.records.steps import LagStats
from slipstream.types import RolloutGroup, TrainBatch

_LARGEST_LOG_RATIO = 100.0  # what is shown beyond it is this: exp overflows at 709, and a record holds no infinity


def lag_stats(
    groups: Sequence[RolloutGroup],
    batch: TrainBatch,
    before_logprobs: Sequence[NDArray[np.float32]],
    *,
    policy_version: int,
    loss: LossConfig,
) -> tuple[LagStats, ...]:
    """Ratios and correction of the tokens of each lag, the youngest first.

    Args:
        groups: whose rollouts are the batch's, in its order.
        before_logprobs: one array a rollout, under the policy before the step's first update.
        policy_version: of that policy.
        loss: whose correction is applied, as `grpo/correction.py` does.
    """
    spans = [span for group in groups for rollout in group.rollouts for span in rollout.spans]
    lag_N = np.repeat([policy_version - span.policy_version for span in spans], [span.num_tokens for span in spans])
    log_ratios = [
        np.asarray(before, dtype=np.float64) - np.asarray(rollout, dtype=np.float64)
        for before, rollout in zip(before_logprobs, batch.rollout_logprobs, strict=True)
    ]
    ratio_N = _ratio(np.concatenate(log_ratios))
    weight_N, changed_N = weights(log_ratios, loss)
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


def weights(
    log_ratios: Sequence[NDArray[np.float64]], loss: LossConfig
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """What the loss multiplies each token by, and of which tokens the cap or the band changed it.

    Args:
        log_ratios: one array a rollout, of trained policy / policy that sampled.
    Returns:
        Two arrays [N]; a token that the band masks out has the weight 0.
    """
    by_token_N = np.concatenate(log_ratios)
    if loss.corrects is Correction.NONE:
        return np.ones(len(by_token_N)), np.zeros(len(by_token_N), dtype=bool)
    assert loss.truncated_importance_sampling is not None, "checked by the config: a correction has a cap"
    sequence_weight = loss.corrects is Correction.SEQUENCE
    raw_N = _ratio(_over_rollouts(log_ratios, np.sum) if sequence_weight else by_token_N)
    weight_N = np.minimum(raw_N, loss.truncated_importance_sampling)
    if loss.mask_band is not None:
        low, high = loss.mask_band
        by_sequence = loss.mask_level is Level.SEQUENCE
        band_N = _ratio(_over_rollouts(log_ratios, np.mean) if by_sequence else by_token_N)
        weight_N = np.where((band_N >= low) & (band_N <= high), weight_N, 0.0)
    return weight_N, weight_N != raw_N


def _over_rollouts(
    rows: Sequence[NDArray[np.float64]], statistic: Callable[[NDArray[np.float64]], float]
) -> NDArray[np.float64]:
    """[N], at each token the statistic of its rollout."""
    return np.repeat([statistic(row) for row in rows], [len(row) for row in rows])


def effective_sample_size(weight_N: NDArray[np.float64]) -> float:
    """(sum w)^2 / (N sum w^2): 1 for equal weights, 1 / N if one token has them all, 0 if none has any."""
    largest = float(weight_N.max(initial=0.0))
    if largest == 0.0:
        return 0.0
    share_N = weight_N / largest  # squares of tiny weights would lose their digits
    return float(share_N.sum()) ** 2 / (len(weight_N) * float((share_N**2).sum()))


def _ratio(log_ratio_N: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(np.minimum(log_ratio_N, _LARGEST_LOG_RATIO))
