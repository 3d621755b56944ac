"""Speculation stops where it measurably loses, and comes back where it pays again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import ConfigError
from slipstream.drafts.length import AutopilotConfig, Decision, decide
from slipstream.records.steps import AutopilotStep

CONFIG = AutopilotConfig(enabled=True, patience_steps=3, probe_every_steps=4, margin=0.05)
Cost = Callable[[int, bool], float]


def flown(cost: Cost, num_steps: int, config: AutopilotConfig = CONFIG) -> list[AutopilotStep]:
    """Steps of a run whose step i costs `cost(i, speculates)`."""
    steps: list[AutopilotStep] = []
    for index in range(num_steps):
        decision = decide(steps, config)
        steps.append(
            AutopilotStep(
                speculates=decision.speculates,
                is_probe=decision.is_probe,
                token_ms=cost(index, decision.speculates),
                has_switched=decision.has_switched,
            )
        )
    return steps


def pattern(steps: list[AutopilotStep]) -> str:
    """S and P speculate, s and p do not; p and P are probes."""
    letters = {(True, False): "S", (True, True): "P", (False, False): "s", (False, True): "p"}
    return "".join(letters[step.speculates, step.is_probe] for step in steps)


def test_where_speculation_pays_it_is_probed_ever_more_rarely_and_never_left() -> None:
    steps = flown(lambda i, speculates: 1.0 if speculates else 2.0, 40)
    # The first step warms up, three say what speculation costs, then k = 0 is looked at; after 8 and 16 steps again.
    assert pattern(steps) == "SSSSp" + "SSSSSSSp" + "S" * 15 + "p" + "S" * 11


def test_where_speculation_loses_from_the_start_it_is_left_after_two_probes_that_agree() -> None:
    steps = flown(lambda i, speculates: 2.0 if speculates else 1.0, 24)
    # On: 4 steps, two probes, off. Then a probe of drafting after 4 steps, 8, ...
    assert pattern(steps) == "SSSSpp" + "ssssP" + "sssssssP" + "sssss"
    assert [index for index, step in enumerate(steps) if step.has_switched] == [6]


def test_a_draft_that_recovers_is_taken_up_again() -> None:
    steps = flown(lambda i, speculates: 1.0 if not speculates else 2.0 if i < 8 else 0.5, 20)
    assert pattern(steps) == "SSSSpp" + "ssss" + "PP" + "SSSSp" + "SSS"
    assert [index for index, step in enumerate(steps) if step.has_switched] == [6, 12]


def test_a_collapse_is_probed_at_once_after_the_steps_that_lost() -> None:
    steps = flown(lambda i, speculates: 1.0 if not speculates else 0.5 if i < 20 else 3.0, 30)
    # Steps 20 to 22 lose; 23 and 24 are probes that agree, 25 is off.
    assert pattern(steps)[20:26] == "SSSpps"


def test_one_slow_step_turns_nothing() -> None:
    steps = flown(lambda i, speculates: 9.0 if i == 8 else 1.0 if speculates else 2.0, 40)
    assert not any(step.has_switched for step in steps)


def test_the_first_step_which_pays_for_allocations_counts_for_nothing() -> None:
    steps = flown(lambda i, speculates: 99.0 if i == 0 else 1.0 if speculates else 2.0, 4)
    assert decide(steps, CONFIG).own_ms == 1.0


def test_a_decision_shows_the_median_of_the_last_steps_and_the_last_cost_of_the_other_way() -> None:
    costs = [99.0, 8.0, 1.0, 3.0, 2.0]

    def cost(index: int, speculates: bool) -> float:
        return costs[index] if speculates else 5.0

    assert decide([], CONFIG) == Decision(speculates=True, is_probe=False, has_switched=False)
    assert decide(flown(cost, 3), CONFIG) == Decision(speculates=True, is_probe=False, has_switched=False)
    assert decide(flown(cost, 4), CONFIG) == Decision(
        speculates=False, is_probe=True, has_switched=False, own_ms=3.0, other_ms=None
    )
    costs = [99.0, 8.0, 1.0, 3.0, 0.0, 2.0]
    assert decide(flown(cost, 6), CONFIG) == Decision(
        speculates=True, is_probe=False, has_switched=False, own_ms=2.0, other_ms=5.0
    )


def test_a_way_that_costs_more_by_the_margin_and_nothing_else_has_not_lost() -> None:
    """A quarter is exact in binary."""
    config = AutopilotConfig(enabled=True, patience_steps=2, probe_every_steps=4, margin=0.25)
    at, above = (flown(lambda i, speculates, cost=cost: cost if speculates else 4.0, 12, config) for cost in (5.0, 5.1))
    assert not any(step.has_switched for step in at)
    assert [index for index, step in enumerate(above) if step.has_switched] == [5]


def test_probes_that_are_older_than_the_steps_which_lose_turn_nothing() -> None:
    """Drafting costs 1, then 3 from step 9 on: beside the probe of step 12 that of step 4 is too old, so 13 is one."""
    steps = flown(lambda i, speculates: 2.0 if not speculates else 1.0 if i < 9 else 3.0, 16)
    assert pattern(steps) == "SSSSp" + "SSSSSSS" + "pp" + "ss"


def test_the_least_settings_are_taken() -> None:
    assert AutopilotConfig(patience_steps=2, probe_every_steps=1, margin=0.0).margin == 0.0


@given(
    ratio=st.floats(0.2, 1.049),
    noise=st.lists(st.floats(-0.02, 0.02), min_size=60, max_size=60),
    patience=st.integers(2, 5),
    every=st.integers(1, 10),
)
@settings(max_examples=60, deadline=None)
def test_speculation_that_does_not_lose_by_the_margin_is_never_left(
    ratio: float, noise: list[float], patience: int, every: int
) -> None:
    """Whatever noise leaves the ratio of any two steps below the margin."""
    config = AutopilotConfig(enabled=True, patience_steps=patience, probe_every_steps=every, margin=0.10)
    steps = flown(lambda i, speculates: (ratio if speculates else 1.0) * (1.0 + noise[i]), 60, config)
    assert not any(step.has_switched for step in steps)


@given(
    at=st.integers(0, 40),
    before=st.floats(0.2, 1.0),
    after=st.floats(1.2, 10.0),
    patience=st.integers(2, 5),
    every=st.integers(1, 10),
)
@settings(max_examples=100, deadline=None)
def test_after_a_collapse_so_many_steps_draft_as_patience_allows_and_then_none_but_probes(
    at: int, before: float, after: float, patience: int, every: int
) -> None:
    config = AutopilotConfig(enabled=True, patience_steps=patience, probe_every_steps=every)
    steps = flown(lambda i, speculates: 1.0 if not speculates else before if i < at else after, 80, config)
    drafted = [index for index, step in enumerate(steps) if index >= at and step.speculates and not step.is_probe]
    warm_up = 1 if at == 0 else 0
    assert len(drafted) <= patience + warm_up
    assert any(step.has_switched and not step.speculates for step in steps[at:])


@given(at=st.integers(10, 60), patience=st.integers(2, 5), every=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_drafting_that_pays_again_is_found_within_the_longest_interval(at: int, patience: int, every: int) -> None:
    config = AutopilotConfig(enabled=True, patience_steps=patience, probe_every_steps=every)
    longest = 8 * every + 2
    steps = flown(lambda i, speculates: 1.0 if not speculates else 3.0 if i < at else 0.5, at + longest + 1, config)
    assert steps[-1].speculates or any(step.has_switched and step.speculates for step in steps[at:])


@given(costs=st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0)), min_size=30, max_size=30))
@settings(max_examples=60, deadline=None)
def test_a_run_that_resumes_from_its_records_decides_as_if_it_had_not_stopped(
    costs: list[tuple[float, float]],
) -> None:
    steps = flown(lambda i, speculates: costs[i][speculates], 30)
    for stop in range(30):
        decision = decide(steps[:stop], CONFIG)
        taken = steps[stop]
        assert (decision.speculates, decision.is_probe, decision.has_switched) == (
            taken.speculates,
            taken.is_probe,
            taken.has_switched,
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patience_steps": 1}, "draft.autopilot.patience_steps must be >= 2, got 1"),
        ({"probe_every_steps": 0}, "draft.autopilot.probe_every_steps must be >= 1, got 0"),
        ({"margin": -0.1}, "draft.autopilot.margin must be >= 0, got -0.1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AutopilotConfig(**values)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_probes_and_turns_show_what_they_rest_on() -> None:
    steps = flown(lambda i, speculates: 2.0 if speculates else 1.0, 6)
    probe = Decision(speculates=False, is_probe=True, has_switched=False, own_ms=2.0, other_ms=1.0)
    assert decide(steps[:5], CONFIG) == probe
    assert decide(steps, CONFIG) == Decision(
        speculates=False, is_probe=False, has_switched=True, own_ms=2.0, other_ms=1.0
    )


def test_of_an_even_number_of_costs_the_upper_one_in_the_middle_is_shown() -> None:
    costs = [99.0, 4.0, 1.0, 3.0, 2.0]
    steps = flown(lambda i, speculates: costs[i], 5, replace(CONFIG, patience_steps=4))
    assert decide(steps, replace(CONFIG, patience_steps=4)).own_ms == 3.0
