"""Shapes of policies: parameters and experts, against the published counts."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.simulator.cost.data_files import section_names
from slipstream.simulator.cost.models import load_model

MODELS = {name: load_model(name) for name in section_names("models")}


def test_experts_fill_up_with_tokens() -> None:
    model = MODELS["qwen3-235b-a22b"]
    active = model.active_experts(np.array([1.0, 2.0, 1e4]))
    assert active[0] == pytest.approx(8.0)  # one token hits its eight
    assert active[1] == pytest.approx(15.5)  # 128 (1 - (15/16)^2)
    assert active[2] == pytest.approx(128.0)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("qwen3-8b", 8.19, 7.57), ("qwen3-30b-a3b", 30.5, 3.0), ("qwen3-235b-a22b", 235.1, 21.5), ("mimo-7b", 7.6, 7.0)],
)
def test_parameter_counts_are_the_published_ones(name: str, billions: float, active: float) -> None:
    assert MODELS[name].total_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert MODELS[name].parameters_per_token / 1e9 == pytest.approx(active, rel=0.02)
