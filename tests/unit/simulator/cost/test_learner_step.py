"""The learner's stages, from measured seconds to an efficiency and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.simulator.cost.learner_step import Learner, relative_efficiency
from slipstream.simulator.cost.settings import load_setting
from slipstream.types import StageTimes

MEASURED = StageTimes.in_sequence(data_s=1.0, prepare_s=2.0, generation_s=50.0, logprob_s=4.0, train_s=16.0)

MEAN = 5000.0


def test_on_half_the_gpus_the_learner_takes_twice_as_long_and_the_rest_as_measured() -> None:
    setting = load_setting("paper-8b")
    learner = Learner(measured=MEASURED, setting=setting, mean_tokens=MEAN)
    half = learner.stages(setting, num_gpus=setting.num_gpus // 2, mean_tokens=MEAN)
    assert (half.data_s, half.prepare_s, half.generation_s) == (1.0, 2.0, 0.0)
    assert (round(half.logprob_s, 9), round(half.train_s, 9)) == (8.0, 32.0)


def test_a_run_without_the_pass_for_logprobs_is_projected_without_it() -> None:
    setting = load_setting("paper-8b")
    learner = Learner(measured=replace(MEASURED, logprob_s=0.0), setting=setting, mean_tokens=MEAN)
    assert learner.stages(setting, num_gpus=setting.num_gpus, mean_tokens=MEAN).logprob_s == 0.0


def test_a_learner_is_as_efficient_as_measured_on_what_it_was_measured() -> None:
    setting = load_setting("paper-8b")
    assert relative_efficiency(replace(setting, num_gpus=8), setting) == (1.0, 0.0)
    learner = Learner(measured=MEASURED, setting=setting, mean_tokens=MEAN)
    same = learner.stages(setting, num_gpus=32, mean_tokens=MEAN, deviation=2.0)
    assert same.train_s == pytest.approx(MEASURED.train_s)


def test_experts_leave_three_tenths_of_the_efficiency_and_other_hardware_its_own() -> None:
    dense, sparse = load_setting("paper-8b"), load_setting("paper-235b")
    assert relative_efficiency(sparse, dense) == (pytest.approx(0.3), pytest.approx(0.5))
    assert relative_efficiency(dense, sparse) == (pytest.approx(1 / 0.3), pytest.approx(0.5))
    h100 = replace(dense, hardware="h100")
    assert relative_efficiency(h100, dense) == (pytest.approx(0.38 / 0.32), pytest.approx((0.2**2 + 0.2**2) ** 0.5))
    # One standard deviation more efficient takes that much less time.
    learner = Learner(measured=MEASURED, setting=dense, mean_tokens=MEAN)
    middle, above = (learner.stages(sparse, num_gpus=512, mean_tokens=MEAN, deviation=each) for each in (0.0, 1.0))
    assert middle.train_s / above.train_s == pytest.approx(2.718281828**0.5)
    assert middle.data_s == above.data_s == MEASURED.data_s


def test_a_packed_batch_of_half_the_tokens_takes_half_the_time_and_a_padded_one_all_of_it() -> None:
    packed = replace(load_setting("paper-8b"), packed=True)
    learner = Learner(measured=MEASURED, setting=packed, mean_tokens=4200.0)
    half = learner.stages(packed, num_gpus=32, mean_tokens=2000.0)  # 2200 of 4400
    assert half.train_s == pytest.approx(8.0)
    padded = replace(packed, packed=False)
    learner = Learner(measured=MEASURED, setting=padded, mean_tokens=4200.0)
    assert learner.stages(padded, num_gpus=32, mean_tokens=2000.0).train_s == pytest.approx(16.0)
