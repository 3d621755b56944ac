"""The draft length by running batch, from steps whose times are given."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.drafts.length import (
    SWITCHED_OFF,
    DraftLength,
    Round,
    constant,
    described,
    expected_gain,
    length_of,
    running_points,
    schedule,
)
from slipstream.engine.protocol import RunningTime
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ScheduleEntry


def time(num_running: int, *, steps: int, tokens: int, ms: float) -> RunningTime:
    return RunningTime(num_running=num_running, num_steps=steps, num_tokens=tokens, elapsed_s=ms / 1e3)


def entry(start: int, end: int, k: int) -> ScheduleEntry:
    return ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k)


# Two rollouts: 10 steps of 2 tokens without a draft, 4 steps with one of 2. Then one alone.
ROUND: Round = {
    0: (time(1, steps=10, tokens=10, ms=100), time(2, steps=10, tokens=20, ms=100)),
    2: (time(1, steps=4, tokens=10, ms=50), time(2, steps=4, tokens=20, ms=125)),
}


def test_the_cost_of_a_k_is_the_time_in_which_every_running_rollout_gains_a_token() -> None:
    points = running_points([ROUND], chosen_k=2, largest=2)
    assert [(p.k, p.batch_from, p.batch_to) for p in points] == [(0, 1, 1), (2, 1, 1), (0, 2, 2), (2, 2, 2)]
    # 10 tokens of a rollout in 100, 50, 100 and 125 ms.
    assert [p.token_ms for p in points] == pytest.approx([10.0, 5.0, 10.0, 12.5])
    assert [p.tokens_per_step for p in points] == [1.0, 2.5, 1.0, 2.5]
    assert [p.speedup for p in points] == pytest.approx([1.0, 2.0, 1.0, 0.8])
    assert [p.gain for p in points] == pytest.approx([0.5, 1.0, 1.25, 1.0])
    assert [p.num_rounds for p in points] == [1, 1, 1, 1]


def test_running_batches_are_taken_together_in_ranges_that_double() -> None:
    times = tuple(time(num, steps=1, tokens=num, ms=num) for num in range(1, 13))
    points = running_points([{0: times}], chosen_k=0, largest=12)
    assert [(p.batch_from, p.batch_to) for p in points] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 12)]
    # 9 + 10 + 11 + 12 ms for four tokens a rollout.
    assert points[-1].token_ms == pytest.approx(42 / 4)
    assert points[-1].num_steps == 4


# k=5 is twice as fast as k=2 for one rollout alone, and slower for two.
LONG: Round = {**ROUND, 5: (time(1, steps=2, tokens=10, ms=25), time(2, steps=2, tokens=20, ms=250))}


def table_of(rounds: list[Round], *, chosen_k: int = 2, min_gain: float = 1.03) -> tuple[ScheduleEntry, ...]:
    points = running_points(rounds, chosen_k=chosen_k, largest=2)
    return schedule(points, rounds, chosen_k=chosen_k, largest=2, min_gain=min_gain)


def test_a_k_that_is_clearly_faster_at_a_running_batch_takes_it_from_the_chosen_one() -> None:
    rounds = [LONG, LONG]
    table = table_of(rounds)
    assert table == (entry(1, 1, 5), entry(2, 2, 2))
    # Of the chosen k's 175 ms, the 50 for one rollout alone become 25.
    points = running_points(rounds, chosen_k=2, largest=2)
    assert expected_gain(points, table, rounds, chosen_k=2) == pytest.approx(175 / 150)


def test_a_table_that_gains_too_little_over_all_is_none() -> None:
    rounds = [LONG, LONG]
    assert table_of(rounds, min_gain=1.17) == (entry(1, 2, 2),)
    points = running_points(rounds, chosen_k=2, largest=2)
    gain = expected_gain(points, (entry(1, 1, 5), entry(2, 2, 2)), rounds, chosen_k=2)
    assert table_of(rounds, min_gain=gain) == (entry(1, 1, 5), entry(2, 2, 2))


def test_a_k_that_is_only_as_fast_as_the_chosen_one_takes_nothing() -> None:
    equal: Round = {**LONG, 5: (time(1, steps=2, tokens=10, ms=25), time(2, steps=2, tokens=20, ms=125))}
    assert table_of([equal, equal], min_gain=1.0) == (entry(1, 1, 5), entry(2, 2, 2))


def test_a_range_of_several_batches_changes_hands_as_a_whole() -> None:
    """k=1 is twice as fast as k=2 for three and four, and half as fast for one and two."""
    both: Round = {
        k: tuple(time(num, steps=5, tokens=10 * num, ms=ms[num > 2]) for num in (1, 2, 3, 4))
        for k, ms in ((2, (50, 80)), (1, (100, 40)))
    }
    points = running_points([both, both], chosen_k=2, largest=4)
    table = schedule(points, [both, both], chosen_k=2, largest=4, min_gain=1.03)
    assert table == (entry(1, 2, 2), entry(3, 4, 1))
    # Of 50 + 50 + 80 + 80 ms the last two halve.
    assert expected_gain(points, table, [both, both], chosen_k=2) == pytest.approx(260 / 180)


def test_where_length_0_was_not_measured_in_an_engine_with_a_draft_it_takes_as_long_as_without() -> None:
    off = {SWITCHED_OFF: (time(1, steps=10, tokens=10, ms=120),), 2: ROUND[2][:1], 0: ROUND[0]}
    rounds: list[Round] = [off, off]
    points = running_points(rounds, chosen_k=0, largest=2)
    table = schedule(points, rounds, chosen_k=0, largest=2, min_gain=1.03)
    assert table == (entry(1, 1, 2), entry(2, 2, 0))
    # 100 ms for one rollout alone become 50; 100 for two stay.
    assert expected_gain(points, table, rounds, chosen_k=0) == pytest.approx(200 / 150)


def test_one_round_is_no_evidence_and_rounds_that_disagree_are_none_either() -> None:
    assert table_of([LONG]) == (entry(1, 2, 2),)
    denied: Round = {**LONG, 5: (time(1, steps=2, tokens=10, ms=55), time(2, steps=2, tokens=20, ms=250))}
    points = running_points([LONG, LONG, denied], chosen_k=2, largest=2)
    of_5 = next(point for point in points if (point.k, point.batch_from) == (5, 1))
    assert of_5.gain == pytest.approx((2 * 2 * 50 / 55) ** (1 / 3))
    assert of_5.gain_low < 1.0
    assert table_of([LONG, LONG, denied]) == (entry(1, 2, 2),)


def test_the_bound_is_students_t_over_the_rounds() -> None:
    """Gains of 2 and 8: a mean logarithm of ln 4, a standard error of ln 2, and t = 31.82 for one degree of freedom."""
    slower: Round = {**LONG, 2: (time(1, steps=4, tokens=10, ms=200), time(2, steps=4, tokens=20, ms=125))}
    points = running_points([LONG, slower], chosen_k=2, largest=2)
    of_5 = next(point for point in points if (point.k, point.batch_from) == (5, 1))
    assert of_5.gain == pytest.approx(4.0)
    assert of_5.gain_low == pytest.approx(math.exp(math.log(4) - 31.8205 * math.log(2)), rel=1e-3)


def test_the_speed_of_an_engine_without_a_draft_gives_length_0_no_range() -> None:
    """At two rollouts it is faster than k=2; but there is no engine that drops its draft."""
    assert table_of([ROUND, ROUND]) == (entry(1, 2, 2),)
    assert table_of([LONG, LONG], chosen_k=0) == (entry(1, 2, 0),)


def switched_off(*, alone_ms: float, both_ms: float) -> Round:
    """`ROUND`, with an engine that drafts nothing although it has a draft."""
    return {
        **ROUND,
        SWITCHED_OFF: (time(1, steps=10, tokens=10, ms=alone_ms), time(2, steps=10, tokens=20, ms=both_ms)),
    }


def test_drafting_is_switched_off_where_an_engine_with_a_draft_was_faster_so() -> None:
    rounds = [switched_off(alone_ms=120, both_ms=110)] * 2
    points = running_points(rounds, chosen_k=2, largest=2)
    off = [point for point in points if point.is_switched_off]
    assert [(point.k, point.batch_from) for point in off] == [(0, 1), (0, 2)]
    assert [point.gain for point in off] == pytest.approx([50 / 120, 125 / 110])
    assert [point.speedup for point in off] == pytest.approx([100 / 120, 100 / 110])
    table = table_of(rounds)
    assert table == (entry(1, 1, 2), entry(2, 2, 0))
    assert expected_gain(points, table, rounds, chosen_k=2) == pytest.approx(175 / 160)
    assert table_of([switched_off(alone_ms=120, both_ms=126)] * 2) == (entry(1, 2, 2),)


def test_where_no_k_pays_throughout_one_may_still_in_the_tail_if_that_outweighs_the_drafts_first_pass() -> None:
    """Without a draft 200 ms. With one: 50 alone by k=2, and `both_ms` for two without drafts."""
    rounds = [switched_off(alone_ms=120, both_ms=110)] * 2
    table = table_of(rounds, chosen_k=0)
    assert table == (entry(1, 1, 2), entry(2, 2, 0))
    points = running_points(rounds, chosen_k=0, largest=2)
    assert expected_gain(points, table, rounds, chosen_k=0) == pytest.approx(200 / 160)
    # At two rollouts switching off is dearer than k=2 there: a table is k=2 throughout, which is no table.
    assert table_of([switched_off(alone_ms=120, both_ms=130)] * 2, chosen_k=0) == (entry(1, 2, 0),)
    assert table_of(rounds, chosen_k=0, min_gain=1.26) == (entry(1, 2, 0),)


def test_where_no_k_pays_throughout_each_range_goes_to_the_fastest_however_unsure() -> None:
    """Without drafts two rollouts take 130 ms in an engine with one, or 70; k=2 takes 125 both times, and 50 alone."""
    rounds = [switched_off(alone_ms=120, both_ms=130), switched_off(alone_ms=120, both_ms=70)]
    points = running_points(rounds, chosen_k=0, largest=2)
    of_2, off = [next(p for p in points if p.batch_from == 2 and p.k == k and k + p.is_switched_off) for k in (2, 0)]
    assert of_2.gain < off.gain
    assert table_of(rounds, chosen_k=0) == (entry(1, 1, 2), entry(2, 2, 0))
    assert off.gain_low < of_2.gain  # so with k=2 as the chosen one it would not have been enough
    assert table_of(rounds) == (entry(1, 2, 2),)
    assert table_of(rounds[1:], chosen_k=0) == (entry(1, 2, 0),)  # one round is no evidence


def test_a_k_that_never_met_the_chosen_one_is_compared_with_it_through_k_0() -> None:
    other: Round = {0: (time(1, steps=10, tokens=10, ms=200),), 5: (time(1, steps=2, tokens=10, ms=50),)}
    rounds = [ROUND, other, ROUND, other]
    # k=5 is 4 times as fast as k=0 in its rounds, k=2 twice in its own.
    (point,) = [point for point in running_points(rounds, chosen_k=2, largest=1) if point.k == 5]
    assert (point.gain, point.gain_low) == pytest.approx((2.0, 2.0))
    assert table_of(rounds) == (entry(1, 1, 5), entry(2, 2, 2))
    assert table_of([ROUND, other]) == (entry(1, 2, 2),)  # a round of each is no evidence


def test_a_k_that_met_neither_the_chosen_one_nor_k_0_takes_nothing() -> None:
    alone: Round = {5: (time(1, steps=2, tokens=10, ms=1),)}
    assert table_of([ROUND, ROUND, alone, alone]) == (entry(1, 2, 2),)
    points = running_points([ROUND, ROUND, alone, alone], chosen_k=2, largest=2)
    assert [(p.gain, p.gain_low) for p in points if p.k == 5] == [(1.0, 0.0)]


def test_rounds_without_k_0_or_without_the_chosen_k_say_nothing_of_it() -> None:
    apart: list[Round] = [{2: ROUND[2]}, {5: LONG[5]}]
    points = running_points(apart, chosen_k=2, largest=1)
    assert [(p.k, p.speedup, p.gain, p.gain_low) for p in points] == [(2, None, 1.0, 0.0), (5, None, 1.0, 0.0)]
    points = running_points([{0: ROUND[0], 5: LONG[5]}], chosen_k=2, largest=1)
    assert [(p.k, p.speedup, p.gain) for p in points] == [(0, 1.0, 1.0), (5, pytest.approx(4.0), 1.0)]


def test_where_no_engine_without_a_draft_came_there_is_no_speedup_to_tell() -> None:
    points = running_points([{0: (time(2, steps=1, tokens=2, ms=1),), 2: ROUND[2]}], chosen_k=2, largest=2)
    assert [point.speedup is None for point in points if point.k == 2] == [True, False]


def test_without_rounds_the_table_is_the_chosen_k() -> None:
    assert schedule((), (), chosen_k=3, largest=48, min_gain=1.03) == (entry(1, 48, 3),)
    assert expected_gain((), constant(3), (), chosen_k=3) == 1.0


@given(
    largest=st.integers(1, 300),
    chosen_k=st.sampled_from([0, 2, 7]),
    costs=st.dictionaries(
        st.tuples(st.sampled_from([SWITCHED_OFF, 0, 2, 7]), st.integers(1, 300)), st.floats(0.1, 9.0)
    ),
)
def test_a_table_covers_every_running_batch_once_whatever_was_measured(
    largest: int, chosen_k: int, costs: dict[tuple[int, int], float]
) -> None:
    by_k = {
        k: tuple(time(num, steps=1, tokens=num, ms=ms) for (of, num), ms in sorted(costs.items()) if of == k)
        for k in (SWITCHED_OFF, 0, 2, 7)
    }
    rounds = [by_k, by_k]
    points = running_points(rounds, chosen_k=chosen_k, largest=largest)
    table = schedule(points, rounds, chosen_k=chosen_k, largest=largest, min_gain=1.0)
    covered = [num for each in table for num in range(each.batch_from, each.batch_to + 1)]
    assert covered == list(range(1, largest + 1))
    assert all(a.num_speculative_tokens != b.num_speculative_tokens for a, b in pairwise(table))
    assert expected_gain(points, table, rounds, chosen_k=chosen_k) >= 1.0 - 1e-9


def _record(*table: ScheduleEntry, chosen_k: int = 3) -> TuningRecord:
    return TuningRecord(chosen_k=chosen_k, reason="told so", points=(), schedule=table)


def test_a_table_of_one_k_is_the_best_fixed_k_and_no_table() -> None:
    length = length_of(_record(entry(1, 48, 3)), by_batch=True)
    assert length == DraftLength(num_speculative_tokens=3)
    assert length.label == "3"


def test_a_table_of_several_is_taken_only_where_it_is_asked_for() -> None:
    record = _record(entry(1, 8, 7), entry(9, 48, 2))
    length = length_of(record, by_batch=True)
    assert length == DraftLength(num_speculative_tokens=7, schedule=record.schedule)
    assert length.label == "by_batch"
    assert length_of(record, by_batch=False) == DraftLength(num_speculative_tokens=3)


def test_a_table_that_the_autopilot_needs_is_labelled_with_its_one_k() -> None:
    assert DraftLength(num_speculative_tokens=5, schedule=constant(5)).label == "5"


def test_a_table_is_described_range_by_range() -> None:
    assert described((entry(1, 8, 7), entry(9, 48, 2))) == "1-8: 7, 9-48: 2"
