"""The policy loss against values worked by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.grpo.config import KlEstimator, LossConfig, LossKind
from slipstream.grpo.correction import Weights, corrected
from slipstream.grpo.loss import PolicyLoss, divisor, group_advantages, policy_loss


def _loss(ratios: list[float], advantage: float, config: LossConfig, **given: Any) -> PolicyLoss:
    logprobs_BT = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    return _of(logprobs_BT, advantage, config=config, **given)


def _of(logprobs_BT: torch.Tensor, advantage: float = 0.0, **given: Any) -> PolicyLoss:
    """The loss of one sequence; by default its trainer logprobs are 0, and all its tokens count."""
    plain = {
        "trainer_logprobs_BT": torch.zeros_like(logprobs_BT),
        "advantages_BT": torch.full((1, 1), advantage, dtype=logprobs_BT.dtype),
        "mask_BT": torch.ones(logprobs_BT.shape, dtype=torch.bool),
        "places": [(0, slice(None))],
    }
    return policy_loss(logprobs_BT, **{**plain, **given})


def _gradient(logprobs_BT: Tensor, loss: Tensor) -> Tensor:
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return gradient_BT


def _log(*chances: float) -> Tensor:
    """[1, T]."""
    return torch.tensor([chances], dtype=torch.float64).log()


def _capped(log_ratio_BT: Tensor, config: LossConfig) -> Weights | None:
    return corrected(log_ratio_BT, torch.ones_like(log_ratio_BT, dtype=torch.bool), [(0, slice(None))], config)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "num_clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.2, 2.0, -2.4, 0),  # within 1 + 0.28
        (1.5, 2.0, -2.56, 1),  # clipped at 1.28
        (0.5, 2.0, -1.0, 0),  # a good token that became rarer is not held back
        (0.5, -2.0, 1.6, 1),  # clipped at 0.8
        (1.5, -2.0, 3.0, 0),  # a bad token that became likelier is not held back
    ],
)
def test_the_clip_bounds_only_the_gain(ratio: float, advantage: float, expected: float, num_clipped: int) -> None:
    got = _loss([ratio], advantage, LossConfig())
    assert got.loss.item() == pytest.approx(expected)
    assert got.num_clipped.item() == num_clipped


def test_a_clipped_token_has_no_gradient_and_padding_may_hold_anything() -> None:
    logprobs_BT = torch.tensor([[math.log(1.5), math.log(1.1), math.nan, math.inf]], requires_grad=True)
    got = _of(logprobs_BT, 1.0, mask_BT=torch.tensor([[True, True, False, False]]), config=LossConfig())
    assert (got.loss.item(), got.num_clipped.item()) == (pytest.approx(-(1.28 + 1.1)), 1)
    # d(-r A)/d(log r) = -r A
    torch.testing.assert_close(_gradient(logprobs_BT, got.loss)[:, :2], torch.tensor([[0.0, -1.1]]))


@pytest.mark.parametrize(
    ("estimator", "expected", "gradient"),
    [
        # g = log(0.25 / 0.5) = -log 2; -g, g^2 / 2 and exp(g) - g - 1, and their derivatives 1, -g and 1 - exp(g)
        (KlEstimator.K1, math.log(2.0), 1.0),
        (KlEstimator.K2, math.log(2.0) ** 2 / 2, math.log(2.0)),
        (KlEstimator.K3, math.log(2.0) - 0.5, 0.5),
    ],
)
def test_each_kl_estimator_has_its_value_and_gradient(estimator: KlEstimator, expected: float, gradient: float) -> None:
    """A token of probability 0.5 under the policy and 0.25 under the reference."""
    logprobs_BT = _log(0.5).requires_grad_()
    given: Any = {"trainer_logprobs_BT": logprobs_BT.detach(), "ref_logprobs_BT": _log(0.25)}
    got = _of(logprobs_BT, config=LossConfig(kl_coefficient=0.1, kl_estimator=estimator), **given)
    assert got.kl_sum.item() == pytest.approx(expected)
    assert got.loss.item() == pytest.approx(0.1 * expected)
    assert _gradient(logprobs_BT, got.loss).item() == pytest.approx(0.1 * gradient)


@pytest.mark.parametrize("kind", list(LossKind))
def test_a_prompts_token_changes_nothing_however_unlikely_it_is(kind: LossKind) -> None:
    """The logprobs of a reference at a prompt's token are 0, so k3 of this one overflows."""
    values, prompt = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-100.0]])
    config = LossConfig(kind=kind, clip_low=0.04, clip_high=0.05, kl_coefficient=0.1)
    found = []
    for logprobs_BT, num_prompt in ((values, 0), (torch.cat([prompt, values], dim=1), 1)):
        logprobs_BT = logprobs_BT.clone().requires_grad_()
        zeros = torch.zeros(1, num_prompt)
        given = {
            "trainer_logprobs_BT": torch.cat([zeros, values + 0.1], dim=1),
            "mask_BT": torch.tensor([[False] * num_prompt + [True, True]]),
            "ref_logprobs_BT": torch.cat([zeros, values - 0.1], dim=1),
        }
        loss = _of(logprobs_BT, 1.0, config=config, **given).loss
        of_prompt, of_response = _gradient(logprobs_BT, loss)[0].tensor_split([num_prompt])
        assert of_prompt.tolist() == [0.0] * num_prompt
        found.append([loss.item(), *of_response.tolist()])
    assert found[1] == pytest.approx(found[0])


def test_truncated_importance_sampling_weighs_by_the_capped_ratio_to_the_engine() -> None:
    # trainer / rollout = 1 / 0.25 = 4, capped at 2, and 1 / 2 = 0.5
    config = LossConfig(truncated_importance_sampling=2.0)
    got = _loss([1.0, 1.0], 1.0, config, weights=_capped(-_log(0.25, 2.0), config))
    assert got.loss.item() == pytest.approx(-(2.0 + 0.5))


S = 0.825 ** (1 / 3)  # geometric mean of 1.5, 1.1 and 0.5
LOG = math.log


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("config", "expected", "num_clipped", "gradient"),
    [
        # -(1.28 x 2), -(1.1 x 2), -(0.5 x 2); 0.8 x 2: over 4 tokens
        (LossConfig(), -(2.56 + 2.2 + 1.0 - 1.6) / 4, 2, [0.0, -2.2 / 4, -1.0 / 4, 0.0]),
        # the means of 3 tokens and of 1, over 2 responses
        (LossConfig(kind=LossKind.GRPO), (-5.76 / 3 + 1.6) / 2, 2, [0.0, -2.2 / 6, -1.0 / 6, 0.0]),
        # over 2 responses x 10 tokens
        (LossConfig(kind=LossKind.DR_GRPO), -4.16 / 20, 2, [0.0, -0.11, -0.05, 0.0]),
        # s = 0.938 gains less than 0.96, and stays; 0.5 x -2 is clipped to 0.96 x -2
        (LossConfig(kind=LossKind.GSPO, clip_low=0.04, clip_high=0.05), -S + 0.96, 1, [-S / 3] * 3 + [0.0]),
        # weights 1.28, 1.1, 0.8 and 0.8, three of them clipped, and each token has a gradient
        (
            LossConfig(kind=LossKind.CISPO),
            (-2 * (1.28 * LOG(1.5) + 1.1 * LOG(1.1) + 0.8 * LOG(0.5)) + 2 * 0.8 * LOG(0.5)) / 4,
            3,
            [-2.56 / 4, -2.2 / 4, -1.6 / 4, 1.6 / 4],
        ),
        # the responses' logprobs log 0.825 and log 0.5, over 2 responses
        (LossConfig(kind=LossKind.RLOO), (-2 * LOG(0.825) + 2 * LOG(0.5)) / 2, 0, [-1.0, -1.0, -1.0, 1.0]),
    ],
    ids=[kind.value for kind in LossKind],
)
def test_each_kind_of_loss_has_its_value_and_gradient(
    config: LossConfig, expected: float, num_clipped: int, gradient: list[float], is_packed: bool
) -> None:
    """Responses of ratios 1.5, 1.1, 0.5 with advantage 2, and 0.5 with -2; the padding is far away."""
    mask_BT = torch.tensor([[True, True, True], [False, False, True]])
    ratios_BT = torch.tensor([[1.5, 1.1, 0.5], [9.0, 9.0, 0.5]], dtype=torch.float64)
    advantages_BT = torch.tensor([[2.0], [-2.0]], dtype=torch.float64).expand(2, 3)
    places = [(0, slice(None)), (1, slice(None))]
    if is_packed:
        mask_BT, ratios_BT, advantages_BT = (each.reshape(1, 6) for each in (mask_BT, ratios_BT, advantages_BT))
        places = [(0, slice(0, 3)), (0, slice(3, 6))]
    logprobs_BT = ratios_BT.log().requires_grad_()
    by = divisor(config.kind, num_tokens=4, num_responses=2, max_response_tokens=10)
    got = _of(logprobs_BT, advantages_BT=advantages_BT, mask_BT=mask_BT, places=places, config=config)
    assert (got.loss.item() / by, got.num_clipped.item()) == (pytest.approx(expected), num_clipped)
    gradient_BT = _gradient(logprobs_BT, got.loss / by)
    assert gradient_BT[mask_BT].tolist() == pytest.approx(gradient)
    assert gradient_BT[~mask_BT].tolist() == [0.0, 0.0]


def test_what_a_loss_needs_and_does_not_get_is_named() -> None:
    with pytest.raises(ValueError, match=r"^loss kind 'dr_grpo' needs max_response_tokens$"):
        divisor(LossKind.DR_GRPO, num_tokens=1, num_responses=1, max_response_tokens=None)
    with pytest.raises(ValueError, match=r"^correction 'token' needs weights$"):
        _loss([1.0], 1.0, LossConfig(truncated_importance_sampling=2.0))
    with pytest.raises(ValueError, match=r"^kl_coefficient 0\.1 needs ref_logprobs$"):
        _loss([1.0], 1.0, LossConfig(kl_coefficient=0.1))


def test_without_a_reference_the_kl_is_0_and_with_one_its_sum_has_no_gradient() -> None:
    assert _loss([1.0], 1.0, LossConfig()).kl_sum.item() == 0.0
    got = _loss([1.0], 1.0, LossConfig(), ref_logprobs_BT=_log(1.0))
    assert got.loss.requires_grad and not got.kl_sum.requires_grad


def test_ratio_weight_and_kl_are_each_of_two_policies_that_are_neither_at_0() -> None:
    """Probabilities: now 0.6, before the update 0.5, in the engine 0.4, of the reference 0.3; the advantage is 2.

    Ratio 1.2 within the clip, so -2.4; times 0.5 / 0.4; plus 0.1 (0.5 - log 0.5 - 1).
    """
    now, trainer, rollout, ref = map(_log, (0.6, 0.5, 0.4, 0.3))
    config = LossConfig(kl_coefficient=0.1, truncated_importance_sampling=2.0)
    given = {"config": config, "weights": _capped(trainer - rollout, config), "ref_logprobs_BT": ref}
    got = _of(now.requires_grad_(), 2.0, trainer_logprobs_BT=trainer, **given)
    k3 = 0.5 - math.log(0.5) - 1
    assert got.kl_sum.item() == pytest.approx(k3)
    assert got.loss.item() == pytest.approx(-2.4 * 1.25 + 0.1 * k3)


HALF = 0.5**0.5


@pytest.mark.parametrize(
    ("rewards_PG", "how", "expected"),
    [
        ([[1, 0, 0, 0], [1, 1, 0, 0]], {}, [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]),
        # mean 2, deviations -1, 0, 1: variance (1 + 0 + 1) / 2 = 1
        ([[1, 2, 3]], {"scale_by_std": True, "eps": 0.0}, [[-1, 0, 1]]),
        # deviation sqrt(1/2) of (0, 1): 0.5 / (sqrt(1/2) + 1/2)
        ([[0, 1]], {"scale_by_std": True, "eps": 0.5}, [[-0.5 / (HALF + 0.5), 0.5 / (HALF + 0.5)]]),
        # each group by its own deviation
        ([[0, 2], [0, 20], [5, 5]], {"scale_by_std": True}, [[-HALF, HALF], [-HALF, HALF], [0, 0]]),
        # each reward beside the mean of the others
        (
            [[1, 0, 0, 0], [1, 1, 0, 2]],
            {"leave_one_out": True},
            [[1, -1 / 3, -1 / 3, -1 / 3], [0, 0, -4 / 3, 4 / 3]],
        ),
    ],
    ids=["centred", "scaled", "with an addend", "by group", "one left out"],
)
def test_advantages_worked_by_hand(rewards_PG: list[list[float]], how: Any, expected: list[list[float]]) -> None:
    found = group_advantages(torch.tensor(rewards_PG, dtype=torch.float32), **how)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_equal_rewards_give_exactly_zero_even_where_their_mean_rounds(scale_by_std: bool) -> None:
    rewards_PG = torch.full((1, 7), 0.1)
    assert (rewards_PG - rewards_PG.mean()).abs().max() > 0  # the trap: the mean of seven tenths is not a tenth
    assert group_advantages(rewards_PG, scale_by_std=scale_by_std).abs().max() == 0


def test_a_group_of_one_is_refused() -> None:
    for shape in ((3, 1), (3,), (3, 0)):
        with pytest.raises(ValueError, match=re.escape(f"rewards must be [P, G] with G >= 2, got shape {shape}")):
            group_advantages(torch.zeros(shape))


@given(st.lists(st.lists(st.floats(-4, 4, width=32), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(-3, 3))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_all_rewards(rewards: list[list[float]], shift: float) -> None:
    rewards_PG = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(rewards_PG)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(len(rewards), dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(group_advantages(rewards_PG + shift), advantages, rtol=0, atol=1e-12)
