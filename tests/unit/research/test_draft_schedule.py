"""The benchmark of the draft length: who is told which table, and what is printed of handmade rounds."""

from __future__ import annotations

from typing import Any, cast

import pytest

from research.draft_schedule import Contestant, halves, show_compared
from slipstream.drafts.length import constant
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.recipe import load_recipe
from slipstream.types import Prompt, RolloutGroup
from tests.unit.sampled import rollout

PROMPT = Prompt(id="0", text="", token_ids=(1,), answer="")


def result(seconds: float, num_tokens: int = 100) -> GenerationResult:
    groups = (RolloutGroup(prompt=PROMPT, rollouts=(rollout((7,) * num_tokens, -1.0, draft_version=0),)),)
    return GenerationResult(groups=groups, acceptance=None, generation_s=seconds)


class Engine:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def draft_by(self, table: Any) -> None:
        self.calls.append(table)

    def generate(self, prompts: Any, *, sampling: SamplingConfig, **_: Any) -> GenerationResult:
        self.calls.append(sampling.max_response_tokens)
        return result(1.0)


def test_an_engine_with_a_table_is_told_it_before_each_generation_and_one_without_is_left_alone() -> None:
    recipe = load_recipe("tiny")
    with_table, fixed = Engine(), Engine()
    Contestant(engine=cast(Any, with_table), table=constant(3)).generate(recipe, [PROMPT], 0)
    Contestant(engine=cast(Any, fixed)).generate(recipe, [PROMPT], 0)
    whole = recipe.sampling.max_response_tokens
    assert with_table.calls == [constant(3), 2, whole]  # a few tokens before those that are timed
    assert fixed.calls == [2, whole]


def test_the_table_is_compared_with_whichever_fixed_length_is_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    show_compared(
        {
            "k=0": [result(4.0)] * 3,
            "k=1": [result(2.0)] * 3,
            "k=3": [result(1.1)] * 3,
            "by batch": [result(1.0)] * 3,
            "k=0 by switch": [result(0.5)] * 3,  # no contestant
        }
    )
    printed = capsys.readouterr().out
    ratio = "1.100 (1.100 to 1.100)"
    assert f"best fixed is k=3: by batch is {ratio} as fast, {ratio} by generated token" in printed
    assert "k=0                       4.000           25     1.00   4.000 (4.000 to 4.000)" in printed


def test_a_long_tail_has_the_longest_problems_beside_the_shortest_in_every_generation() -> None:
    prompts = [Prompt(id=str(n), text="", token_ids=(1,) * n, answer="") for n in range(1, 61)]
    sweep, comparison = halves(prompts, 5, 1)
    lengths = [[len(prompt.token_ids) for prompt in half] for half in (sweep, comparison)]
    assert [len(each) for each in lengths] == [10, 10]
    for each in (*lengths[0][::5], *lengths[1][::5]):
        assert each <= 20
    assert all(each[4] > 54 and each[9] > 54 and max(each[:4]) <= 20 for each in lengths)
    assert not set(lengths[0]) & set(lengths[1])
    assert halves(prompts, 5, 0) == (prompts[:30], prompts[30:])


def test_long_problems_of_their_own_stand_beside_the_shortest_ones() -> None:
    prompts = [Prompt(id=str(n), text="", token_ids=(1,) * n, answer="") for n in range(1, 61)]
    long = [Prompt(id=f"long-{n}", text="", token_ids=(1,) * 99, answer="") for n in range(6)]
    sweep, comparison = halves(prompts, 5, 1, long)
    for half in (sweep, comparison):
        assert [prompt.id.startswith("long") for prompt in half[:5]] == [False] * 4 + [True]
        assert len(half) == 10
    assert not {prompt.id for prompt in sweep} & {prompt.id for prompt in comparison}
