"""Group-relative advantages against values worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.grpo.advantages import group_advantages


def test_rewards_are_centred_on_their_groups_mean() -> None:
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    expected = torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]])
    torch.testing.assert_close(group_advantages(rewards_PG), expected, rtol=0, atol=0)


def test_scaling_divides_by_the_sample_standard_deviation() -> None:
    # mean 2, deviations -1, 0, 1: variance (1 + 0 + 1) / 2 = 1
    advantages = group_advantages(torch.tensor([[1.0, 2.0, 3.0]]), scale_by_std=True, eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.0, 1.0]]), rtol=0, atol=0)


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_equal_rewards_give_exactly_zero_even_where_their_mean_rounds(scale_by_std: bool) -> None:
    rewards_PG = torch.full((1, 7), 0.1)
    assert (rewards_PG - rewards_PG.mean()).abs().max() > 0  # the trap: the mean of seven tenths is not a tenth
    assert group_advantages(rewards_PG, scale_by_std=scale_by_std).abs().max() == 0


@pytest.mark.parametrize("shape", [(3, 1), (3,), (3, 0)])
def test_a_group_of_one_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="G >= 2"):
        group_advantages(torch.zeros(shape))


@given(st.lists(st.lists(st.floats(-4, 4, width=32), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(-3, 3))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_all_rewards(rewards: list[list[float]], shift: float) -> None:
    rewards_PG = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(rewards_PG)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(len(rewards), dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(group_advantages(rewards_PG + shift), advantages, rtol=0, atol=1e-12)


def test_what_is_added_to_the_deviation_is_added_to_it() -> None:
    # deviation sqrt(1/2) of (0, 1): 0.5 / (sqrt(1/2) + 1/2)
    advantages = group_advantages(torch.tensor([[0.0, 1.0]]), scale_by_std=True, eps=0.5)
    expected = 0.5 / (0.5**0.5 + 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-expected, expected]]))


def test_each_group_is_scaled_by_its_own_deviation() -> None:
    advantages = group_advantages(torch.tensor([[0.0, 2.0], [0.0, 20.0], [5.0, 5.0]]), scale_by_std=True)
    half = 0.5**0.5
    expected = torch.tensor([[-half, half], [-half, half], [0.0, 0.0]])
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)


def test_a_refusal_gives_the_shape() -> None:
    with pytest.raises(ValueError) as caught:
        group_advantages(torch.zeros(3, 1))
    assert str(caught.value) == "rewards must be [P, G] with G >= 2, got shape (3, 1)"
