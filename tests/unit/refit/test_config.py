"""What a recipe may say of the checks of a refit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.refit.config import RefitConfig


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"bucket_mib": 0.0}, "refit.bucket_mib must be > 0, got 0.0"),
        ({"timeout_s": 0.0}, "refit.timeout_s must be > 0, got 0.0"),
        ({"check_every_steps": 0}, "refit.check_every_steps must be >= 1, got 0"),
        ({"max_probe_difference": 0.0}, "refit.max_probe_difference must be > 0, got 0.0"),
    ],
)
def test_checks_that_never_come_or_take_anything_are_refused(
    values: dict[str, Any], refused: str, refusal: Callable[..., str]
) -> None:
    assert refusal(RefitConfig, **values) == refused


def test_the_least_of_each_is_taken_and_a_bucket_is_never_empty() -> None:
    least = RefitConfig(bucket_mib=1e-9, timeout_s=0.5, check_every_steps=1, max_probe_difference=0.5)
    assert (least.timeout_s, least.check_every_steps, least.bucket_bytes) == (0.5, 1, 1)
    assert [RefitConfig().bucket_bytes, RefitConfig(bucket_mib=0.5).bucket_bytes] == [268_435_456, 524_288]
