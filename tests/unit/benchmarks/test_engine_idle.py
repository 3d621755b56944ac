"""What the benchmark of dealing prints."""

from __future__ import annotations

import pytest

from benchmarks.engine_idle import Comparison, show_dealing
from slipstream.engine.protocol import GenerationResult


def result(idle: float, seconds: float) -> GenerationResult:
    return GenerationResult(groups=(), acceptance=None, generation_s=seconds, engine_idle_fraction=idle)


def test_medians_of_both_ways_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = Comparison(
        num_slots=8,
        num_rollouts=48,
        in_turn=(result(0.2, 3.0), result(0.3, 2.0), result(0.9, 9.0)),
        by_length=(result(0.1, 1.5), result(0.05, 2.5), result(0.0, 1.0)),
    )
    show_dealing([found], k=3)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "2 engines, each on one core, k=3, medians of 3 rounds:",
        "  48 rollouts, 8 at once an engine",
        "    in turn              idle  30.0%    generation   3.000 s",
        "    by expected length   idle   5.0%    generation   1.500 s",
    ]
