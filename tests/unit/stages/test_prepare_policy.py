"""The policy's stage takes the tokenizer that the data were rendered with."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.data.tokenizer import write_tokenizer
from slipstream.recipe import load_recipe
from slipstream.stages import prepare_policy
from slipstream.stages.context import RunContext
from slipstream.stages.support import tokenizer
from slipstream.tracking.config import TrackingConfig

UNTRACKED = TrackingConfig(uri="http://127.0.0.1:9", replay_every_s=0.1, close_wait_s=0.0)


def test_a_policy_from_random_weights_has_the_tokenizer_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = SimpleNamespace(
        create=lambda *_: 7,
        lm_step=lambda *_, **__: 0.0,
        save_hf=lambda directory, words: shutil.copytree(words, directory, dirs_exist_ok=True),
    )
    monkeypatch.setattr(prepare_policy, "connect", lambda: None)
    monkeypatch.setattr(prepare_policy, "start_learner", lambda config, layout: nullcontext(learner))
    recipe = replace(load_recipe("tiny"), tracking=UNTRACKED)
    context = RunContext(execution="e", root=str(tmp_path / "runs"), experiment="tiny", workload="rl_zero")
    write_tokenizer(tmp_path / "data" / "tokenizer", max_length=333)  # not what the recipe's own would be

    policy = prepare_policy.prepare_policy(context, recipe, data=tmp_path / "data")

    assert tokenizer(policy).model_max_length == 333
