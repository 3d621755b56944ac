"""The learner's stages, from measured seconds to an efficiency and back."""

from __future__ import annotations

from dataclasses import replace

from slipstream.simulator.cost.settings import load_setting
from slipstream.simulator.cost.step import learner_efficiency, learner_stages
from slipstream.types import StageTimes

MEASURED = StageTimes.in_sequence(data_s=1.0, prepare_s=2.0, generation_s=50.0, logprob_s=4.0, train_s=16.0)


def test_on_half_the_gpus_the_learner_takes_twice_as_long_and_the_rest_as_measured() -> None:
    setting = load_setting("paper-8b")
    half = learner_stages(learner_efficiency(MEASURED, setting), setting, num_gpus=setting.num_gpus // 2)
    assert (half.data_s, half.prepare_s, half.generation_s) == (1.0, 2.0, 0.0)
    assert (round(half.logprob_s, 9), round(half.train_s, 9)) == (8.0, 32.0)


def test_a_run_without_the_pass_for_logprobs_is_projected_without_it() -> None:
    setting = load_setting("paper-8b")
    efficiency = learner_efficiency(replace(MEASURED, logprob_s=0.0), setting)
    assert efficiency.logprob is None
    assert learner_stages(efficiency, setting, num_gpus=setting.num_gpus).logprob_s == 0.0
