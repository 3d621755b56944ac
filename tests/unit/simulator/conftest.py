"""The record of a whole run around the recorded demo."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.recipe import load_recipe
from slipstream.records.run import RunRecord
from slipstream.records.stages import CertificateRecord, DraftRecord, GreedyRecord, PolicyRecord, TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.stages.support import recipe_layout


@pytest.fixture
def run(demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord) -> RunRecord:
    return RunRecord(
        recipe="tiny",
        workload="rl_zero",
        execution="recorded",
        tracking_uri="sqlite:///none.db",
        versions={},
        machine="two cores",
        policy=PolicyRecord(
            model="tiny",
            architecture="Qwen3",
            num_parameters=1,
            vocab_size=1,
            max_position_embeddings=1,
            eos_token_id=0,
            pretrain_steps=0,
            pretrain_loss=0.0,
            pretrain_losses=(),
            elapsed_s=0.0,
        ),
        data=(),
        draft=DraftRecord(
            method="eagle3",
            init="in_domain",
            num_parameters=1,
            num_training_tokens=1,
            num_steps=1,
            losses=(),
            heldout_rate_by_position=(),
            heldout_mean_acceptance_length=1.0,
            elapsed_s=0.0,
        ),
        tuning=demo_tuning,
        arms=demo_arms(1.0),
        evaluations=(),
        certificate=CertificateRecord(
            verdict="lossless",
            reason="",
            claim="",
            family_level=0.01,
            power=0.9,
            max_detectable_bias=0.1,
            num_speculative_tokens=5,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=0,
            num_tokens=1,
            num_baseline_tokens=1,
            findings=(),
            control=(),
            detectable=(),
            greedy=GreedyRecord(num_responses=0, num_equal=0, num_near_ties=0, largest_gap_nats=0.0, near_tie_nats=0.0),
            pit_histograms={},
            policy_fingerprint="",
            draft_fingerprint="",
            versions={},
            elapsed_s=0.0,
        ),
        layout=recipe_layout(
            load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
        ),
    )
