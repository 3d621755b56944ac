"""What a recipe may say of the loss, the optimizer and the size of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from slipstream.grpo.config import Correction, GrpoConfig, LossConfig, OptimizerConfig
from slipstream.grpo.loop_config import LoopConfig
from slipstream.types import LoopMode

Optimizer = partial(OptimizerConfig, learning_rate=1e-4)
Grpo = partial(GrpoConfig, num_steps=1, prompts_per_step=2, group_size=2, optimizer=Optimizer())


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (
            LossConfig,
            {"correction": Correction.SEQUENCE},
            "grpo.loss.truncated_importance_sampling must be a number with grpo.loss.correction sequence, got None; "
            "it caps the weights: 2.0 is common",
        ),
        (
            LossConfig,
            {"correction": Correction.NONE, "truncated_importance_sampling": 2.0},
            "grpo.loss.truncated_importance_sampling must be null with grpo.loss.correction none, got 2.0; drop it",
        ),
        (
            LossConfig,
            {"mask_band": (0.5, 2.0)},
            "grpo.loss.mask_band must be null without a correction, got (0.5, 2.0); set grpo.loss.correction and its "
            "cap, grpo.loss.truncated_importance_sampling",
        ),
        (
            LoopConfig,
            {"max_off_policy_steps": 1},
            "loop.max_off_policy_steps must be 0 with loop.mode synchronous, got 1; set loop.mode one_step_off or "
            "in_flight",
        ),
        (
            LoopConfig,
            {"mode": LoopMode.IN_FLIGHT},
            "loop.max_off_policy_steps must be >= 1 with loop.mode in_flight, got 0; engines that run on while the "
            "policy learns are behind it",
        ),
        (Grpo, {"updates_per_step": 5}, "grpo.updates_per_step must be at most the 4 rollouts of a step, got 5"),
    ],
)
def test_what_two_fields_do_not_allow_together_is_refused(
    refusal: Callable[..., str], config: Callable[..., Any], values: dict[str, Any], message: str
) -> None:
    assert refusal(config, **values) == message


def test_a_cap_alone_corrects_by_token_and_nothing_not_at_all() -> None:
    cap = LossConfig(truncated_importance_sampling=2.0)
    assert [LossConfig().corrects, cap.corrects] == [Correction.NONE, Correction.TOKEN]
    assert replace(cap, correction=Correction.SEQUENCE, mask_band=(0.0, 2.0)).corrects is Correction.SEQUENCE
    assert LossConfig(correction=Correction.NONE).corrects is Correction.NONE


def test_the_smallest_lag_of_each_loop_and_an_update_a_rollout_are_taken() -> None:
    assert Grpo(updates_per_step=4).updates_per_step == 4
    assert LoopConfig().is_synchronous
    assert not LoopConfig(mode=LoopMode.ONE_STEP_OFF).is_synchronous
    assert LoopConfig(mode=LoopMode.IN_FLIGHT, max_off_policy_steps=1).max_off_policy_steps == 1
