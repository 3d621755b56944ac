"""The stand-ins have the real sets' columns, and the corpus the properties that the tiny policy is tuned by."""

import itertools
from statistics import mean

import pytest

from slipstream.config import ConfigError
from slipstream.data.synthetic import (
    Example,
    SyntheticConfig,
    aime_rows,
    dapo_rows,
    makers,
    pretraining_corpus,
)
from slipstream.types import Workload

CONFIG = SyntheticConfig(num_train_problems=50, num_copies=3, num_conflicting=4, num_leaked=2, num_draft_rows=20)


def arithmetic(config: SyntheticConfig, workload: Workload, count: int) -> list[Example]:
    examples = (e for e in pretraining_corpus(config, workload=workload, seed=0) if e.problem.endswith("=?"))
    return list(itertools.islice(examples, count))


def exact_answer(problem: str) -> int:
    return sum(int(term) for term in problem.removesuffix("=?").replace("-", "+-").split("+"))


def test_training_rows_are_copies_plus_conflicts_plus_leaks_by_the_seed() -> None:
    rows = dapo_rows(CONFIG, split="train", seed=0)
    assert len(rows) == 50 * 3 + 4 + 2
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(row["prompt"][0]["content"], set()).add(row["reward_model"]["ground_truth"])
    assert len(answers) == 50 + 2
    assert sum(len(found) == 2 for found in answers.values()) == 4
    validation = {row["problem"] for row in aime_rows(CONFIG, seed=0)}
    assert len(validation & set(answers)) == 2
    first, again, other = (makers(CONFIG, split="train", seed=seed)["dapo_math_17k"]() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_validation_has_unique_problems_with_right_integer_answers_below_1000() -> None:
    rows = aime_rows(CONFIG, seed=0)
    assert len({row["problem"] for row in rows}) == 30
    for row in rows:
        assert int(row["answer"]) == exact_answer(row["problem"])
        assert 0 <= int(row["answer"]) <= 999


def test_the_corpus_is_right_in_every_step_but_at_the_noise_rate() -> None:
    config = SyntheticConfig(noise_rate=0.0, subtraction_rate=0.3)
    for workload in Workload:
        for example in arithmetic(config, workload, 200):
            steps = [line for line in example.response.splitlines() if "=" in line]
            for step in steps:
                left, right = step.removesuffix(" ok").split("=")
                assert exact_answer(left + "=?") == int(right)
            assert example.response.endswith(f"\\boxed{{{exact_answer(example.problem)}}}")
    config = SyntheticConfig(min_terms=2, max_terms=2, noise_rate=0.25)
    examples = arithmetic(config, Workload.RL_ZERO, 4000)
    wrong = mean(not e.response.endswith(f"\\boxed{{{exact_answer(e.problem)}}}") for e in examples)
    # Standard error 0.007. The first and only step is wrong at the rate itself, save where 10 off falls below 0.
    assert wrong == pytest.approx(0.25, abs=0.03)


def test_direct_responses_have_the_length_of_the_tiny_profile_and_thinking_is_longer_and_more_often_right() -> None:
    lengths = [len(example.response) for example in arithmetic(SyntheticConfig(), Workload.RL_ZERO, 3000)]
    assert 48 < mean(lengths) < 62
    assert max(lengths) <= 160
    assert sum(length > 100 for length in lengths) / len(lengths) > 0.05
    direct, thinking = (arithmetic(SyntheticConfig(), workload, 1000) for workload in Workload)
    right_direct, right_thinking = (
        mean(e.response.endswith(f"\\boxed{{{exact_answer(e.problem)}}}") for e in examples)
        for examples in (direct, thinking)
    )
    assert right_thinking > right_direct + 0.1
    assert mean(len(e.response) for e in thinking) > 2 * mean(len(e.response) for e in direct)
    assert all(e.response.startswith("<think>\n") and e.response.count("</think>") == 1 for e in thinking)


def test_the_corpus_holds_no_validation_problem_of_any_seed() -> None:
    config = SyntheticConfig(min_terms=2, max_terms=2, max_term=10, num_validation_problems=5)  # 400 problems or so
    validation = {row["problem"] for seed in range(5) for row in aime_rows(config, seed=seed)}
    corpus = {example.problem for example in arithmetic(config, Workload.RL_ZERO, 5000)}
    assert len(corpus) > 50
    assert not validation & corpus


def test_more_problems_or_larger_sums_than_there_are_end_in_an_error_rather_than_never() -> None:
    """Two digits from 1 to 9 make 81 problems, of which validation keeps a few."""
    config = SyntheticConfig(
        num_train_problems=82, num_conflicting=0, min_terms=2, max_terms=2, one_digit_rate=1.0, num_leaked=0
    )
    with pytest.raises(ConfigError, match=r"data.synthetic.num_train_problems must be at most about 7\d, .*, got 82; "):
        dapo_rows(config, split="train", seed=0)
    config = SyntheticConfig(num_train_problems=8, max_terms=900, terms_decay=1.0, one_digit_rate=0.0)
    with pytest.raises(ConfigError, match=r"max_terms must leave sums of so many terms at most 999, got "):
        dapo_rows(config, split="train", seed=0)
