"""Weights and mask of tokens that another policy sampled, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.grpo.config import Correction, Level, LossConfig, LossKind
from slipstream.grpo.correction import corrected
from slipstream.grpo.lags import token_weights
from slipstream.grpo.loss import policy_loss

TOKEN = LossConfig(correction=Correction.TOKEN, truncated_importance_sampling=2.0)
SEQUENCE = replace(TOKEN, correction=Correction.SEQUENCE)
BANDS = {
    "tokens": replace(TOKEN, mask_band=(0.5, 2.0)),
    "sequences": replace(TOKEN, mask_band=(0.5, 2.0), mask_level=Level.SEQUENCE),
}


def _rows(values_BT: torch.Tensor) -> list[tuple[int, slice]]:
    return [(row, slice(None)) for row in range(len(values_BT))]


def _weights(ratios: list[list[float]], config: LossConfig) -> tuple[list[list[float]], list[list[bool]]]:
    """Weight and mask of rows of equal length, all of whose tokens count."""
    log_ratio_BT = torch.tensor(ratios, dtype=torch.float64).log()
    found = corrected(log_ratio_BT, torch.ones_like(log_ratio_BT, dtype=torch.bool), _rows(log_ratio_BT), config)
    assert found is not None
    kept_BT = torch.ones_like(log_ratio_BT, dtype=torch.bool) if found.kept_BT is None else found.kept_BT
    return found.weight_BT.tolist(), kept_BT.tolist()


def test_a_response_weighs_the_product_of_its_ratios_up_to_the_cap() -> None:
    """1.5 x 0.8 = 1.2 and 1.5 x 1.6 = 2.4, which the cap makes 2; by token 1.5, 0.8, 1.5, 1.6."""
    ratios = [[1.5, 0.8], [1.5, 1.6]]
    assert _weights(ratios, SEQUENCE)[0] == [pytest.approx([1.2, 1.2]), pytest.approx([2.0, 2.0])]
    assert _weights(ratios, TOKEN)[0] == [pytest.approx(row) for row in ratios]
    assert corrected(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), [(0, slice(1))], LossConfig()) is None


def test_the_band_masks_a_token_or_the_response_of_which_the_geometric_mean_lies_outside() -> None:
    """sqrt(3 x 0.4) = 1.10 lies inside 0.5 to 2 although both tokens do not; sqrt(0.6 x 0.3) = 0.42 does not."""
    ratios = [[3.0, 0.4], [0.6, 0.3]]
    assert _weights(ratios, BANDS["tokens"])[1] == [[False, False], [True, False]]
    assert _weights(ratios, BANDS["sequences"])[1] == [[True, True], [False, False]]
    assert _weights([[0.5, 2.0]], BANDS["tokens"])[1] == [[True, True]]  # the edges lie inside


def test_sequences_that_share_a_row_are_told_apart_and_prompts_do_not_count() -> None:
    """One row of two sequences, of each the first token a prompt's; products 1.2 and 0.5."""
    log_ratio_BT = torch.tensor([[9.0, 1.5, 0.8, 9.0, 0.5]]).log()
    mask_BT = torch.tensor([[False, True, True, False, True]])
    places = [(0, slice(0, 3)), (0, slice(3, 5))]
    found = corrected(log_ratio_BT, mask_BT, places, replace(SEQUENCE, mask_band=(0.6, 2.0), mask_level=Level.SEQUENCE))
    assert found is not None and found.kept_BT is not None
    torch.testing.assert_close(found.weight_BT[mask_BT], torch.tensor([1.2, 1.2, 0.5]))
    assert found.weight_BT.dtype is torch.float32
    assert found.kept_BT[mask_BT].tolist() == [True, True, False]


def test_a_masked_token_leaves_the_loss_and_its_gradient_but_not_the_normaliser() -> None:
    """Ratios 4 and 1.5; -r A w keeps -1.5 x 2 of the second token alone, and the first's KL is masked too."""
    logprobs_BT = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    config = replace(BANDS["tokens"], kl_coefficient=0.1)
    got = policy_loss(
        logprobs_BT,
        trainer_logprobs_BT=torch.zeros_like(logprobs_BT),
        advantages_BT=torch.full((1, 1), 2.0, dtype=torch.float64),
        mask_BT=mask_BT,
        config=config,
        places=_rows(mask_BT),
        weights=corrected(torch.tensor([[4.0, 1.5]], dtype=torch.float64).log(), mask_BT, _rows(mask_BT), config),
        ref_logprobs_BT=torch.tensor([[-1.0, 0.0]], dtype=torch.float64),
    )
    assert got.loss.item() == pytest.approx(-3.0)
    (gradient_BT,) = torch.autograd.grad(got.loss, logprobs_BT)
    assert gradient_BT.tolist() == [pytest.approx([0.0, -3.0])]
    assert got.kl_sum.item() == pytest.approx(np.exp(-1.0))  # a figure of the policy: over all tokens


RATIOS = st.lists(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6), min_size=1, max_size=5)
CONFIGS = st.builds(
    LossConfig,
    correction=st.sampled_from([Correction.TOKEN, Correction.SEQUENCE]),
    truncated_importance_sampling=st.floats(0.5, 10.0),
    mask_band=st.none() | st.tuples(st.floats(0.0, 0.9), st.floats(1.1, 10.0)),
    mask_level=st.sampled_from(Level),
)


@given(RATIOS, CONFIGS)
def test_padded_and_packed_it_is_the_same(rows: list[list[float]], config: LossConfig) -> None:
    longest = max(map(len, rows))
    mask_BT = torch.tensor([[column < len(row) for column in range(longest)] for row in rows])
    log_ratios = [np.log(np.array(row)) for row in rows]
    padded_BT = torch.full(mask_BT.shape, float("nan"), dtype=torch.float64)
    padded_BT[mask_BT] = torch.from_numpy(np.concatenate(log_ratios))
    found = corrected(padded_BT, mask_BT, _rows(mask_BT), config)
    assert found is not None
    kept_BT = torch.ones_like(mask_BT) if found.kept_BT is None else found.kept_BT
    weight_N, changed_N = token_weights(log_ratios, config)  # packs them into one row
    near_edge = _near_edges(log_ratios, config)
    got_N = torch.where(kept_BT, found.weight_BT, 0.0)[mask_BT].numpy()
    np.testing.assert_allclose(got_N[~near_edge], weight_N[~near_edge], rtol=1e-9)
    assert config.truncated_importance_sampling is not None
    assert not changed_N[~near_edge & (weight_N > 0) & (weight_N < config.truncated_importance_sampling)].any()


def _near_edges(log_ratios: list[np.ndarray], config: LossConfig) -> np.ndarray:
    """Where rounding decides on which side of the band a ratio lies."""
    by_sequence = config.mask_level is Level.SEQUENCE
    ratio_N = np.exp(np.concatenate([np.full(len(r), r.mean()) if by_sequence else r for r in log_ratios]))
    low, high = config.mask_band or (-1.0, -1.0)
    return np.isclose(ratio_N, low, rtol=1e-9) | np.isclose(ratio_N, high, rtol=1e-9)


@pytest.mark.parametrize("kind", LossKind)
@given(RATIOS, CONFIGS, st.floats(-2.0, 2.0))
def test_microbatches_of_whole_sequences_add_up(
    kind: LossKind, rows: list[list[float]], config: LossConfig, advantage: float
) -> None:
    config = replace(config, kind=kind, clip_low=0.05, clip_high=0.04)

    def loss(part: list[list[float]]) -> tuple[float, float]:
        packed = torch.tensor([[ratio for row in part for ratio in row]], dtype=torch.float64)
        mask_BT = torch.ones_like(packed, dtype=torch.bool)
        ends = np.cumsum([len(row) for row in part]).tolist()
        places = [(0, slice(end - len(row), end)) for end, row in zip(ends, part, strict=True)]
        found = policy_loss(
            packed.log(),
            trainer_logprobs_BT=torch.zeros_like(packed),
            advantages_BT=torch.full((1, 1), advantage, dtype=torch.float64),
            mask_BT=mask_BT,
            places=places,
            config=config,
            weights=corrected(packed.log(), mask_BT, places, config),
        )
        return found.loss.item(), found.num_clipped.item()

    parts = [loss([row]) for row in rows]
    assert tuple(map(sum, zip(*parts, strict=True))) == pytest.approx(loss(rows), rel=1e-9, abs=1e-9)
