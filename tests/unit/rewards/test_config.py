"""What a recipe may say of the verifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.rewards.config import RewardConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"timeout_s": 0.0}, "reward.timeout_s must be > 0, got 0.0"),
        ({"num_workers": 0}, "reward.num_workers must be > 0, got 0"),
        ({"max_answer_chars": 0}, "reward.max_answer_chars must lie in [1, 4096], got 0"),
        ({"max_answer_chars": 4097}, "reward.max_answer_chars must lie in [1, 4096], got 4097"),
        ({"worker_memory_gib": 0.4}, "reward.worker_memory_gib must be >= 0.5, got 0.4"),
    ],
)
def test_a_verifier_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(RewardConfig, **values) == message


@pytest.mark.parametrize("chars", [1, 4096])
def test_a_verifier_on_its_bounds_is_taken(chars: int) -> None:
    config = RewardConfig(timeout_s=0.5, num_workers=1, max_answer_chars=chars, worker_memory_gib=0.5)
    assert config.max_answer_chars == chars
