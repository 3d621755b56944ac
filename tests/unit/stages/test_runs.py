"""The MLflow runs of an execution and its tasks, in the real MLflow on SQLite, and tags of where they run."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.kubernetes.profile import CLUSTERS
from slipstream.recipe import Recipe, load_recipe, parameters
from slipstream.records.files import write_record
from slipstream.records.run import DriftRecord
from slipstream.report.page import write_report
from slipstream.report.results import verdict_tags
from slipstream.stages import runs
from slipstream.stages.context import RunContext
from slipstream.stages.start_run import start_run
from slipstream.tracking.config import TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import Execution, open_store, read_executions
from tests.unit.report.handmade import CERTIFICATE, RECORD


def test_a_pod_is_tagged_from_its_environment_and_the_profiles_console_with_what_is_known(tmp_path: Path) -> None:
    values = yaml.safe_load((CLUSTERS / "cpu.yaml").read_text()) | {"name": "mine"}
    values["flyte"] = {"console": "https://flyte/console/"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    environment = {
        "SLIPSTREAM_GIT_COMMIT": "abc123",
        "SLIPSTREAM_NODE": "gb200-07",
        "SLIPSTREAM_IMAGE": "registry/slipstream:v1",
        "SLIPSTREAM_CLUSTER": str(tmp_path / "mine.yaml"),
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "slipstream",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "FLYTE_INTERNAL_EXECUTION_ID": "a7rw89",
    }
    assert runs.origin_tags(environment, gpu="GB200") == {
        "git.commit": "abc123",
        "mlflow.source.git.commit": "abc123",
        "image": "registry/slipstream:v1",
        "node": "gb200-07",
        "gpu": "GB200",
        "flyte.execution_url": "https://flyte/console/projects/slipstream/domains/development/executions/a7rw89",
    }
    known = runs.origin_tags({"SLIPSTREAM_GIT_COMMIT": "abc123"})
    assert set(known) == {"git.commit", "mlflow.source.git.commit", "node"}


def test_a_checkout_is_named_by_its_commit_and_by_whether_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert runs.checkout_commit(tmp_path) == ""  # outside a repository
    git("init", "-q")
    (tmp_path / "__init__.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert runs.checkout_commit(tmp_path) == commit
    (tmp_path / "__init__.py").write_text("changed")
    assert runs.checkout_commit(tmp_path) == f"{commit}-dirty"
    installed = tmp_path / "venv" / "slipstream"  # a package that lies in somebody else's repository
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert runs.checkout_commit(installed) == ""


def test_a_task_is_tagged_with_the_type_it_computes_in_and_one_that_computes_nothing_with_none() -> None:
    recipe = load_recipe("tiny", overrides={"learner": {"dtype": "float32"}, "engine": {"dtype": "bfloat16"}})
    assert runs.dtype_tags(recipe) == {"dtype.learner": "float32", "dtype.engine": "bfloat16"}
    assert runs.dtype_tags(load_recipe("tiny")) == {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[[Path], Path]) -> Path:
    """One SQLite store for the file. Tests differ by execution."""
    return make_store(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(store_uri(TrackingConfig(), root))


def start(root: Path, execution: str) -> tuple[RunContext, Recipe]:
    context, path = start_run("tiny", root=root, execution=execution, overrides={"tracking": {"replay_every_s": 0.1}})
    return context, load_recipe(str(path))


def read(root: Path, execution: str) -> Execution:
    return read_executions(store_uri(TrackingConfig(), root), names=[execution])[0]


def test_the_run_lives_as_long_as_the_execution_and_ends_with_its_results(root: Path, client: Any) -> None:
    context, recipe = start(root, "tiny-1")
    begun = read(root, "tiny-1")
    assert begun.status == "RUNNING"
    assert read_executions(store_uri(TrackingConfig(), root), experiment="tiny", names=["tiny-1"]) == [begun]
    route = open_store(store_uri(TrackingConfig(), root)).run_route("tiny", "tiny-1")
    assert re.fullmatch(rf"#/experiments/\d+/runs/{begun.run_id}", route)
    assert begun.params == parameters(recipe)
    assert begun.params["grpo.num_steps"] == "24"
    assert "goes on" in begun.tags["mlflow.note.content"]
    assert begun.tags["node"]

    with runs.tracked(context, recipe, "prepare_data"):
        pass
    assert read(root, "tiny-1").status == "RUNNING"

    directory = root / "report"
    write_record(RECORD, directory / "run.json")
    write_report(RECORD, directory)
    runs.end_reported_execution(context, recipe, RECORD, directory, DriftRecord(summary="Unknown."))
    ended = read(root, "tiny-1")
    assert ended.status == "FINISHED"
    result = {name.removeprefix("result/"): value for name, value in ended.metrics.items()}
    assert result["generation_speedup"] == pytest.approx(2.0)
    assert result["step_speedup_high"] == pytest.approx(1.95766, abs=1e-5)
    assert (result["reward_difference"], result["lossless"]) == (0.0, 1.0)
    assert 0 < result["hours"] < 1
    assert result["gpu_hours"] == 0.0  # the tiny recipe has no GPUs
    assert ended.params["k"] == "2"
    assert ended.tags["mlflow.note.content"].startswith("Speculation (eagle3, k = 2) against none. Step")
    assert verdict_tags(RECORD).items() <= ended.tags.items()
    artifacts = {artifact.path for artifact in client.list_artifacts(ended.run_id)}
    assert artifacts == {"recipe.yaml", "report.html", "report.json", "run.json", "figures"}
    assert "figures/learning.svg" in {artifact.path for artifact in client.list_artifacts(ended.run_id, "figures")}


def test_a_failed_task_ends_the_run_and_a_later_attempt_opens_it_again(root: Path) -> None:
    context, recipe = start(root, "tiny-2")
    with pytest.raises(OSError, match="node lost"), runs.tracked(context, recipe, "pretrain_draft"):
        raise OSError("node lost")
    assert read(root, "tiny-2").status == "FAILED"
    with runs.tracked(context, recipe, "pretrain_draft"):
        assert read(root, "tiny-2").status == "RUNNING"
    runs.end_execution(context, recipe, CERTIFICATE)
    assert (read(root, "tiny-2").status, read(root, "tiny-2").metrics["result/lossless"]) == ("FINISHED", 1.0)


def test_an_arms_run_has_the_recipe_its_own_k_and_a_name_that_says_which(root: Path, client: Any) -> None:
    context, recipe = start(root, "tiny-3")
    what = {"arm": "autoregressive", "k": "0", "draft.method": "none"}
    params = {**parameters(recipe), **what}
    with runs.tracked(context, recipe, "train_grpo_autoregressive", what, name="tiny-3 autoregressive", params=params):
        pass
    experiment = client.get_experiment_by_name("tiny")
    (run,) = client.search_runs([experiment.experiment_id], "params.arm LIKE '%'")  # the filter of the view of arms
    assert (run.info.run_name, run.data.params) == ("tiny-3 autoregressive", params)
    assert experiment.tags["mlflow.sharedViewState.arms"]
