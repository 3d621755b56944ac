"""What a recipe may say of the loss, the optimizer and the size of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from slipstream.grpo.config import Correction, GrpoConfig, LoopConfig, LossConfig, LossKind, OptimizerConfig
from slipstream.types import LoopMode
from tests.unit.refusals import refused, rows

Optimizer = partial(OptimizerConfig, learning_rate=1e-4)
Grpo = partial(GrpoConfig, num_steps=1, prompts_per_step=2, group_size=2, optimizer=Optimizer())


@rows(
    """
grpo.loss.correction=sequence
    grpo.loss.truncated_importance_sampling must be a number with grpo.loss.correction sequence, got None; it caps the
    weights: 2.0 is common
grpo.loss.correction=none + grpo.loss.truncated_importance_sampling=2.0
    grpo.loss.truncated_importance_sampling must be null with grpo.loss.correction none, got 2.0; drop it
grpo.loss.mask_band=[0.5, 2.0]
    grpo.loss.mask_band must be null without a correction, got (0.5, 2.0); set grpo.loss.correction and its cap,
    grpo.loss.truncated_importance_sampling
loop.max_off_policy_steps=1
    loop.max_off_policy_steps must be 0 with loop.mode synchronous, got 1; set loop.mode one_step_off or in_flight
loop.mode=in_flight
    loop.max_off_policy_steps must be >= 1 with loop.mode in_flight, got 0; engines that run on while the policy learns
    are behind it
loop.mode=one_step_off + loop.kv_cache=keep
    loop.kv_cache must be recompute with loop.mode one_step_off, got 'keep'; no weights enter there while a rollout
    runs: leave it out, or set loop.mode in_flight
loop.too_old=restart
    loop.too_old must be finish with loop.mode synchronous, got 'restart'; no weights enter there while a rollout runs:
    leave it out, or set loop.mode in_flight
reward.overlong.penalty=2.0
    reward.overlong.penalty must be left out with reward.overlong.buffer_tokens 0, got 2.0; nothing is punished without
    it: set buffer_tokens
grpo.loss.kind=gspo
    grpo.loss.clip_low must be at most 0.05 with grpo.loss.kind gspo, got 0.2; a response's mean ratio stays near 1, and
    would never be clipped: its paper has 0.0003 and 0.0004
grpo.loss.kind=gspo + grpo.loss.clip_low=0.0003
    grpo.loss.clip_high must be at most 0.05 with grpo.loss.kind gspo, got 0.28; a response's mean ratio stays near 1,
    and would never be clipped: its paper has 0.0003 and 0.0004
grpo.loss.kind=dr_grpo + grpo.scale_advantages_by_std=true
    grpo.scale_advantages_by_std must be false with grpo.loss.kind dr_grpo, got True; its advantages are not scaled:
    drop it, or take kind grpo
grpo.loss.kind=rloo + grpo.updates_per_step=2
    grpo.updates_per_step must be 1 with grpo.loss.kind rloo, got 2; it has no ratio, and from a second update on its
    gradient would be biased: take another kind
grpo.updates_per_step=49
    grpo.updates_per_step must be at most the 48 rollouts of a step, got 49
"""
)
def test_what_two_fields_do_not_allow_together_is_refused(given: str, expected: str) -> None:
    assert refused(given) == expected


def test_each_kind_of_loss_is_taken_with_what_its_paper_has() -> None:
    assert LossConfig().kind is LossKind.DAPO
    assert LossConfig(kind=LossKind.GSPO, clip_low=0.0003, clip_high=0.05).clip_high == 0.05
    assert Grpo(loss=LossConfig(kind=LossKind.GRPO), scale_advantages_by_std=True, updates_per_step=2)
    assert Grpo(loss=LossConfig(kind=LossKind.DR_GRPO), updates_per_step=2)
    assert Grpo(loss=LossConfig(kind=LossKind.RLOO))


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
