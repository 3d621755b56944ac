"""What the learner tells of each token: by hand, on three tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.learner.logprobs import conditionals, processed_logprobs


def test_conditionals_of_three_tokens_by_hand() -> None:
    """p = (0.5, 0.3, 0.2); token 1 has 0.5 before it."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    generator = torch.Generator().manual_seed(0)

    row = conditionals(logits, torch.tensor([1]), temperature=1.0, top_p=1.0, top_k=0, generator=generator)[0]

    mean = 0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)
    variance = 0.5 * np.log(0.5) ** 2 + 0.3 * np.log(0.3) ** 2 + 0.2 * np.log(0.2) ** 2 - mean**2
    squares = np.array([0.25, 0.09, 0.04]) / 0.38
    assert row[:4].tolist() == pytest.approx([0.5, 0.3, mean, variance], abs=1e-6)
    assert float(row[6]) == pytest.approx(0.5 * np.abs(squares - [0.5, 0.3, 0.2]).sum(), abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_holds_it_and_top_k_the_k_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()

    nucleus = processed_logprobs(logits, temperature=1.0, top_p=0.6, top_k=0).exp()[0]
    first = processed_logprobs(logits, temperature=1.0, top_p=1.0, top_k=1).exp()[0]

    assert nucleus.tolist() == pytest.approx([0.625, 0.375, 0.0], abs=1e-6)
    assert first.tolist() == [1.0, 0.0, 0.0]


def test_a_token_that_cannot_be_drawn_has_no_place() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    generator = torch.Generator().manual_seed(0)

    row = conditionals(logits, torch.tensor([2]), temperature=1.0, top_p=0.6, top_k=0, generator=generator)[0]

    assert np.isnan(float(row[0]))
    assert float(row[1]) == 0.0
