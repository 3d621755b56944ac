"""Acceptance arithmetic, worked by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slipstream.engine.acceptance import acceptance_of, combine, sampling_deviation
from slipstream.engine.protocol import GenerationResult, RunningTime, joined
from slipstream.records.steps import AcceptanceStats
from tests.unit.sampled import accepted


def counts(drafts: int, proposed: int, *accepted: int, drafted: tuple[int, ...] = ()) -> SimpleNamespace:
    """Counts of a step as vLLM has them; by default all its drafts have a token at each position."""
    return SimpleNamespace(
        num_drafts=drafts,
        num_draft_tokens=proposed,
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=list(accepted),
        num_draft_tokens_per_pos=list(drafted or (drafts,) * len(accepted)),
    )


def of(*steps: SimpleNamespace) -> AcceptanceStats:
    return acceptance_of(steps, num_positions=len(steps[0].num_accepted_tokens_per_pos))


def of_one_length(*args: int) -> AcceptanceStats:
    return replace(of(counts(*args)), drafted_by_position=())


def test_acceptance_comes_from_the_counts_of_the_steps() -> None:
    stats = of(counts(4, 12, 3, 2, 1), counts(6, 18, 5, 3, 1))
    # 10 drafts of 3 tokens, 15 of 30 accepted: 8, 5 and 2 by position.
    assert stats == AcceptanceStats(
        num_drafts=10,
        num_draft_tokens=30,
        num_accepted_tokens=15,
        accepted_by_position=(8, 5, 2),
        mean_acceptance_length=2.5,
        acceptance_rate=0.5,
        rate_by_position=(0.8, 0.5, 0.2),
        drafted_by_position=(10, 10, 10),
    )


def test_a_positions_rate_is_over_the_drafts_that_had_a_token_there() -> None:
    """10 drafts, 4 of them of 3 tokens and 6 of one: 9, 3 and 1 are accepted."""
    stats = of(counts(10, 18, 9, 3, 1, drafted=(10, 4, 4)))
    assert (stats.drafted_by_position, stats.num_draft_tokens) == ((10, 4, 4), 18)
    assert stats.rate_by_position == (0.9, 0.75, 0.25)
    assert (stats.mean_acceptance_length, stats.acceptance_rate) == (1 + 13 / 10, 13 / 18)


@pytest.mark.parametrize(
    ("step", "length", "rate", "by_position"),
    [
        (counts(4, 8, 4, 4), 3.0, 1.0, (1.0, 1.0)),
        (counts(0, 0, 0, 0), 1.0, 0.0, (0.0, 0.0)),
        (counts(3, 3, 2, 0, drafted=(3, 0)), 1 + 2 / 3, 2 / 3, (2 / 3, 0.0)),
    ],
    ids=["everything is accepted", "nothing was drafted", "a position that no draft reached"],
)
def test_whole_and_empty_counts_agree(
    step: SimpleNamespace, length: float, rate: float, by_position: tuple[float, ...]
) -> None:
    stats = of(step)
    assert (stats.mean_acceptance_length, stats.acceptance_rate, stats.rate_by_position) == (length, rate, by_position)


@pytest.mark.parametrize(
    "step",
    [
        counts(4, 8, 5, 4),  # more accepted than drafted
        counts(4, 8, 5, 0),  # the first position accepted more often than there were drafts
        counts(4, 8, -1, 0),
        counts(-1, 0, 0, 0),
        SimpleNamespace(**vars(counts(10, 20, 6, 2)) | {"num_accepted_tokens": 9}),  # not the sum over positions
        counts(3, 4, 2, 2, drafted=(3, 1)),  # a second token accepted more often than drafted
        counts(3, 6, 2, 1, drafted=(4, 2)),  # more first tokens than drafts
        counts(3, 5, 2, 1, drafted=(3, 1)),  # 3 + 1 tokens were drafted
    ],
)
def test_counts_that_no_engine_can_reach_are_an_error(step: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError) as caught:
        of(step)
    told = f"{step.num_accepted_tokens} of {step.num_draft_tokens} tokens in {step.num_drafts} drafts, by position "
    assert str(caught.value).startswith(f"acceptance counts contradict each other: {told}")


def test_spans_combine_by_their_counts_not_by_their_rates() -> None:
    assert combine([of_one_length(1, 1, 1), of_one_length(9, 9, 0)]) == AcceptanceStats(
        num_drafts=10,
        num_draft_tokens=10,
        num_accepted_tokens=1,
        accepted_by_position=(1,),
        mean_acceptance_length=1.1,
        acceptance_rate=0.1,
        rate_by_position=(0.1,),
    )


def test_spans_with_drafts_of_different_counted_and_equal_lengths_combine() -> None:
    one, two = of_one_length(2, 2, 1), of_one_length(2, 4, 2, 1)
    both = combine([one, two])
    assert (both.num_drafts, both.num_accepted_tokens, both.accepted_by_position) == (4, 4, (3, 1))
    assert (both.mean_acceptance_length, both.rate_by_position) == (2.0, (0.75, 0.5))  # two had a second token
    both = combine([of(counts(4, 6, 3, 1, drafted=(4, 2))), two])
    assert (both.drafted_by_position, both.rate_by_position) == ((6, 4), (5 / 6, 2 / 4))
    assert combine([two, two]).drafted_by_position == ()


def test_sampling_deviation_by_hand() -> None:
    """Half of 100 drafts have one token accepted, the others none: variance 1/4, standard error 1/2 / 10."""
    assert sampling_deviation(accepted(100, 50, 0)) == pytest.approx(0.05)
    # Half of them have two: mean 1, mean square 2, variance 1.
    assert sampling_deviation(accepted(100, 50, 50)) == pytest.approx(0.1)
    assert sampling_deviation(accepted(0, 0, 0)) == 0.0


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
