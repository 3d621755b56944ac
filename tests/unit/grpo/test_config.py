"""What a recipe may say of the loss, the optimizer and the size of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from slipstream.config import ConfigError, from_mapping
from slipstream.grpo.config import Correction, GrpoConfig, LossConfig, OptimizerConfig
from slipstream.grpo.loop_config import LoopConfig
from slipstream.types import LoopMode

Optimizer = partial(OptimizerConfig, learning_rate=1e-4)
Grpo = partial(GrpoConfig, num_steps=1, prompts_per_step=2, group_size=2, optimizer=Optimizer())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_low": 0.0}, "grpo.loss.clip_low must lie in (0, 1), got 0.0"),
        ({"clip_low": 1.0}, "grpo.loss.clip_low must lie in (0, 1), got 1.0"),
        ({"clip_high": 0.0}, "grpo.loss.clip_high must be > 0, got 0.0"),
        ({"kl_coefficient": -0.1}, "grpo.loss.kl_coefficient must be >= 0, got -0.1"),
        (
            {"truncated_importance_sampling": 0.0},
            "grpo.loss.truncated_importance_sampling must be > 0 or null, got 0.0",
        ),
        (
            {"correction": Correction.SEQUENCE},
            "grpo.loss.truncated_importance_sampling must be a number with grpo.loss.correction sequence, got None; "
            "it caps the weights: 2.0 is common",
        ),
        (
            {"correction": Correction.NONE, "truncated_importance_sampling": 2.0},
            "grpo.loss.truncated_importance_sampling must be null with grpo.loss.correction none, got 2.0; drop it",
        ),
        (
            {"mask_band": (0.5, 2.0)},
            "grpo.loss.mask_band must be null without a correction, got (0.5, 2.0); set grpo.loss.correction and its "
            "cap, grpo.loss.truncated_importance_sampling",
        ),
        (
            {"truncated_importance_sampling": 2.0, "mask_band": (1.0, 2.0)},
            "grpo.loss.mask_band must be two ratios around 1, got (1.0, 2.0)",
        ),
        (
            {"truncated_importance_sampling": 2.0, "mask_band": (0.5, 1.0)},
            "grpo.loss.mask_band must be two ratios around 1, got (0.5, 1.0)",
        ),
        (
            {"truncated_importance_sampling": 2.0, "mask_band": (0.5,)},
            "grpo.loss.mask_band must be two ratios around 1, got (0.5,)",
        ),
    ],
)
def test_a_loss_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(LossConfig, **values) == message


def test_a_loss_inside_its_bounds_is_taken() -> None:
    config = LossConfig(clip_low=0.5, clip_high=0.5, kl_coefficient=0.0, truncated_importance_sampling=0.5)
    assert (config.clip_low, config.clip_high, config.truncated_importance_sampling) == (0.5, 0.5, 0.5)


def test_a_cap_alone_corrects_by_token_and_nothing_not_at_all() -> None:
    cap = LossConfig(truncated_importance_sampling=2.0)
    assert [LossConfig().corrects, cap.corrects] == [Correction.NONE, Correction.TOKEN]
    assert replace(cap, correction=Correction.SEQUENCE, mask_band=(0.0, 2.0)).corrects is Correction.SEQUENCE
    assert LossConfig(correction=Correction.NONE).corrects is Correction.NONE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate must lie in (0, 1], got 0.0"),
        ({"betas": (0.9,)}, "optimizer.betas must be two numbers in [0, 1), got (0.9,)"),
        ({"betas": (0.9, 1.0)}, "optimizer.betas must be two numbers in [0, 1), got (0.9, 1.0)"),
        ({"betas": (-0.1, 0.9)}, "optimizer.betas must be two numbers in [0, 1), got (-0.1, 0.9)"),
        ({"eps": 0.0}, "optimizer.eps must be > 0, got 0.0"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay must lie in [0, 1], got -0.1"),
        ({"clip_grad": 0.0}, "optimizer.clip_grad must be > 0, got 0.0"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps must be >= 0, got -1"),
    ],
)
def test_an_optimizer_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(Optimizer, **values) == message


def test_an_optimizer_on_its_bounds_is_taken() -> None:
    config = Optimizer(betas=(0.0, 0.5), eps=0.5, weight_decay=0.0, clip_grad=0.5, warmup_steps=0)
    assert config.betas == (0.0, 0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"group_size": 1},
            "grpo.group_size must be >= 2, got 1; "
            "advantages are centred on the group's mean, and one rollout has no baseline",
        ),
        ({"mismatch_band": (0.5,)}, "grpo.mismatch_band must be two ratios around 1, got (0.5,)"),
        ({"mismatch_band": (0.0, 2.0)}, "grpo.mismatch_band must be two ratios around 1, got (0.0, 2.0)"),
        ({"mismatch_band": (1.0, 2.0)}, "grpo.mismatch_band must be two ratios around 1, got (1.0, 2.0)"),
        ({"mismatch_band": (0.5, 1.0)}, "grpo.mismatch_band must be two ratios around 1, got (0.5, 1.0)"),
        ({"num_steps": 0}, "grpo.num_steps must be >= 1, got 0"),
        ({"prompts_per_step": 0}, "grpo.prompts_per_step must be >= 1, got 0"),
        ({"updates_per_step": 0}, "grpo.updates_per_step must be >= 1, got 0"),
        ({"checkpoint_every_steps": 0}, "grpo.checkpoint_every_steps must be >= 1, got 0"),
        ({"updates_per_step": 5}, "grpo.updates_per_step must be at most the 4 rollouts of a step, got 5"),
    ],
)
def test_a_step_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(Grpo, **values) == message


def test_a_step_on_its_bounds_is_taken() -> None:
    config = Grpo(prompts_per_step=1, updates_per_step=2, checkpoint_every_steps=1, mismatch_band=(0.9, 1.5))
    assert config.updates_per_step == 2


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
