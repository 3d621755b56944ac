"""An engine on a GPU with weights and inputs in 8 bits, over the channel that `auto` takes there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.refit.channel import open_channel
from slipstream.refit.config import RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL
from slipstream.refit.gate import RefitGate
from slipstream.types import Quantization
from tests.gpu.ends import ENGINE, learner_and_engine

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.FP8])
def test_an_engine_holds_what_the_learner_quantizes(
    quantization: Quantization, models: dict[str, Path], ray_session: None
) -> None:
    """vLLM's reload takes 8 bits over IPC, and rounds what it reads from a directory to the same."""
    config, refit = replace(ENGINE, quantization=quantization), RefitConfig()
    with learner_and_engine(models, config=config) as (learner, engines):
        engines.refit(WeightFiles(policy=models["new"], policy_version=1))
        from_directory = engines.start_fingerprints(is_draft=False, turn=ALL)()
        engines.refit(WeightFiles(policy=models["old"], policy_version=2))
        assert engines.start_fingerprints(is_draft=False, turn=ALL)() != from_directory
        learner.load(models["new"], None, sent_as=config.weight_format)
        with open_channel(refit, learner, engines) as channel:
            RefitGate(engines, learner, channel=channel, draft=None, trains_draft=False, config=refit).refit(3)
        assert engines.start_fingerprints(is_draft=False, turn=ALL)() == from_directory
