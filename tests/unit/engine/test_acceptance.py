"""Acceptance arithmetic, worked by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slipstream.engine.acceptance import (
    AcceptanceCounters,
    acceptance_between,
    combine,
    read_counters,
    sampling_deviation,
)
from slipstream.engine.protocol import GenerationResult, RunningTime, joined
from slipstream.records.steps import AcceptanceStats
from tests.unit.sampled import accepted


def counters(drafts: int, proposed: int, *accepted: int, drafted: tuple[int, ...] = ()) -> AcceptanceCounters:
    return AcceptanceCounters(
        num_drafts=drafts,
        num_draft_tokens=proposed,
        num_accepted_tokens=sum(accepted),
        accepted_by_position=accepted,
        drafted_by_position=drafted,
    )


def since_the_start(after: AcceptanceCounters) -> AcceptanceStats:
    none = (0,) * len(after.accepted_by_position)
    return acceptance_between(counters(0, 0, *none, drafted=none if after.drafted_by_position else ()), after)


def test_acceptance_comes_from_the_deltas_of_the_counters() -> None:
    stats = acceptance_between(counters(100, 300, 60, 40, 20), counters(110, 330, 68, 45, 22))
    # 10 drafts of 3 tokens, 15 of 30 accepted: 8, 5 and 2 by position.
    assert stats == AcceptanceStats(
        num_drafts=10,
        num_draft_tokens=30,
        num_accepted_tokens=15,
        accepted_by_position=(8, 5, 2),
        mean_acceptance_length=2.5,
        acceptance_rate=0.5,
        rate_by_position=(0.8, 0.5, 0.2),
    )


def test_a_positions_rate_is_over_the_drafts_that_had_a_token_there() -> None:
    """10 drafts, 4 of them of 3 tokens and 6 of one: 9, 3 and 1 are accepted."""
    before, after = counters(5, 7, 4, 1, 0, drafted=(5, 1, 1)), counters(15, 25, 13, 4, 1, drafted=(15, 5, 5))
    stats = acceptance_between(before, after)
    assert (stats.drafted_by_position, stats.num_draft_tokens) == ((10, 4, 4), 18)
    assert stats.rate_by_position == (0.9, 0.75, 0.25)
    assert (stats.mean_acceptance_length, stats.acceptance_rate) == (1 + 13 / 10, 13 / 18)


@pytest.mark.parametrize(
    ("after", "length", "rate", "by_position"),
    [
        (counters(4, 8, 4, 4), 3.0, 1.0, (1.0, 1.0)),
        (counters(0, 0, 0, 0), 1.0, 0.0, (0.0, 0.0)),
        (counters(3, 3, 2, 0, drafted=(3, 0)), 1 + 2 / 3, 2 / 3, (2 / 3, 0.0)),
    ],
    ids=["everything is accepted", "nothing was drafted", "a position that no draft reached"],
)
def test_whole_and_empty_counts_agree(
    after: AcceptanceCounters, length: float, rate: float, by_position: tuple[float, ...]
) -> None:
    stats = since_the_start(after)
    assert (stats.mean_acceptance_length, stats.acceptance_rate, stats.rate_by_position) == (length, rate, by_position)


@pytest.mark.parametrize(
    "after",
    [
        counters(4, 8, 5, 4),  # more accepted than drafted
        counters(4, 8, 5, 0),  # the first position accepted more often than there were drafts
        counters(4, 8, -1, 0),
        counters(-1, 0, 0, 0),
        replace(counters(10, 20, 6, 2), num_accepted_tokens=9),  # the positions do not sum to the accepted tokens
        counters(3, 4, 2, 2, drafted=(3, 1)),  # a second token accepted more often than drafted
        counters(3, 6, 2, 1, drafted=(4, 2)),  # more first tokens than drafts
        counters(3, 5, 2, 1, drafted=(3, 1)),  # 3 + 1 tokens were drafted
    ],
)
def test_counts_that_no_engine_can_reach_are_an_error(after: AcceptanceCounters) -> None:
    with pytest.raises(RuntimeError) as caught:
        since_the_start(after)
    assert str(caught.value) == f"acceptance counters contradict each other: {after}"


def test_two_readings_of_another_number_of_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        acceptance_between(counters(0, 0, 0, 0), counters(1, 1, 1))


def test_spans_combine_by_their_counts_not_by_their_rates() -> None:
    assert combine([since_the_start(counters(1, 1, 1)), since_the_start(counters(9, 9, 0))]) == AcceptanceStats(
        num_drafts=10,
        num_draft_tokens=10,
        num_accepted_tokens=1,
        accepted_by_position=(1,),
        mean_acceptance_length=1.1,
        acceptance_rate=0.1,
        rate_by_position=(0.1,),
    )
    with pytest.raises(ValueError, match=r"^parts must hold at least one span, got none$"):
        combine([])


def test_spans_with_drafts_of_different_counted_and_equal_lengths_combine() -> None:
    one, two = since_the_start(counters(2, 2, 1)), since_the_start(counters(2, 4, 2, 1))
    both = combine([one, two])
    assert (both.num_drafts, both.num_accepted_tokens, both.accepted_by_position) == (4, 4, (3, 1))
    assert (both.mean_acceptance_length, both.rate_by_position) == (2.0, (0.75, 0.5))  # two had a second token
    both = combine([since_the_start(counters(4, 6, 3, 1, drafted=(4, 2))), two])
    assert (both.drafted_by_position, both.rate_by_position) == ((6, 4), (5 / 6, 2 / 4))
    assert combine([two, two]).drafted_by_position == ()


def test_sampling_deviation_by_hand() -> None:
    """Half of 100 drafts have one token accepted, the others none: variance 1/4, standard error 1/2 / 10."""
    assert sampling_deviation(accepted(100, 50, 0)) == pytest.approx(0.05)
    # Half of them have two: mean 1, mean square 2, variance 1.
    assert sampling_deviation(accepted(100, 50, 50)) == pytest.approx(0.1)
    assert sampling_deviation(accepted(0, 0, 0)) == 0.0


PREFIX = "vllm:spec_decode_num_"
METRICS = [
    SimpleNamespace(name="vllm:num_requests_running", value=3),
    SimpleNamespace(name=f"{PREFIX}drafts", value=4.0),
    SimpleNamespace(name=f"{PREFIX}draft_tokens", value=8.0),
    SimpleNamespace(name=f"{PREFIX}accepted_tokens", value=5.0),
    SimpleNamespace(name=f"{PREFIX}accepted_tokens_per_pos", values=[3.0, 2.0]),
]


@pytest.mark.parametrize("missing", ["drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"])
def test_each_counter_is_the_one_of_its_name_and_one_that_vllm_does_not_report_is_an_error(missing: str) -> None:
    assert read_counters(METRICS, drafted_by_position=[4, 4]) == counters(4, 8, 3, 2, drafted=(4, 4))
    with pytest.raises(RuntimeError) as caught:
        read_counters([metric for metric in METRICS if metric.name != PREFIX + missing])
    assert str(caught.value) == f"vLLM reports no counter {PREFIX}{missing}: acceptance is unknown"


def test_results_of_calls_are_joined_with_idle_engines_weighed_by_time() -> None:
    """Engines idle for 0.5 of 1 s and for 0.1 of 3 s: 0.8 s of 4. A call that drafted nothing has no acceptance."""
    running = RunningTime(num_running=2, num_steps=1, num_tokens=2, elapsed_s=0.5)
    first = GenerationResult(
        groups=(), acceptance=accepted(10, 8, 4, 0), generation_s=1.0, engine_idle_fraction=0.5, running=(running,)
    )
    counts = {"num_engine_restarts": 1, "num_regenerated": 4}
    second = replace(first, acceptance=None, generation_s=3.0, engine_idle_fraction=0.1, **counts)
    assert joined([first, second]) == replace(
        first,
        **counts,
        generation_s=4.0,
        engine_idle_fraction=pytest.approx(0.2),
        running=(RunningTime(num_running=2, num_steps=2, num_tokens=4, elapsed_s=1.0),),
        num_calls=2,
        extra_generation_s=3.0,
    )
    assert joined([first]) is first
