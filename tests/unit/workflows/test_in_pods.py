"""Tasks as a pod starts them: `pyflyte-execute` in a process of its own, a folder for the object store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.types import ArmLoop
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
    "loop": ArmLoop.SYNCHRONOUS,
}


def started(directory: Path, *, cluster: str = "local", **changes: Any) -> str:
    """The error of `start_run` in a pod, empty if there was none."""
    from flyteidl.core.errors_pb2 import ErrorDocument
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    from tasks.start_run import start_run

    kinds = start_run.python_interface.inputs
    given = INPUTS | {"run_root": str(directory / "runs")} | changes
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
    return ErrorDocument.FromString(error.read_bytes()).error.message if error.is_file() else ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides": ["grpo.group_sise=4"]}, "unknown key 'grpo.group_sise'; did you mean 'grpo.group_size'?"),
        ({"cluster": "gb200", "run_root": "/mnt/slipstream/runs"}, "placement.gpus_per_node must be 1 to 4 on cluster"),
    ],
)
def test_a_wrong_launch_ends_with_the_field_and_the_fix_in_the_tasks_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in started(tmp_path, **changes)
    assert not (tmp_path / "runs").exists()
