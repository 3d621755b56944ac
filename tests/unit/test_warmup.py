"""Steps that warm up are left out by their times, and steps of a stationary series are not."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from slipstream.records.steps import ArmRecord, by_loop, num_warmup
from slipstream.types import Arm
from tests.unit.report.handmade import ASYNCHRONOUS, step

USUAL = (8.0, 9.0, 10.0, 8.5, 9.5, 8.0, 9.0, 10.0, 8.5, 9.5, 9.0, 9.0)
"""Twelve steps: the slowest but one takes 10 s, the fastest 8, so that warm-up takes more than 10 * 10 / 8 = 12.5 s."""


def arm(seconds: Sequence[float], kind: Arm = Arm.AUTOREGRESSIVE) -> ArmRecord:
    steps = (step(index, generation_s=each - 2.0, reward=0.0) for index, each in enumerate(seconds))
    return ArmRecord(arm=kind, num_speculative_tokens=0, steps=tuple(steps))


@pytest.mark.parametrize(
    ("first", "number"),
    [
        *(((50.0, 9.0, 9.0), 1), ((50.0, 12.4, 12.4), 1), ((50.0, 12.6, 9.0), 2), ((50.0, 30.0, 12.6), 3)),
        *(((50.0, 12.4, 50.0), 1), ((9.0, 9.0, 9.0), 1)),  # a slow step later is none of the warm-up
    ],
)
def test_steps_are_left_out_while_they_stand_out(first: tuple[float, ...], number: int) -> None:
    assert num_warmup([arm(first + USUAL)]) == number
    assert num_warmup([arm(first + USUAL + (100.0,) * 5)]) == number  # twelve steps are compared, and no later ones


@pytest.mark.parametrize("place", range(12))
def test_one_slow_step_later_hides_no_warm_up_and_makes_none(place: int) -> None:
    slow = [*USUAL[:place], 40.0, *USUAL[place + 1 :]]
    assert num_warmup([arm([50.0, 30.0, 9.0, *slow])]) == 2
    assert num_warmup([arm([50.0, 9.0, 9.0, *slow])]) == 1


@pytest.mark.parametrize("num_steps", [1, 2, 5, 14])
def test_of_few_steps_the_first_alone_is_left_out(num_steps: int) -> None:
    """The same steps with one more are enough to tell."""
    seconds = (50.0, 30.0, 30.0, *USUAL)
    assert num_warmup([arm(seconds[:num_steps])]) == 1
    assert num_warmup([arm(seconds)]) == 3


def test_all_arms_of_a_run_leave_out_as_many_as_the_slowest_to_warm_up_and_never_more_than_three() -> None:
    quick, slow = arm((50.0, 9.0, 9.0, *USUAL)), arm((50.0, 30.0, 9.0, *USUAL), Arm.SPECULATIVE)
    overlapping = replace(ASYNCHRONOUS.asynchronous[0], steps=quick.steps)
    synchronous, asynchronous = by_loop([quick, slow, overlapping])
    assert [len(each.timed_steps) for each in (*synchronous, *asynchronous)] == [13, 13, 13]
    assert [len(each.timed_steps) for each in by_loop([quick, overlapping])[0]] == [14]
    assert num_warmup([]) == 1
    assert num_warmup([arm((50.0,) * 4 + USUAL)]) == 3


def stationary(rng: np.random.Generator, correlation: float, slow_fraction: float) -> ArmRecord:
    """24 steps that spread by 10 %, neighbours alike, some of them slower by half on average."""
    noise = rng.standard_normal(24)
    for index in range(1, 24):
        noise[index] = correlation * noise[index - 1] + np.sqrt(1 - correlation**2) * noise[index]
    slow = (rng.random(24) < slow_fraction) * rng.exponential(0.4, 24)
    return arm([*map(float, 10.0 * np.exp(0.1 * noise + slow))])


@pytest.mark.parametrize(("correlation", "slow_fraction"), [(0.0, 0.0), (0.5, 0.0), (0.8, 0.0), (0.0, 0.05)])
def test_of_stationary_arms_few_lose_more_than_the_first_step(correlation: float, slow_fraction: float) -> None:
    rng = np.random.default_rng(0)
    pairs = [[stationary(rng, correlation, slow_fraction) for _ in range(2)] for _ in range(500)]
    assert sum(num_warmup(pair) > 1 for pair in pairs) / len(pairs) <= 0.05


def test_a_second_step_that_takes_twice_as_long_is_found_in_nine_runs_of_ten() -> None:
    """Of steps that spread by 10 %."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(200):
        seconds = [each.times.step_s for each in stationary(rng, 0.0, 0.0).steps]
        found += num_warmup([arm([seconds[0], 2 * seconds[1], *seconds[2:]])]) > 1
    assert found / 200 >= 0.9
