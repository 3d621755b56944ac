"""Tracking in MLflow that a dead server can neither stop nor rob: every point goes through a spool on disk.

    start_run                     parent run, key `<execution>`
      └─ train_grpo, spec arm     child run, key `<execution>/<node>`: the same for every attempt

`Tracker` appends to the spool, and a daemon thread replays it; `replay` does the same later, from the spool alone.
Importing this package costs nothing: MLflow (4-8 s) is imported by the first `Tracker.open` or `replay`.
"""

from slipstream.tracking.config import ABLATION, EXECUTION, KIND_TAG, PART, DriftConfig, TrackingConfig, store_uri
from slipstream.tracking.executions import Execution, experiment_names, fetch_artifact, read_executions
from slipstream.tracking.mlflow_store import TrackingError, view_addresses
from slipstream.tracking.replay import ReplayResult, replay, replay_command, unsent
from slipstream.tracking.spool import GPUS_TAG, RunStatus, Spent, end_open_runs, has_ended, spent, spool_directory
from slipstream.tracking.tracker import Tracker

__all__ = [
    "ABLATION",
    "EXECUTION",
    "GPUS_TAG",
    "KIND_TAG",
    "PART",
    "DriftConfig",
    "Execution",
    "ReplayResult",
    "RunStatus",
    "Spent",
    "Tracker",
    "TrackingConfig",
    "TrackingError",
    "end_open_runs",
    "experiment_names",
    "fetch_artifact",
    "has_ended",
    "read_executions",
    "replay",
    "replay_command",
    "spent",
    "spool_directory",
    "store_uri",
    "unsent",
    "view_addresses",
]
