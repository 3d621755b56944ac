"""Files that a run logged come back by the run's key, from the real MLflow on SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.tracking import Tracker, TrackingConfig, TrackingError, fetch_artifact, store_uri

KEY = "demo-1/report_speedup"


def test_an_artifact_comes_back_by_the_runs_key_and_a_missing_one_is_named(stored_root: Path) -> None:
    config = TrackingConfig(replay_every_s=0.1)
    logged = stored_root / "run.json"
    logged.write_text('{"recipe": "tiny"}')
    with Tracker.open(config, root=stored_root, experiment="artifacts", key=KEY, name="report_speedup") as tracker:
        tracker.log_artifact(logged)
    uri, out = store_uri(config, stored_root), stored_root / "out"
    out.mkdir()
    assert fetch_artifact(uri, key=KEY, name="run.json", directory=out).read_text() == '{"recipe": "tiny"}'
    with pytest.raises(TrackingError, match=r"run 'demo-1/report_speedup' has no artifact 'other.json'"):
        fetch_artifact(uri, key=KEY, name="other.json", directory=out)
    with pytest.raises(TrackingError, match="no run has the key 'demo-2'"):
        fetch_artifact(uri, key="demo-2", name="run.json", directory=out)
