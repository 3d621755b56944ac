"""Acceptance arithmetic, worked by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slipstream.engine.acceptance import AcceptanceCounters, acceptance_between, combine, read_counters
from slipstream.engine.protocol import GenerationResult, RunningTime, joined
from slipstream.records.steps import AcceptanceStats
from tests.unit.sampled import accepted


def _counters(drafts: int, proposed: int, accepted: int, *positions: int) -> AcceptanceCounters:
    return AcceptanceCounters(
        num_drafts=drafts, num_draft_tokens=proposed, num_accepted_tokens=accepted, accepted_by_position=positions
    )


def test_acceptance_comes_from_the_deltas_of_the_counters() -> None:
    stats = acceptance_between(_counters(100, 300, 120, 60, 40, 20), _counters(110, 330, 135, 68, 45, 22))
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


def test_everything_accepted_is_no_contradiction() -> None:
    stats = acceptance_between(_counters(0, 0, 0, 0, 0), _counters(4, 8, 8, 4, 4))
    assert (stats.acceptance_rate, stats.rate_by_position) == (1.0, (1.0, 1.0))


@pytest.mark.parametrize(
    "after",
    [
        _counters(4, 8, 9, 5, 4),  # more accepted than drafted
        _counters(4, 8, 5, 5, 0),  # the first position accepted more often than there were drafts
        _counters(4, 8, -1, -1, 0),
        _counters(-1, 0, 0, 0, 0),
        _counters(10, 20, 9, 6, 2),  # the positions do not sum to the accepted tokens
    ],
)
def test_counts_that_no_engine_can_reach_are_an_error(after: AcceptanceCounters) -> None:
    with pytest.raises(RuntimeError) as caught:
        acceptance_between(_counters(0, 0, 0, 0, 0), after)
    assert str(caught.value) == f"acceptance counters contradict each other: {after}"


def test_two_readings_of_another_number_of_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        acceptance_between(_counters(0, 0, 0, 0, 0), _counters(1, 1, 1, 1))


def test_spans_with_drafts_of_different_lengths_combine() -> None:
    one = acceptance_between(_counters(0, 0, 0, 0), _counters(2, 2, 1, 1))
    two = acceptance_between(_counters(0, 0, 0, 0, 0), _counters(2, 4, 3, 2, 1))
    both = combine([one, two])
    assert (both.num_drafts, both.num_accepted_tokens, both.accepted_by_position) == (4, 4, (3, 1))
    assert (both.mean_acceptance_length, both.rate_by_position) == (2.0, (0.75, 0.5))  # two had a second token


def test_a_span_without_drafts_has_acceptance_length_one() -> None:
    stats = acceptance_between(_counters(5, 10, 4, 3, 1), _counters(5, 10, 4, 3, 1))
    assert (stats.mean_acceptance_length, stats.acceptance_rate, stats.rate_by_position) == (1.0, 0.0, (0.0, 0.0))


def test_spans_combine_by_their_counts_not_by_their_rates() -> None:
    zero = _counters(0, 0, 0, 0)
    merged = combine([acceptance_between(zero, _counters(1, 1, 1, 1)), acceptance_between(zero, _counters(9, 9, 0, 0))])
    assert merged == AcceptanceStats(
        num_drafts=10,
        num_draft_tokens=10,
        num_accepted_tokens=1,
        accepted_by_position=(1,),
        mean_acceptance_length=1.1,
        acceptance_rate=0.1,
        rate_by_position=(0.1,),
    )


def test_nothing_to_combine_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^parts must hold at least one span, got none$"):
        combine([])


METRICS = [
    SimpleNamespace(name="vllm:num_requests_running", value=3),
    SimpleNamespace(name="vllm:spec_decode_num_drafts", value=4.0),
    SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=8.0),
    SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=5.0),
    SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[3.0, 2.0]),
]


def test_each_counter_is_the_one_of_its_name() -> None:
    assert read_counters(METRICS) == _counters(4, 8, 5, 3, 2)
    assert read_counters(METRICS, drafted_by_position=[4, 4]).drafted_by_position == (4, 4)


@pytest.mark.parametrize("missing", ["drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"])
def test_a_counter_that_vllm_does_not_report_is_an_error_and_no_zero(missing: str) -> None:
    name = f"vllm:spec_decode_num_{missing}"
    with pytest.raises(RuntimeError) as caught:
        read_counters([metric for metric in METRICS if metric.name != name])
    assert str(caught.value) == f"vLLM reports no counter {name}: acceptance is unknown"


def _drafted(drafts: int, accepted: tuple[int, ...], drafted: tuple[int, ...]) -> AcceptanceCounters:
    return AcceptanceCounters(
        num_drafts=drafts,
        num_draft_tokens=sum(drafted),
        num_accepted_tokens=sum(accepted),
        accepted_by_position=accepted,
        drafted_by_position=drafted,
    )


def test_a_positions_rate_is_over_the_drafts_that_had_a_token_there() -> None:
    """10 drafts, 4 of them of 3 tokens and 6 of one: 9, 3 and 1 are accepted."""
    stats = acceptance_between(_drafted(5, (4, 1, 0), (5, 1, 1)), _drafted(15, (13, 4, 1), (15, 5, 5)))
    assert (stats.drafted_by_position, stats.num_draft_tokens) == ((10, 4, 4), 18)
    assert stats.rate_by_position == (0.9, 0.75, 0.25)
    assert stats.mean_acceptance_length == 1 + 13 / 10
    assert stats.acceptance_rate == 13 / 18


def test_a_position_that_no_draft_reached_has_rate_0() -> None:
    stats = acceptance_between(_drafted(0, (0, 0), (0, 0)), _drafted(3, (2, 0), (3, 0)))
    assert stats.rate_by_position == (2 / 3, 0.0)


@pytest.mark.parametrize(
    "after",
    [
        _drafted(3, (2, 2), (3, 1)),  # a second token accepted more often than drafted
        _drafted(3, (2, 1), (4, 2)),  # more first tokens than drafts
        replace(_drafted(3, (2, 1), (3, 1)), num_draft_tokens=5),  # 3 + 1 tokens were drafted
    ],
)
def test_counts_by_position_that_no_engine_can_reach_are_an_error(after: AcceptanceCounters) -> None:
    with pytest.raises(RuntimeError, match="contradict each other"):
        acceptance_between(_drafted(0, (0, 0), (0, 0)), after)


def test_drafts_of_counted_and_of_equal_lengths_combine() -> None:
    counted = acceptance_between(_drafted(0, (0, 0), (0, 0)), _drafted(4, (3, 1), (4, 2)))
    equal = acceptance_between(_counters(0, 0, 0, 0, 0), _counters(2, 4, 3, 2, 1))
    both = combine([counted, equal])
    assert (both.drafted_by_position, both.rate_by_position) == ((6, 4), (5 / 6, 2 / 4))
    assert combine([equal, equal]).drafted_by_position == ()


def test_results_of_calls_are_joined_with_idle_engines_weighed_by_time() -> None:
    """Engines idle for 0.5 of 1 s and for 0.1 of 3 s: 0.8 s of 4. A call that drafted nothing has no acceptance."""
    running = RunningTime(num_running=2, num_steps=1, num_tokens=2, elapsed_s=0.5)
    first = GenerationResult(
        groups=(), acceptance=accepted(10, 8, 4, 0), generation_s=1.0, engine_idle_fraction=0.5, running=(running,)
    )
    second = replace(
        first, acceptance=None, generation_s=3.0, num_engine_restarts=1, num_regenerated=4, engine_idle_fraction=0.1
    )
    found = joined([first, second])
    assert found == replace(
        first,
        generation_s=4.0,
        num_engine_restarts=1,
        num_regenerated=4,
        engine_idle_fraction=pytest.approx(0.2),
        running=(RunningTime(num_running=2, num_steps=2, num_tokens=4, elapsed_s=1.0),),
        num_calls=2,
        extra_generation_s=3.0,
    )
    assert joined([first]) is first
