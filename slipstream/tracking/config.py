"""Where runs are tracked, and what names, values and keys they may have."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config import require

KEY_TAG = "slipstream.key"
"""Tag of every run: what it is found by."""

KIND_TAG = "slipstream.kind"
EXECUTION = "execution"
"""`KIND_TAG` of the run of a whole execution; those of its tasks have none."""
ABLATION, PART = "ablation", "part"
"""`KIND_TAG` of the run of a whole ablation, and of those of its parts below it."""

# Stricter than MLflow's own rule, so that nothing spooled today is refused by the server at replay.
_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")
_TIME_UNITS = ("_s", "_ms")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}")
_FIELD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,249}")
_MAX_PARAM_CHARACTERS = 6000
_MAX_TAG_CHARACTERS = 8000


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    """With how many earlier executions the results of one are compared, and what follows if they drifted."""

    num_executions: int = 20  # the last ones that are comparable
    min_executions: int = 5  # fewer are too few to say
    false_alarm_rate: float = 0.05  # of an execution in which nothing drifted, over all its results together
    min_change: float = 0.01  # a smaller one is none: of the mean, or absolute for rewards and accuracies
    fail: bool = False  # fail the execution after everything is written, so that Flyte notifies of it

    def __post_init__(self) -> None:
        name = "tracking.drift"
        require(self.min_executions >= 3, f"{name}.min_executions", "must be >= 3", self.min_executions)
        require(
            self.num_executions >= self.min_executions,
            f"{name}.num_executions",
            f"must be >= {name}.min_executions {self.min_executions}",
            self.num_executions,
        )
        rate = self.false_alarm_rate
        require(0 < rate < 1, f"{name}.false_alarm_rate", "must lie between 0 and 1", rate)
        require(self.min_change >= 0, f"{name}.min_change", "must be >= 0", self.min_change)


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """The tracking server and how patiently it is asked."""

    uri: str | None = None  # None: SQLite under the run root, artifacts beside it
    experiment: str | None = None  # None: the recipe's name
    replay_every_s: float = 5.0
    request_timeout_s: int = 10
    close_wait_s: float = 30.0  # how long `close` waits for the last points to arrive before it leaves them spooled
    drift: DriftConfig = field(default_factory=DriftConfig)

    def __post_init__(self) -> None:
        require(self.uri != "", "tracking.uri", "must name a server or be null", self.uri, "null uses SQLite")
        require(self.replay_every_s > 0, "tracking.replay_every_s", "must be > 0", self.replay_every_s)
        require(self.request_timeout_s >= 1, "tracking.request_timeout_s", "must be >= 1", self.request_timeout_s)
        require(self.close_wait_s >= 0, "tracking.close_wait_s", "must be >= 0", self.close_wait_s)


def store_uri(config: TrackingConfig, root: Path) -> str:
    """The configured server, or the SQLite store under `root`."""
    return config.uri or f"sqlite:///{root.resolve()}/mlflow.db"


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
        unit_given = not name.startswith("time/") or name.endswith(_TIME_UNITS)
        require(unit_given, "metric name", "must end with its unit, _s or _ms", name)
        require(math.isfinite(value), f"metric {name} of step {step}", "must be finite", value)


def check_params(params: Mapping[str, str]) -> None:
    """Refuse a parameter that MLflow could not store whole."""
    _check_fields("param", params, _MAX_PARAM_CHARACTERS)


def check_tags(tags: Mapping[str, str]) -> None:
    """Refuse a tag that MLflow could not store whole."""
    _check_fields("tag", tags, _MAX_TAG_CHARACTERS)


def _check_fields(kind: str, fields: Mapping[str, str], max_characters: int) -> None:
    for name, value in fields.items():
        require(bool(_FIELD_NAME.fullmatch(name)), f"{kind} name", "must be letters, digits and _.-", name)
        fix = "log it as an artifact"
        require(len(value) <= max_characters, f"{kind} {name}", f"must have <= {max_characters} characters", value, fix)
