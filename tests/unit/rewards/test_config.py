"""What a recipe may say of the verifier."""

import pytest

from slipstream.config import ConfigError
from slipstream.rewards.config import RewardConfig


def test_a_bad_time_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.timeout_s must be > 0, got 0"):
        RewardConfig(timeout_s=0)
