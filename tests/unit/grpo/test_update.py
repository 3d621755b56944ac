"""How a step is cut into updates, and how their stats are put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from slipstream.grpo.config import LossConfig
from slipstream.grpo.update import Trained, Update, combined, minibatches, part_of
from slipstream.ragged import Ragged
from slipstream.records.steps import DraftUpdate, TrainStats
from slipstream.types import TrainBatch

LOGPROBS = [np.full(2, -float(i), dtype=np.float32) for i in range(5)]
UPDATE = Update(
    batch=TrainBatch(
        token_ids=tuple((i, 7, 2) for i in range(5)),
        prompt_lengths=(1, 1, 1, 1, 2),
        rollout_logprobs=tuple((-0.5, -float(i)) for i in range(5)),
        advantages=(0.0, 1.0, 2.0, 3.0, 4.0),
        policy_version=3,
    ),
    trainer_logprobs=LOGPROBS,
    ref_logprobs=LOGPROBS[::-1],
    loss=LossConfig(kl_coefficient=0.1),
    temperature=0.5,
)


def joined(*parts: TrainStats) -> TrainStats:
    return combined([Trained(stats=part, own_logprobs=None) for part in parts]).stats


def rows(ragged: Sequence[ArrayLike] | None) -> list[list[float]]:
    assert ragged is not None
    return [np.asarray(row).tolist() for row in ragged]


STATS = TrainStats(loss=1.0, grad_norm=2.0, kl=4.0, clip_fraction=0.0, num_tokens=1, learning_rate=0.2)


def test_five_rollouts_in_one_two_or_five_updates_keep_their_order() -> None:
    assert minibatches(UPDATE, 1) == [UPDATE]
    assert [part.batch.advantages for part in minibatches(UPDATE, 5)] == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    first, second = minibatches(UPDATE, 2)
    assert rows(first.batch.token_ids) == [[0, 7, 2], [1, 7, 2]]
    assert rows(second.batch.token_ids) == [[2, 7, 2], [3, 7, 2], [4, 7, 2]]
    assert (first.batch.prompt_lengths, second.batch.prompt_lengths) == ([1, 1], [1, 1, 2])
    assert rows(second.batch.rollout_logprobs) == [[-0.5, -2.0], [-0.5, -3.0], [-0.5, -4.0]]
    assert (first.batch.advantages, second.batch.advantages) == ([0.0, 1.0], [2.0, 3.0, 4.0])
    assert rows(second.trainer_logprobs) == [[-2.0] * 2, [-3.0] * 2, [-4.0] * 2]
    assert rows(second.ref_logprobs) == [[-2.0] * 2, [-1.0] * 2, [0.0] * 2]
    for part in (first, second):
        assert (part.batch.policy_version, part.loss, part.temperature) == (3, UPDATE.loss, 0.5)
    assert [part.ref_logprobs for part in minibatches(replace(UPDATE, ref_logprobs=None), 2)] == [None, None]


def test_stats_are_means_over_tokens_but_for_norm_and_learning_rate() -> None:
    """1 token and 3 tokens: a mean over tokens weighs the second three times, one over updates once."""
    three = TrainStats(loss=5.0, grad_norm=4.0, kl=8.0, clip_fraction=1.0, num_tokens=3, learning_rate=0.4)
    stats = joined(STATS, three)
    assert (stats.loss, stats.kl, stats.clip_fraction, stats.num_tokens) == (4.0, 7.0, 0.75, 4)
    assert (stats.grad_norm, stats.learning_rate) == pytest.approx((3.0, 0.3))


def test_a_drafts_training_over_a_step_is_a_mean_over_its_updates() -> None:
    """Losses of 1.0 in one update of the draft and 4.0 in two; a part that trained no draft adds nothing."""
    one = DraftUpdate(loss=1.0, num_updates=1, elapsed_s=0.5)
    two = DraftUpdate(loss=4.0, num_updates=2, elapsed_s=0.25)
    whole = combined([Trained(stats=STATS, own_logprobs=None, draft=draft) for draft in (one, None, two)])
    assert whole.draft == DraftUpdate(loss=3.0, num_updates=3, elapsed_s=0.75)
    assert combined([Trained(stats=STATS, own_logprobs=None)] * 2).draft is None


def test_a_step_of_one_update_is_that_update() -> None:
    only = Trained(stats=STATS, own_logprobs=LOGPROBS)
    assert combined([only]) is only
    assert combined([only, only]).own_logprobs is None


def test_updates_without_a_rollout_or_logprobs_of_their_own_are_refused() -> None:
    own = replace(UPDATE, trainer_logprobs=None)
    assert minibatches(own, 1)[0].trainer_logprobs is None
    for count, message in (
        (0, "a step of 5 rollouts gives 1 to 5 updates, got 0"),
        (6, "a step of 5 rollouts gives 1 to 5 updates, got 6"),
        (2, "2 updates need the trainer_logprobs from before the first, got none"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            minibatches(own, count)


def test_a_ranks_part_is_its_rollouts_in_arrays() -> None:
    part = part_of(UPDATE, [4, 1])
    assert rows(part.batch.token_ids) == [[4, 7, 2], [1, 7, 2]]
    assert (part.batch.prompt_lengths, part.batch.advantages) == ([2, 1], [4.0, 1.0])
    assert rows(part.batch.rollout_logprobs) == [[-0.5, -4.0], [-0.5, -1.0]]
    assert rows(part.trainer_logprobs) == [[-4.0, -4.0], [-1.0, -1.0]]
    assert rows(part.ref_logprobs) == [[0.0, 0.0], [-3.0, -3.0]]
    assert (part.batch.policy_version, part.loss, part.temperature) == (3, UPDATE.loss, 0.5)
    assert isinstance(part.batch.token_ids, Ragged) and part.batch.token_ids.values.dtype == np.int32
    wide = [row.astype(np.float64) for row in LOGPROBS]
    narrow = part_of(replace(UPDATE, trainer_logprobs=wide, ref_logprobs=wide), [0])
    logprobs = (part.batch.rollout_logprobs, part.trainer_logprobs, part.ref_logprobs)
    for ragged in (*logprobs, narrow.trainer_logprobs, narrow.ref_logprobs):
        assert isinstance(ragged, Ragged) and ragged.values.dtype == np.float32
    bare = part_of(replace(UPDATE, trainer_logprobs=None, ref_logprobs=None), [0])
    assert (bare.trainer_logprobs, bare.ref_logprobs) == (None, None)


def test_entropy_is_a_mean_over_tokens_where_every_update_knows_it() -> None:
    one, three = (replace(STATS, num_tokens=n, entropy=e) for n, e in ((1, 2.0), (3, 6.0)))
    assert joined(one, three).entropy == 5.0
    one = replace(one, num_all_tokens=3, num_computed_tokens=7)  # of which 1 counts, and below 3
    stats = joined(one, one, replace(three, num_all_tokens=9, num_computed_tokens=5))
    assert (stats.entropy, stats.num_tokens, stats.num_all_tokens, stats.num_computed_tokens) == (4.4, 5, 15, 19)
    stats = joined(one, replace(three, entropy=None))
    assert (stats.entropy, stats.num_computed_tokens) == (None, None)
