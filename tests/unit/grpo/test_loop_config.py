"""Which lag fits which loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.config import ConfigError, from_mapping
from slipstream.grpo.loop_config import LoopConfig
from slipstream.types import LoopMode


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"mode": LoopMode.ONE_STEP_OFF, "max_off_policy_steps": -1},
            "loop.max_off_policy_steps must be >= 0, got -1",
        ),
        (
            {"max_off_policy_steps": 1},
            "loop.max_off_policy_steps must be 0 with loop.mode synchronous, got 1; set loop.mode one_step_off or "
            "in_flight",
        ),
        (
            {"mode": LoopMode.IN_FLIGHT},
            "loop.max_off_policy_steps must be >= 1 with loop.mode in_flight, got 0; engines that run on while the "
            "policy learns are behind it",
        ),
    ],
)
def test_a_lag_that_its_loop_cannot_have_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(LoopConfig, **values) == message


def test_each_loop_takes_the_smallest_lag_that_it_can_have() -> None:
    assert LoopConfig().is_synchronous
    assert not LoopConfig(mode=LoopMode.ONE_STEP_OFF).is_synchronous
    assert LoopConfig(mode=LoopMode.IN_FLIGHT, max_off_policy_steps=1).max_off_policy_steps == 1


def test_the_lag_alone_sizes_the_buffer_so_that_none_is_smaller_than_a_step() -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(LoopConfig, {"mode": "in_flight", "max_off_policy_steps": 1, "buffer_groups": 1}, "loop")
    assert str(caught.value) == (
        "unknown key 'loop.buffer_groups'; known: mode, max_off_policy_steps, kv_cache, too_old"
    )
