"""What may be tracked, and how the server may be asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from slipstream.tracking.config import TrackingConfig, check_key, check_metrics, fitted, sqlite_path, store_uri
from tests.unit.conftest import Refusal


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"uri": ""}, "tracking.uri must name a server or be null, got ''; as http://HOST:PORT; null uses SQLite"),
        (
            {"uri": "mlflow.example.com:5000"},
            "tracking.uri must name a server or be null, got 'mlflow.example.com:5000'; as http://HOST:PORT; "
            "null uses SQLite",
        ),
        ({"experiment": ""}, "tracking.experiment must be 1 to 500 characters that are not all blank, got ''"),
        ({"experiment": " "}, "tracking.experiment must be 1 to 500 characters that are not all blank, got ' '"),
        (
            {"experiment": "x" * 501},
            f"tracking.experiment must be 1 to 500 characters that are not all blank, got '{'x' * 501}'",
        ),
    ],
)
def test_tracking_outside_its_bounds_is_refused(refusal: Refusal, values: dict[str, Any], message: str) -> None:
    assert refusal(TrackingConfig, **values) == message


def test_without_a_server_the_store_is_sqlite_under_the_root(tmp_path: Path) -> None:
    assert store_uri(TrackingConfig(uri="http://host"), tmp_path) == "http://host"
    assert store_uri(TrackingConfig(), tmp_path) == f"sqlite:///{tmp_path.resolve()}/mlflow.db"


@pytest.mark.parametrize(
    ("name", "quoted"), [("runs", "runs"), ("a#b", "a#b"), ("a b", "a b"), ("überlauf", "überlauf")]
)
def test_the_address_of_a_file_is_its_path(name: str, quoted: str) -> None:
    _check_address(name, f"sqlite:////srv/{quoted}/mlflow.db")


@pytest.mark.parametrize(
    ("name", "quoted"), [("feature%2Fx", "feature%252Fx"), ("100%", "100%25"), ("a?b=%3F", "a%3Fb=%253F")]
)
def test_an_address_in_which_a_character_means_something_is_quoted(name: str, quoted: str) -> None:
    _check_address(name, f"sqlite+pysqlite:////srv/{quoted}/mlflow.db")


def _check_address(name: str, address: str) -> None:
    root = Path("/srv") / name
    uri = store_uri(TrackingConfig(), root)
    assert uri == address
    assert sqlite_path(uri) == root / "mlflow.db"
    assert sqlite_path(f"{uri}?timeout=5") == root / "mlflow.db"


def test_a_root_that_no_address_can_hold_is_refused(refusal: Refusal) -> None:
    message = refusal(store_uri, config=TrackingConfig(), root=Path("/srv/\udcff"))
    assert message == "run root must be a path in UTF-8, got '/srv/\\udcff/mlflow.db'; rename it"


def test_a_key_stands_in_a_search_filter(refusal: Refusal) -> None:
    check_key("run/1.a_b:c-d")
    assert refusal(check_key, key="it's") == 'tracking.key must be up to 200 letters, digits and ._/:-, got "it\'s"'


@pytest.mark.parametrize(
    ("metrics", "step", "message"),
    [
        ({"train/loss": 1.0}, -1, "tracking.step must be >= 0, got -1"),
        ({"loss": 1.0}, 0, "metric name must be `area/name` of [a-z0-9_], got 'loss'"),
        ({"validation/avg@32": 1.0}, 0, "metric name must be `area/name` of [a-z0-9_], got 'validation/avg@32'"),
        ({"time//step_s": 1.0}, 0, "metric name must be `area/name` of [a-z0-9_], got 'time//step_s'"),
        ({"time/generation": 1.0}, 0, "metric name must end with its unit, _s or _ms, got 'time/generation'"),
        ({"train/loss": math.nan}, 3, "metric train/loss of step 3 must be finite, got nan"),
        ({f"a/{'x' * 249}": 1.0}, 0, f"metric name must have <= 250 characters, got 'a/{'x' * 249}'"),
    ],
)
def test_a_point_that_nobody_could_read_is_refused(
    refusal: Refusal, metrics: dict[str, float], step: int, message: str
) -> None:
    assert refusal(check_metrics, metrics=metrics, step=step) == message


def test_a_point_with_its_area_and_unit_is_taken() -> None:
    check_metrics({"train/loss": 1.0, "time/generation_s": 1.0, "time/refit_ms": 2.0}, step=0)


def test_a_name_that_no_param_or_tag_may_have_is_refused(refusal: Refusal) -> None:
    assert refusal(fitted, kind="param", fields={"a b": "1"}) == "param name must be letters, digits and _.-, got 'a b'"
    assert refusal(fitted, kind="tag", fields={"a b": "1"}) == "tag name must be letters, digits and _.-, got 'a b'"


def test_what_mlflow_stores_whole_stays_as_it_is() -> None:
    assert fitted("param", {"k.draft-1_a": "x" * 6000, "k": 3, "on": True}) == {
        "k.draft-1_a": "x" * 6000,
        "k": "3",
        "on": "True",
    }
    assert fitted("tag", {"arm": "ü" * 8000}) == {"arm": "ü" * 8000}


def test_what_mlflow_would_not_store_whole_is_cut_and_says_so() -> None:
    mark = " [cut: 6001 characters in all]"  # 30 characters
    assert fitted("param", {"instruction": "x" * 6001}) == {"instruction": "x" * 5970 + mark}
    mark = " [cut: 20000 characters in all]"  # 31 characters
    assert fitted("tag", {"mlflow.note.content": "y" * 20_000}) == {"mlflow.note.content": "y" * 7969 + mark}


def test_what_no_database_can_hold_is_replaced() -> None:
    assert fitted("tag", {"error": "nul \0, half a pair \ud800"}) == {"error": "nul ?, half a pair ?"}
