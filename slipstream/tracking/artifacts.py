"""Read back what a run logged: a file by the run's key."""

from __future__ import annotations

from pathlib import Path

from slipstream.tracking.config import TrackingConfig, check_key, existing_sqlite, is_sqlite
from slipstream.tracking.mlflow_store import MlflowStore


def fetch_artifact(uri: str, *, key: str, name: str, directory: Path) -> Path:
    """Download the artifact `name` of the run with `key` from the server `uri` into `directory`.

    Raises:
        ConfigError: `key` could not be a key, or `uri` names a SQLite file that is not there.
        TrackingError: the server does not answer, or lacks the run or the artifact.
    """
    check_key(key)
    if is_sqlite(uri):
        existing_sqlite(uri)
    store = MlflowStore(uri, request_timeout_s=TrackingConfig().request_timeout_s)
    return store.fetch_artifact(key, name, directory)
