from pathlib import Path

import pytest

from benchmarks.runs import find_execution, open_run
from slipstream.config import ConfigError
from slipstream.recipe import load_recipe, write_recipe
from slipstream.records.files import write_record
from slipstream.records.run import NumericsRecord
from slipstream.types import Dtype
from tests.small import tuned


@pytest.fixture
def execution(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "tiny-1"
    for stage in ("prepare_data", "prepare_policy/policy", "pretrain_draft/draft", "report_speedup"):
        (path / stage).mkdir(parents=True)
    write_recipe(load_recipe("tiny"), path / "start_run" / "recipe.yaml")
    tuned(path / "tune_draft_length", k=5)
    return path


def test_a_run_is_found_by_its_directory_its_report_and_a_link_and_what_is_none_is_refused(
    execution: Path, tmp_path: Path
) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(execution / "report_speedup")
    assert [find_execution(path) for path in (execution, execution / "report_speedup", latest)] == [execution] * 3
    (execution / "tune_draft_length" / "tuning.json").unlink()
    with pytest.raises(ConfigError, match=r"--run must be .*tiny-1 lacks tune_draft_length/tuning.json") as refused:
        find_execution(execution)
    assert "prepare_policy/policy" not in str(refused.value).split("lacks")[1]


def test_an_automatic_type_becomes_what_the_run_computed_in(execution: Path) -> None:
    record = NumericsRecord(dtype="bfloat16", reason="measured", float32_ms=2.0, bfloat16_ms=1.0, capabilities=())
    write_record(record, execution / "numerics" / "numerics.json")
    run = open_run(execution / "report_speedup")
    assert (run.recipe.learner.dtype, run.recipe.engine.dtype) == (Dtype.BFLOAT16, Dtype.BFLOAT16)
    assert run.chosen_k == 5
    assert "learner bfloat16, engine bfloat16" in run.described()
