"""Acceptance by position, against hand-worked values and the published lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml

from slipstream.config import ConfigError
from slipstream.simulator.cost.data_files import CONFIGS
from slipstream.simulator.fit.acceptance_by_position import AcceptanceProfile, acceptance_length, fit_profile
from slipstream.simulator.fit.paper import WORKLOADS


def paper_workloads() -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / "reference" / "paper.yaml").read_text())["workloads"]


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert acceptance_length([]) == 1.0
    assert acceptance_length([0.5, 0.5]) == pytest.approx(1.75)  # 1 + 1/2 + 1/4


def test_rates_fall_with_the_position_on_the_logit_scale() -> None:
    # sigmoid(0) = 1/2, sigmoid(-log 3) = 1/4.
    profile = AcceptanceProfile(level=0.0, fall=float(np.log(3.0)))
    assert profile.rates(2) == pytest.approx((0.5, 0.25))
    assert profile.length(2) == pytest.approx(1.0 + 0.5 + 0.125)
    assert profile.length(0) == 1.0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_rates_by_position_fit_the_papers_lengths_and_a_constant_rate_does_not(workload: str) -> None:
    entries = paper_workloads()[workload]["draft_lengths"]
    lengths = {entry["k"]: entry["mean_acceptance_length"] for entry in entries}
    profile = fit_profile(lengths)
    assert all(profile.length(k) == pytest.approx(length, abs=0.05) for k, length in lengths.items())
    assert profile.fall > 0
    # One rate r for all positions that meets k = 3: 1 + r + r^2 + r^3 = its length.
    rate = next(root.real for root in np.roots([1, 1, 1, 1 - lengths[3]]) if abs(root.imag) < 1e-9)
    assert acceptance_length([rate] * 3) == pytest.approx(lengths[3])
    assert acceptance_length([rate] * 7) > lengths[7] + 0.15


def test_lengths_that_no_draft_could_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"acceptance_length must lie in \[1, k \+ 1 = 4\], got 4.5"):
        fit_profile({3: 4.5})
    with pytest.raises(ConfigError, match="length_by_k must hold a draft length k >= 1"):
        fit_profile({0: 1.0})
