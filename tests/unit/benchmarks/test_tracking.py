"""The store that `compare` is timed on is what executions leave, and bad input is named."""

from pathlib import Path

from benchmarks import tracking
from slipstream.report.comparison import answer
from slipstream.tracking.config import TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import read_executions


def test_the_store_holds_so_many_executions_that_compare_can_read(stored_root: Path) -> None:
    assert tracking.fill_store(stored_root, num_executions=3, runs_per_execution=5) == 15
    found = read_executions(store_uri(TrackingConfig(), stored_root))
    assert {execution.name for execution in found} == {"original", "copy-0", "copy-1"}
    assert {answer(execution) for execution in found} == {answer(found[0])}
    assert all(execution.params == found[0].params for execution in found)
