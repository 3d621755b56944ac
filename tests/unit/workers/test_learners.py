"""Dealing a batch to data-parallel ranks, and the start of ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import ConfigError
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.learner.packing import plan_shards
from slipstream.workers import learners
from slipstream.workers.calls import Deadline, Worker
from slipstream.workers.learners import RemoteLearner, Shards
from tests.small import replace_in
from tests.unit.recipe_fields.workers import FakeRay


def test_the_longest_go_first_to_whoever_has_the_fewest_tokens() -> None:
    """9 to the first, 7 and 6 in turn to the second, then 5 to the first (9 < 13), 4 to the second (13 < 14)."""
    assert plan_shards([4, 9, 6, 5, 7], 2) == [(1, 3), (0, 2, 4)]
    assert plan_shards([3, 1, 2], 1) == [(0, 1, 2)]
    assert plan_shards([3], 2) == [(0,), ()]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_every_sequence_is_dealt_once_and_no_rank_waits_for_more_than_one(lengths: list[int], num_ranks: int) -> None:
    shards = plan_shards(lengths, num_ranks)
    assert sorted(index for shard in shards for index in shard) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for index in shard) for shard in shards]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    if len(lengths) >= num_ranks:
        assert all(shards)


def test_answers_come_back_in_the_batchs_order() -> None:
    sequences = ["aaaa", "bbbbbbbbb", "cccccc", "ddddd", "eeeeeee"]
    shards = Shards.of(sequences, 2)
    answers = [[sequences[index].upper() for index in indices] for indices in shards.indices]
    assert shards.in_order(answers) == [sequence.upper() for sequence in sequences]


def test_an_update_with_fewer_sequences_than_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"an update must have a sequence for each of 3 data-parallel ranks, got 2"):
        Shards.of_update([[1, 2], [3, 4]], 3)


def test_ranks_of_one_copy_get_the_same_part_and_one_of_them_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "ray", SimpleNamespace(put=lambda part: part))
    layout = ParallelConfig(tensor=2, context=2, data=2, pipeline=2)
    ranks = [Worker(rank, f"learner rank {rank}") for rank in range(layout.world_size)]
    learner, called = RemoteLearner(ranks, layout, Deadline(1.0, "fixed")), list[Any]()
    monkeypatch.setattr(learner._crew, "gather", lambda what, calls: [answer for _, answer in calls])
    shards = Shards(((0, 2), (1,)))
    answers = learner._on_shards("logprobs", shards, list, lambda *call: called.append(call) or call)
    assert answers == [(0, [0, 2]), (4, [1])]
    parts = [[0, 2]] * 4 + [[1]] * 4
    assert called == list(enumerate(parts * 2))  # the second stage computes the same


def test_a_learners_gpu_has_one_queue_so_that_megatrons_collectives_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    replace_in(monkeypatch, learners, ray=ray, started=lambda workers, _: workers, _join=lambda *_: None)
    learners.start_ranks(LearnerConfig(num_threads=3), [{"num_gpus": 0}])
    environment = ray.options[0]["runtime_env"]["env_vars"]
    assert (environment["CUDA_DEVICE_MAX_CONNECTIONS"], environment["OMP_NUM_THREADS"]) == ("1", "3")
