"""Rows that reasoning-gym makes and scores, here by a stand-in of its interface."""

import sys
from typing import Any

import pytest
import yaml

from slipstream.config import ConfigError
from slipstream.data.config import DataConfig, SourceConfig
from slipstream.data.prompts import PromptSets, load_prompt_sets
from slipstream.data.synthetic import SyntheticConfig
from slipstream.data.tokenizer import build_tokenizer
from slipstream.rewards.config import RewardConfig
from slipstream.rewards.function import open_reward
from tests.unit.conftest import Refusal
from tests.unit.refusals import rows

TOKENIZER = build_tokenizer(max_length=256)
SUMS = "reasoning_gym:chain_sum"


pytestmark = pytest.mark.usefixtures("stand_in")


def load(**changes: Any) -> PromptSets:
    source = {"path": SUMS, "config": {"size": 20}}
    sets = {name: (SourceConfig(**source),) for name in ("train", "validation")}
    config = DataConfig(**{"max_prompt_tokens": 128, "synthetic": SyntheticConfig(num_draft_rows=5), **sets, **changes})
    with open_reward(RewardConfig()) as reward:
        return load_prompt_sets(config, tokenizer=TOKENIZER, gradable=reward.gradable, equal=reward.equal)


def test_a_task_makes_the_rows_of_a_set_by_its_settings_and_by_the_seed() -> None:
    short = SourceConfig(path=SUMS, config={"min_terms": 2, "max_terms": 2, "size": 12})
    first = load(train=(short,))
    assert {prompt.text.count("+") for prompt in first.train} == {1}
    assert load(train=(short,)).train == first.train
    assert {prompt.text for prompt in load(train=(short,), seed=1).train} != {p.text for p in first.train}
    record = next(each for each in first.records if each.name == "train")
    assert (record.source, record.num_read) == (SUMS, 12)
    fixed = SourceConfig(path=SUMS, config={"seed": 7, "size": 30}, max_rows=4)
    with_seed = load(train=(fixed,))
    assert {p.text for p in with_seed.train} == {p.text for p in load(train=(fixed,), seed=1).train}
    assert len(with_seed.train) == 4


def test_its_prompts_are_scored_by_the_task_itself_and_others_by_mathematics() -> None:
    sets = load(validation=(SourceConfig(path="synthetic"),))
    asked = [sets.train[0]] * 5 + [sets.validation[0]] * 2
    right, other = sets.train[0].answer, sets.validation[0].answer
    responses = [
        f"so <answer>{right}</answer>",
        f"\\boxed{{{right}}}",
        "\\boxed{-1}",
        right,  # no mark says that this is the answer
        f"<think><answer>{right}</answer>",
        f"\\boxed{{{other}}}",
        f"<answer>{other}</answer>",
    ]
    with open_reward(RewardConfig()) as reward:
        result = reward.judge(asked, responses, cut_off=[False] * len(asked))
    assert result.rewards == (1.0, 1.0, 0.01, 0.0, 0.0, 1.0, 0.0)
    assert (result.num_failures, result.metrics) == (0, {})


@rows(
    """
{path: "reasoning_gym:chain_sums"}
    data.train must name one of the 1 tasks of reasoning-gym, got 'reasoning_gym:chain_sums'; is it one of chain_sum?
{path: "reasoning_gym:chain_sum", config: {num_terms: 2}}
    data.train.config must have settings of the task chain_sum alone, which are min_terms, max_terms, max_digits, seed,
    size, got 'num_terms'
{path: "reasoning_gym:chain_sum", config: {min_terms: 7}}
    data.train.config must be settings that chain_sum takes, got {'min_terms': 7}; max_terms must be >= min_terms
"""
)
def test_an_unknown_task_and_settings_that_it_does_not_take_are_refused(
    refusal: Refusal, given: str, expected: str
) -> None:
    assert refusal(lambda: load(train=(SourceConfig(**yaml.safe_load(given)),))) == expected


def test_without_the_package_the_error_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"^data\.validation must have the package .*; install it: python -m pip i"):
        load()
