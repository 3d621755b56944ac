"""Rules of the data section of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from slipstream.data.config import DataConfig, SourceConfig
from tests.unit.refusals import refused, rows

Data = partial(DataConfig, max_prompt_tokens=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": ""}, "data source.path must not be empty, got ''"),
        ({"path": "a/b", "max_rows": 0}, "data source.max_rows must be >= 1 or null, got 0"),
        ({"path": "a/b", "subset": ""}, "data source.subset must not be empty, got ''"),
        ({"path": "a/b", "split": ""}, "data source.split must not be empty, got ''"),
        (
            {"path": "synthetic", "split": "test"},
            "data source.split must be left out with path synthetic, got 'test'; its rows are made on the spot",
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


@rows(
    """
data.synthetic.num_leaked=31
    data.synthetic.num_leaked must be <= num_validation_problems (30), got 31
data.synthetic.num_train_problems=7
    data.synthetic.num_conflicting must be <= num_train_problems (7), got 8
data.synthetic.max_terms=2
    data.synthetic.max_terms must be >= min_terms (3), got 2
data.synthetic.min_terms=11 + data.synthetic.max_terms=11
    data.synthetic.min_terms times max_term must be <= 999, the largest answer, got 11; lower min_terms or max_term
"""
)
def test_synthetic_data_outside_their_bounds_are_refused(given: str, expected: str) -> None:
    assert refused(given) == expected
