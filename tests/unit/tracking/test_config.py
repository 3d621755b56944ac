"""What may be tracked, and how the server may be asked."""

import math
from pathlib import Path

import pytest

from slipstream.tracking.config import TrackingConfig, check_key, check_metrics, fitted, sqlite_path, store_uri
from tests.unit.conftest import Refusal

SERVER = "tracking.uri must name a server or be null, got {!r}; as http://HOST:PORT; null uses SQLite"
NAME = "tracking.experiment must be 1 to 500 characters that are not all blank, got {!r}"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(("uri", value, SERVER) for value in ("", "mlflow.example.com:5000")),
        *(("experiment", value, NAME) for value in ("", " ", "x" * 501)),
    ],
)
def test_tracking_outside_its_bounds_is_refused(refusal: Refusal, field: str, value: str, message: str) -> None:
    assert refusal(TrackingConfig, **{field: value}) == message.format(value)


def test_without_a_server_the_store_is_sqlite_under_the_root(tmp_path: Path, refusal: Refusal) -> None:
    assert store_uri(TrackingConfig(uri="http://host"), tmp_path) == "http://host"
    assert store_uri(TrackingConfig(), tmp_path) == f"sqlite:///{tmp_path.resolve()}/mlflow.db"
    message = refusal(store_uri, config=TrackingConfig(), root=Path("/srv/\udcff"))
    assert message == "run root must be a path in UTF-8, got '/srv/\\udcff/mlflow.db'; rename it"


PLAIN, QUOTING = "sqlite", "sqlite+pysqlite"  # a character of the address means something


@pytest.mark.parametrize(
    ("name", "dialect", "quoted"),
    [
        *((name, PLAIN, name) for name in ("runs", "a#b", "a b", "überlauf")),
        *(("feature%2Fx", QUOTING, "feature%252Fx"), ("100%", QUOTING, "100%25"), ("a?b=%3F", QUOTING, "a%3Fb=%253F")),
    ],
)
def test_the_address_of_a_file_is_its_path_quoted_where_it_must_be(name: str, dialect: str, quoted: str) -> None:
    root = Path("/srv") / name
    uri = store_uri(TrackingConfig(), root)
    assert uri == f"{dialect}:////srv/{quoted}/mlflow.db"
    assert sqlite_path(uri) == root / "mlflow.db"
    assert sqlite_path(f"{uri}?timeout=5") == root / "mlflow.db"


def test_keys_and_names_have_the_letters_that_a_search_and_a_store_take(refusal: Refusal) -> None:
    check_key("run/1.a_b:c-d")
    assert refusal(check_key, key="it's") == 'tracking.key must be up to 200 letters, digits and ._/:-, got "it\'s"'
    assert refusal(fitted, kind="param", fields={"a b": "1"}) == "param name must be letters, digits and _.-, got 'a b'"
    assert refusal(fitted, kind="tag", fields={"a b": "1"}) == "tag name must be letters, digits and _.-, got 'a b'"


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
    check_metrics({"train/loss": 1.0, "time/generation_s": 1.0, "time/refit_ms": 2.0}, step=0)


def test_what_mlflow_would_not_store_is_cut_and_says_so_or_replaced_and_the_rest_stays_as_it_is() -> None:
    whole = {"k.draft-1_a": "x" * 6000, "k": "3", "on": "True"}
    assert fitted("param", {**whole, "k": 3, "on": True}) == whole
    assert fitted("tag", {"arm": "ü" * 8000}) == {"arm": "ü" * 8000}
    mark = " [cut: 6001 characters in all]"  # 30 characters
    assert fitted("param", {"instruction": "x" * 6001}) == {"instruction": "x" * 5970 + mark}
    mark = " [cut: 20000 characters in all]"  # 31 characters
    assert fitted("tag", {"mlflow.note.content": "y" * 20_000}) == {"mlflow.note.content": "y" * 7969 + mark}
    assert fitted("tag", {"error": "nul \0, half a pair \ud800"}) == {"error": "nul ?, half a pair ?"}
