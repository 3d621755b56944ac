"""Tracking in MLflow that a dead server can neither stop nor rob: every point goes through a spool on disk.

    start_run                     parent run, key `<execution>`
      └─ train_grpo, spec arm     child run, key `<execution>/<node>`: the same for every attempt

`Tracker` appends to the spool, and a daemon thread replays it; `replay` does the same later, from the spool alone.
Importing these modules costs nothing: MLflow (4-8 s) is imported by the first `Tracker` or `replay`.
"""
