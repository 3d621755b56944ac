"""Tracking in MLflow that a dead server can neither stop nor rob: every point goes through a spool on disk.

    start_run                     parent run, key `<execution>`
      └─ train_grpo, spec arm     child run, key `<execution>/<node>`: the same for every attempt

`Tracker` appends to the spool and a daemon thread replays it; `replay` does the same later, from the spool alone.
Importing this package costs nothing: MLflow (4-8 s) is imported by the first `Tracker.open` or `replay`.
"""

from slipstream.tracking.artifacts import fetch_artifact
from slipstream.tracking.config import TrackingConfig, store_uri
from slipstream.tracking.ending import end_open_runs, unsent, was_ended
from slipstream.tracking.replay import ReplayResult, TrackingError, replay
from slipstream.tracking.tracker import RunStatus, Tracker, spool_directory

__all__ = [
    "ReplayResult",
    "RunStatus",
    "Tracker",
    "TrackingConfig",
    "TrackingError",
    "end_open_runs",
    "fetch_artifact",
    "replay",
    "spool_directory",
    "store_uri",
    "unsent",
    "was_ended",
]
