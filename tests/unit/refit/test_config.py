"""What a recipe may say of the checks of a refit."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.refit.config import RefitConfig


def test_checks_that_never_come_or_take_anything_are_refused(refusal: Callable[..., str]) -> None:
    assert refusal(RefitConfig, bucket_mib=0.0) == "refit.bucket_mib must be > 0, got 0.0"
    assert refusal(RefitConfig, timeout_s=0.0) == "refit.timeout_s must be > 0, got 0.0"
    assert refusal(RefitConfig, check_every_steps=0) == "refit.check_every_steps must be >= 1, got 0"
    assert refusal(RefitConfig, max_probe_difference=0.0) == "refit.max_probe_difference must be > 0, got 0.0"


def test_a_check_of_every_refit_is_taken() -> None:
    assert RefitConfig(check_every_steps=1, max_probe_difference=0.5).check_every_steps == 1


def test_a_bucket_is_given_in_mebibytes_and_never_empty() -> None:
    assert RefitConfig().bucket_bytes == 268_435_456
    assert RefitConfig(bucket_mib=0.5).bucket_bytes == 524_288
    assert RefitConfig(bucket_mib=1e-9).bucket_bytes == 1


def test_half_a_second_is_a_deadline() -> None:
    assert RefitConfig(timeout_s=0.5).timeout_s == 0.5
