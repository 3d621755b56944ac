"""The policy's stage takes the tokenizer that the data were rendered with, and extends what it trained."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.data.tokenizer import write_tokenizer
from slipstream.learner.architecture import Architecture
from slipstream.learner.config import RopeConfig, RopeType, ScratchConfig
from slipstream.recipe import load_recipe
from slipstream.records.files import read_record
from slipstream.records.stages import PolicyRecord
from slipstream.stages import prepare_policy
from slipstream.stages.support import tokenizer
from slipstream.types import Dtype
from tests.small import UNTRACKED, replace_in, run_context


def test_a_policy_from_scratch_has_the_datas_tokenizer_and_more_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[ScratchConfig] = []

    def save_hf(directory: Path, words: Path) -> None:
        shutil.copytree(words, directory, dirs_exist_ok=True)
        trained = Architecture.from_scratch(created[0], vocab_size=64, eos_token_id=3)
        (directory / "config.json").write_text(json.dumps(trained.to_hf(Dtype.FLOAT32)))

    learner = SimpleNamespace(
        create=lambda scratch, *_: created.append(scratch) or 7, lm_step=lambda *_, **__: 0.0, save_hf=save_hf
    )
    replace_in(monkeypatch, prepare_policy, connect=lambda: None)
    replace_in(monkeypatch, prepare_policy, start_learner=lambda config, layout: nullcontext(learner))
    overrides = {"policy": {"rope": {"type": "yarn", "factor": 2.0}}, "tracking": UNTRACKED}
    recipe = load_recipe("tiny", overrides=overrides)
    write_tokenizer(tmp_path / "data" / "tokenizer", max_length=333)  # not what the recipe's own would be
    policy = prepare_policy.prepare_policy(run_context(tmp_path / "runs"), recipe, data=tmp_path / "data")
    assert tokenizer(policy).model_max_length == 333
    assert created == [recipe.policy.scratch]  # which is trained at the angles that it has without the section
    scaled = Architecture.from_hf(policy)
    assert scaled.rope_scaling == RopeConfig(type=RopeType.YARN, factor=2.0, original_max_position_embeddings=512)
    assert read_record(PolicyRecord, policy / "policy.json").max_position_embeddings == scaled.num_positions == 1024
