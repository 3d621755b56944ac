"""Where runs are tracked, and what names, values and keys they may have."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

from pydantic import Field

from slipstream.config import Checked, Int, NonNegativeFloat, PositiveFloat, Switch, require

KEY_TAG = "slipstream.key"
"""Tag of every run: what it is found by."""

KIND_TAG = "slipstream.kind"
EXECUTION = "execution"
"""`KIND_TAG` of the run of a whole execution; those of its tasks have none."""
ABLATION, PART = "ablation", "part"
"""`KIND_TAG` of the run of a whole ablation, and of those of its parts below it."""

# Stricter than MLflow's own rule, so that nothing spooled today is refused by the server at replay.
_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}")
_FIELD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,240}")  # room for the `changed.` of a tag
_SQLITE, _QUOTED_SQLITE = "sqlite:///", "sqlite+pysqlite:///"

# Source: MLflow 3.17, `mlflow.utils.validation`.
_MAX_NAME_CHARACTERS = 250
_MAX_EXPERIMENT_CHARACTERS = 500
_MAX_CHARACTERS = {"param": 6000, "tag": 8000}


class DriftConfig(Checked, path="tracking.drift"):
    """Comparison of an execution's results with those of earlier ones, and the consequence of a drift."""

    num_executions: Annotated[Int, Field(ge=5)] = 20
    """Last comparable executions that results are compared with; at least five. Set it for a longer memory."""
    fail: Switch = False
    """Fail the execution after everything is written, so that Flyte notifies of the drift."""


class TrackingConfig(Checked, path="tracking"):
    """The tracking server and how patiently it is asked."""

    uri: str | None = None
    """Address of the MLflow server; null takes SQLite under the run root. Set it for a server outside the cluster."""
    experiment: str | None = None
    """MLflow experiment; null takes the recipe's name. Set it to keep runs apart."""
    replay_every_s: PositiveFloat = 5.0
    """Seconds between two replays of the points that wait on disk."""
    close_wait_s: NonNegativeFloat = 30.0
    """Seconds that a task's end waits for its last points; then they stay on disk. Set it for a slow server."""
    drift: DriftConfig = field(default_factory=DriftConfig)
    """Comparison of results with those of earlier executions."""

    def _check(self) -> None:
        if self.uri is not None:
            is_address = "://" in self.uri or self.uri.startswith("databricks")
            fix = "as http://HOST:PORT; null uses SQLite"
            # MLflow would make a directory of anything else.
            self._require(is_address, "uri", "must name a server or be null", fix)
        if self.experiment is not None:
            check_experiment(self.experiment, "tracking.experiment")


def store_uri(config: TrackingConfig, root: Path) -> str:
    """The configured server, or the SQLite store under `root`."""
    return config.uri or sqlite_uri(root.resolve() / "mlflow.db")


def sqlite_uri(path: Path) -> str:
    """The address of the SQLite file `path`, with `%` and `?` quoted as SQLAlchemy (from 2.1 on) reads it.

    A quoted one names the driver too: without it MLflow makes a directory of the quoted name beside the right one.

    Raises:
        ConfigError: a name on the path is not UTF-8, which no address can hold.
    """
    text = str(path)
    require(text.encode(errors="replace").decode() == text, "run root", "must be a path in UTF-8", text, "rename it")
    quoted = text.replace("%", "%25").replace("?", "%3F")
    return f"{_SQLITE if quoted == text else _QUOTED_SQLITE}{quoted}"


def is_sqlite(uri: str) -> bool:
    """Return True if `uri` stands for a SQLite file."""
    return uri.startswith((_SQLITE, _QUOTED_SQLITE))


def sqlite_path(uri: str) -> Path:
    """The file that `uri`, an address as of `sqlite_uri`, stands for."""
    return Path(unquote(uri.removeprefix(_SQLITE).removeprefix(_QUOTED_SQLITE).partition("?")[0]))


def check_experiment(name: str, field: str) -> None:
    """Refuse a name that no experiment of MLflow may have."""
    rule = f"must be 1 to {_MAX_EXPERIMENT_CHARACTERS} characters that are not all blank"
    require(bool(name.strip()) and len(name) <= _MAX_EXPERIMENT_CHARACTERS, field, rule, name)


def check_key(key: str) -> None:
    """Refuse a key that could not stand in a search filter."""
    require(bool(_KEY.fullmatch(key)), "tracking.key", "must be up to 200 letters, digits and ._/:-", key)


def check_metrics(metrics: Mapping[str, float], step: int) -> None:
    """Refuse a point that the server would refuse, or that nobody could read later.

    Raises:
        ConfigError: a name other than `area/name`, a `time/` metric without its unit, a step below 0, a value that
            is not finite (the loss that became NaN should be seen now, not found as a gap in a curve).
    """
    require(step >= 0, "tracking.step", "must be >= 0", step)
    for name, value in metrics.items():
        require(bool(_METRIC_NAME.fullmatch(name)), "metric name", "must be `area/name` of [a-z0-9_]", name)
        is_short = len(name) <= _MAX_NAME_CHARACTERS
        require(is_short, "metric name", f"must have <= {_MAX_NAME_CHARACTERS} characters", name)
        unit_given = not name.startswith("time/") or name.endswith(("_s", "_ms"))
        require(unit_given, "metric name", "must end with its unit, _s or _ms", name)
        require(math.isfinite(value), f"metric {name} of step {step}", "must be finite", value)


def fitted(kind: Literal["param", "tag"], fields: Mapping[str, object]) -> dict[str, str]:
    """Parameters or tags as texts that MLflow stores: a longer one is cut and says so.

    Raises:
        ConfigError: a name that MLflow refuses.
    """
    for name in fields:
        require(bool(_FIELD_NAME.fullmatch(name)), f"{kind} name", "must be letters, digits and _.-", name)
    return {name: _cut(str(value), _MAX_CHARACTERS[kind]) for name, value in fields.items()}


def _cut(text: str, max_characters: int) -> str:
    """The text as a database takes it (no NUL, no half of a surrogate pair), its end left out if it is too long."""
    stored = text.encode(errors="replace").decode().replace("\0", "?")
    if len(stored) <= max_characters:
        return stored
    mark = f" [cut: {len(stored)} characters in all]"
    return stored[: max_characters - len(mark)] + mark
