"""Rules for a recipe's settings of a refit."""

from __future__ import annotations

from slipstream.refit.config import RefitConfig


def test_a_bucket_is_given_in_mebibytes_and_never_empty() -> None:
    assert RefitConfig().bucket_bytes == 268_435_456
    assert RefitConfig(bucket_mib=0.5).bucket_bytes == 524_288
    assert RefitConfig(bucket_mib=1e-9).bucket_bytes == 1
