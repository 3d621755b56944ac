"""What a recipe may say of the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from slipstream.data.config import DataConfig, SourceConfig
from slipstream.data.synthetic import SyntheticConfig

Data = partial(DataConfig, max_prompt_tokens=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": ""}, "data source path must not be empty, got ''"),
        ({"path": "a/b", "max_rows": 0}, "max_rows of data source a/b must be > 0 or null, got 0"),
        ({"path": "a/b", "subset": ""}, "subset of data source a/b must not be empty, got ''"),
        ({"path": "a/b", "split": ""}, "split of data source a/b must not be empty, got ''"),
        (
            {"path": "synthetic", "split": "test"},
            "split of data source synthetic must not be set: there is one, got 'test'",
        ),
    ],
)
def test_a_source_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(SourceConfig, **values) == message


def test_a_source_may_be_read_whole_or_in_part() -> None:
    assert SourceConfig(path="a").max_rows is None
    assert SourceConfig(path="a", max_rows=1).max_rows == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": ()}, "data.train must name at least one source, got ()"),
        ({"draft_in_domain": ()}, "data.draft_in_domain must name at least one source, got ()"),
        ({"draft_general": ()}, "data.draft_general must name at least one source, got ()"),
        ({"validation": ()}, "data.validation must name at least one source, got ()"),
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens must be > 0, got 0"),
        ({"num_validation_problems": 0}, "data.num_validation_problems must be > 0 or null, got 0"),
        ({"instruction": "solve"}, "data.instruction must hold {problem} exactly once, got 'solve'"),
        (
            {"instruction": "{problem} {problem}"},
            "data.instruction must hold {problem} exactly once, got '{problem} {problem}'",
        ),
    ],
)
def test_data_outside_their_bounds_are_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(Data, **values) == message


def test_data_on_their_bounds_are_taken() -> None:
    config = Data(num_validation_problems=1, instruction="Q: {problem}")
    assert (config.max_prompt_tokens, config.num_validation_problems) == (1, 1)
    assert Data().num_validation_problems is None  # all that the set holds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_train_problems": 0},
            "data.synthetic.num_train_problems must lie in [1, 1000000], got 0; larger sets come from files",
        ),
        ({"num_copies": 0}, "data.synthetic.num_copies must lie in [1, 1000000], got 0; larger sets come from files"),
        (
            {"num_draft_rows": 0},
            "data.synthetic.num_draft_rows must lie in [1, 1000000], got 0; larger sets come from files",
        ),
        (
            {"num_validation_problems": 0},
            "data.synthetic.num_validation_problems must lie in [1, 1000000], got 0; larger sets come from files",
        ),
        ({"num_conflicting": -1}, "data.synthetic.num_conflicting must be >= 0, got -1"),
        ({"num_leaked": -1}, "data.synthetic.num_leaked must be >= 0, got -1"),
        ({"one_digit_rate": 1.5}, "data.synthetic.one_digit_rate must lie in [0, 1], got 1.5"),
        ({"subtraction_rate": -0.5}, "data.synthetic.subtraction_rate must lie in [0, 1], got -0.5"),
        ({"noise_rate": 1.5}, "data.synthetic.noise_rate must lie in [0, 1], got 1.5"),
        ({"careless_rate": 1.5}, "data.synthetic.careless_rate must lie in [0, 1], got 1.5"),
        ({"general_rate": 1.5}, "data.synthetic.general_rate must lie in [0, 1], got 1.5"),
        ({"num_leaked": 31}, "data.synthetic.num_leaked must be <= num_validation_problems (30), got 31"),
        (
            {"num_train_problems": 7},
            "data.synthetic.num_conflicting must be <= num_train_problems (7), got 8",
        ),
        ({"min_terms": 1}, "data.synthetic.min_terms must be >= 2, got 1"),
        ({"max_terms": 2}, "data.synthetic.max_terms must be >= min_terms (3), got 2"),
        ({"terms_decay": 0.0}, "data.synthetic.terms_decay must lie in (0, 2], got 0.0"),
        ({"max_term": 9}, "data.synthetic.max_term must lie in [10, 99], got 9"),
        ({"max_term": 100}, "data.synthetic.max_term must lie in [10, 99], got 100"),
        (
            {"min_terms": 11},
            "data.synthetic.min_terms times max_term must be <= 999, the largest answer, got 11; "
            "lower min_terms or max_term",
        ),
    ],
)
def test_synthetic_data_outside_their_bounds_are_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(SyntheticConfig, **values) == message


def test_synthetic_data_on_their_bounds_are_taken() -> None:
    low = SyntheticConfig(
        num_train_problems=1,
        num_copies=1,
        num_conflicting=1,
        num_leaked=1,
        num_draft_rows=1,
        num_validation_problems=1,
        min_terms=2,
        max_terms=2,
        terms_decay=0.5,
        max_term=10,
        one_digit_rate=0.0,
    )
    high = SyntheticConfig(num_conflicting=0, num_leaked=0, min_terms=10, max_term=99, one_digit_rate=1.0)
    assert (low.max_terms, high.min_terms) == (2, 10)
