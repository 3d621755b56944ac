"""Tasks as a pod starts them: `pyflyte-execute` in a process of its own, a folder for the object store."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.recipe import CONFIGS
from slipstream.types import ArmLoop, Workload
from tests.forked.tasks import forked

ROOT = Path(__file__).parents[3]
INPUTS: dict[str, Any] = {
    "recipe": "tiny",
    "workload": None,
    "num_steps": None,
    "seed": None,
    "overrides": [],
    "max_off_policy_steps": None,
    "resume_execution": "",
    "reuse_stored": True,
    "loop": "synchronous",
}
NO_SERVER = "tracking={uri: 'http://127.0.0.1:9', close_wait_s: 0.0}"


def started(directory: Path, *, cluster: str = "local", **changes: Any) -> tuple[str, Path]:
    """The error of `start_run` in a pod, empty if there was none, and its outputs."""
    from flyteidl.core.errors_pb2 import ErrorDocument
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    from tasks.start_run import start_run

    kinds = start_run.python_interface.inputs
    given = INPUTS | {"run_root": str(directory / "runs")} | changes
    given["loop"] = ArmLoop(given["loop"])
    literals = TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), given, kinds)
    inputs, outputs = directory / "inputs.pb", directory / "outputs"
    outputs.mkdir()
    inputs.write_bytes(literals.to_flyte_idl().SerializeToString())
    command = forked(
        str(Path(sys.executable).with_name("pyflyte-execute")),
        *("--inputs", str(inputs), "--output-prefix", str(outputs), "--raw-output-data-prefix", str(directory / "raw")),
        *("--resolver", "flytekit.core.python_auto_container.default_task_resolver", "--"),
        *("task-module", "tasks.start_run", "task-name", "start_run"),
    )
    environment = {
        **os.environ,
        "SLIPSTREAM_CLUSTER": cluster,
        "PYTHONPATH": str(ROOT),
        "FLYTE_INTERNAL_EXECUTION_ID": "e",
    }
    subprocess.run(command, cwd=directory, env=environment, check=False, capture_output=True, timeout=120)
    error = outputs / "error.pb"
    return (ErrorDocument.FromString(error.read_bytes()).error.message if error.is_file() else ""), outputs


def test_a_sound_launch_records_its_recipe_in_the_store(tmp_path: Path) -> None:
    message, outputs = started(tmp_path, overrides=["grpo.group_size=4", NO_SERVER])
    assert message == ""
    assert (outputs / "outputs.pb").is_file()
    (recorded,) = (tmp_path / "runs").glob("*/start_run/recipe.yaml")
    assert "group_size: 4" in recorded.read_text()
    assert list((tmp_path / "raw").rglob("recipe.yaml"))


def test_the_recorded_recipe_keeps_the_seed_of_the_file_unless_the_launch_gives_one(tmp_path: Path) -> None:
    values = yaml.safe_load((CONFIGS / "tiny.yaml").read_text()) | {"workload": "rl_think"}
    values["grpo"]["seed"] = 5
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))

    def recorded(name: str, **given: Any) -> list[str]:
        (tmp_path / name).mkdir()
        message, _ = started(tmp_path / name, recipe=str(tmp_path / "mine.yaml"), overrides=[NO_SERVER], **given)
        assert message == ""
        (path,) = (tmp_path / name / "runs").glob("*/start_run/recipe.yaml")
        lines = [line.strip() for line in path.read_text().splitlines()]
        return [line for line in lines if line.startswith(("workload:", "seed:")) and "#" in line]

    assert recorded("kept") == ["workload: rl_think  # recipe", "seed: 5  # recipe"]
    given = recorded("given", seed=0, workload=Workload.RL_ZERO)
    assert given == ["workload: rl_zero  # launch", "seed: 0  # launch"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides": ["grpo.group_sise=4"]}, "unknown key 'grpo.group_sise'; did you mean 'grpo.group_size'?"),
        ({"run_root": "runs"}, "run_root must be absolute in pods, got 'runs'"),
        ({"max_off_policy_steps": 1}, "max_off_policy_steps must be left out or 0 here, got 1; launch asynchronous_rl"),
        ({"loop": "asynchronous"}, "loop.mode must be one_step_off or in_flight here, got 'synchronous'"),
        ({"cluster": "gb200", "run_root": "/mnt/slipstream/runs"}, "placement.gpus_per_node must be 1 to 4 on cluster"),
    ],
)
def test_a_wrong_launch_ends_with_the_field_and_the_fix_in_the_tasks_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    error, _ = started(tmp_path, **changes)
    assert message in error
    assert not (tmp_path / "runs").exists()


def _reads_by_its_name(function: ast.FunctionDef) -> list[str]:
    """Inputs that are files or directories of the store and that `function` turns to text."""
    remote = {
        argument.arg
        for argument in function.args.args
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id in ("FlyteFile", "FlyteDirectory")
    }
    return [
        call.args[0].id
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("str", "repr")
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id in remote
    ]


def test_no_task_takes_the_name_of_a_file_for_the_file() -> None:
    """`str` of a file in a blob store gives a path where nothing lies yet; `os.fspath` and `Path` fetch it."""
    functions = [
        node
        for path in (ROOT / "tasks").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 14
    assert [function.name for function in functions if _reads_by_its_name(function)] == []
    wrong = ast.parse("def task(recipe: FlyteFile): load(str(recipe))").body[0]
    assert isinstance(wrong, ast.FunctionDef)
    assert _reads_by_its_name(wrong) == ["recipe"]
