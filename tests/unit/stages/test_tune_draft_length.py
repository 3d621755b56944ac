"""The first speedup of a run that is measured is told in one line."""

from __future__ import annotations

from slipstream.records.stages import SweepPoint
from slipstream.stages.tune_draft_length import first_speedup


def point(k: int, generation_s: float, speedup: float) -> SweepPoint:
    return SweepPoint(
        k=k,
        batch=16,
        generation_s=generation_s,
        generation_p10_s=generation_s,
        generation_p90_s=generation_s,
        num_repeats=5,
        autoregressive_s=4.0,
        speedup=speedup,
        mean_acceptance_length=2.0,
        rate_by_position=(0.5,),
    )


def test_the_first_speedup_is_the_best_of_the_first_batch_and_names_what_it_is_of() -> None:
    assert first_speedup([point(1, 3.0, 1.3), point(3, 2.0, 1.9), point(5, 2.5, 1.6)]) == (
        "first measured speedup: k=3 generates 1.90x as fast as autoregressive at batch 16 "
        "(4.00 -> 2.00 s, median of 5)"
    )


def test_a_loss_is_told_as_it_is() -> None:
    assert "k=1 generates 0.80x as fast" in first_speedup([point(1, 5.0, 0.8)])
