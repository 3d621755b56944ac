"""What a recipe may say of the losslessness certificate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.losslessness.config import LosslessnessConfig


@pytest.mark.parametrize(
    "field", ["num_tokens", "num_repeated_prompts", "num_repeats", "num_greedy_prompts", "num_replications"]
)
def test_a_certificate_of_nothing_is_refused(refusal: Callable[..., str], field: str) -> None:
    assert refusal(LosslessnessConfig, **{field: 0}) == f"losslessness.{field} must be > 0, got 0"


@pytest.mark.parametrize("field", ["family_level", "power", "max_detectable_bias"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_share_of_nothing_or_of_all_is_refused(refusal: Callable[..., str], field: str, value: float) -> None:
    assert refusal(LosslessnessConfig, **{field: value}) == f"losslessness.{field} must lie in (0, 1), got {value}"


def test_a_negative_tie_is_refused(refusal: Callable[..., str]) -> None:
    message = "losslessness.near_tie_nats must be >= 0, got -0.5"
    assert refusal(LosslessnessConfig, near_tie_nats=-0.5) == message


def test_a_certificate_on_its_bounds_is_taken() -> None:
    config = LosslessnessConfig(
        num_tokens=1,
        num_repeated_prompts=1,
        num_repeats=1,
        num_greedy_prompts=1,
        num_replications=1,
        near_tie_nats=0.0,
    )
    assert config.near_tie_nats == 0.0
