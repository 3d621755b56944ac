"""Asynchronous runs whose weights travel over gloo to engines that generate meanwhile, or generate on across them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.protocol import Portion
from slipstream.recipe import Recipe, load_recipe
from slipstream.workers import engines
from tests.faults.test_killed_runs import CORRECTED
from tests.small import RECIPE, train_arm

pytestmark = pytest.mark.slow

GLOO = {"channel": "gloo", "bucket_mib": 0.02, "timeout_s": 60.0}  # of 0.6 MB: tensors are cut


def recipe(mode: str, **more: Any) -> Recipe:
    loop = {"mode": mode, "max_off_policy_steps": 1}
    return load_recipe("tiny", overrides={**RECIPE, "grpo": CORRECTED, "loop": loop, **more})


def test_in_flight_over_gloo_trains_on_responses_as_long_as_those_that_were_generated(
    tmp_path: Path, policy: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On all of them, that is: none is left out for being long."""
    generated: list[int] = []
    genuine = engines.start_engine

    class Noted:
        """Engines; notes how long what they complete is."""

        def __init__(self, target: Any) -> None:
            self._target = target

        def __getattr__(self, name: str) -> Any:
            return getattr(self._target, name)

        def advance(self, **how: Any) -> Portion:
            portion = self._target.advance(**how)
            generated.extend(len(rollout.token_ids) for _, group in portion.groups for rollout in group.rollouts)
            return portion

    @contextmanager
    def noted(*args: Any, **more: Any) -> Iterator[Any]:
        with genuine(*args, **more) as engine:
            yield Noted(engine)

    monkeypatch.setattr(engines, "start_engine", noted)
    caplog.set_level("INFO")
    record = train_arm(recipe("in_flight", refit=GLOO), policy, tmp_path)

    assert "weights are sent by gloo" in caplog.text
    num_trained = sum(step.num_rollouts for step in record.steps)
    assert num_trained == len(generated) == 32
    assert sum(step.num_response_tokens for step in record.steps) / num_trained == sum(generated) / len(generated)
    assert max(step.longest_response_tokens for step in record.steps) == max(generated) > min(generated)
    assert max(lag.lag for step in record.steps for lag in step.lags) == 1
