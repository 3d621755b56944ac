"""Tasks as a pod starts them: Flyte's programs in a process of its own, a folder for the object store."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.kubernetes.profile import read_profile
from slipstream.records.files import write_record
from slipstream.stages.context import RunContext
from slipstream.study.apart import PartRecord, ending, plan_ablation
from slipstream.study.variants import Grid, Kind
from slipstream.types import ArmLoop
from tests.forked.tasks import forked
from tests.small import UNTRACKED
from tests.unit.tasks.declared import error_in, write_inputs

ROOT = Path(__file__).parents[3]
RESOLVER = "flytekit.core.python_auto_container.default_task_resolver"
LEFT_OUT = dict.fromkeys(("workload", "num_steps", "seed", "max_off_policy_steps"))
INPUTS: dict[str, Any] = {"recipe": "tiny", "overrides": [], "resume_execution": "", "reuse_stored": True, **LEFT_OUT}


def command(directory: Path, program: str, inputs: str, *resolver: str) -> list[str]:
    (directory / "outputs").mkdir()
    return [
        str(Path(sys.executable).with_name(program)),
        *("--inputs", inputs, "--output-prefix", str(directory / "outputs")),
        *("--raw-output-data-prefix", str(directory / "raw"), "--resolver", *resolver),
    ]


def error_of(directory: Path, command: list[str], **environment: str) -> str:
    """Message of the error that a task leaves in a pod, empty if there was none."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), "FLYTE_INTERNAL_EXECUTION_ID": "e", **environment}
    subprocess.run(command, cwd=directory, env=given, check=False, capture_output=True, timeout=120)
    path = directory / "outputs" / "error.pb"
    return error_in(path)[1] if path.is_file() else ""


@pytest.mark.parametrize(
    ("cluster", "changes", "message"),
    [
        ("local", {"overrides": ["grpo.group_sise=4"]}, "unknown key 'grpo.group_sise'; did you mean"),
        ("gb200", {"run_root": "/mnt/slipstream/runs"}, "placement.gpus_per_node must be 1 to 4 on cluster"),
    ],
)
def test_a_wrong_launch_ends_with_the_field_and_the_fix_in_the_tasks_error(
    tmp_path: Path, cluster: str, changes: dict[str, Any], message: str
) -> None:
    from tasks.start_run import start_run

    given = {**INPUTS, "loop": ArmLoop.SYNCHRONOUS, "run_root": str(tmp_path / "runs"), **changes}
    inputs = write_inputs(given, start_run.python_interface.inputs, tmp_path / "inputs.pb")
    names = (RESOLVER, "--", "task-module", "tasks.start_run", "task-name", "start_run")
    execute = forked(*command(tmp_path, "pyflyte-execute", inputs, *names))
    assert message in error_of(tmp_path, execute, SLIPSTREAM_CLUSTER=cluster)
    assert not (tmp_path / "runs").exists()


def test_a_pod_of_an_array_makes_the_part_of_its_index_and_leaves_its_error(tmp_path: Path) -> None:
    root, cluster = tmp_path / "runs", read_profile("local")
    where = {"root": root, "execution": "abl", "requested": {"tracking": UNTRACKED}, "cluster": cluster}
    variants = plan_ablation("tiny", Grid(draft_lengths=(3, 5)), **where)[Kind.VARIANT]
    reason = "ConfigError: no such model"
    write_record(PartRecord(reason=reason), root / "abl" / "policy-rl_zero" / "part.json")
    inputs = write_inputs({"context": variants}, {"context": list[RunContext]}, tmp_path / "inputs.pb")
    array = "flytekit.core.array_node_map_task.ArrayNodeMapTaskResolver"
    names = (array, "--", "vars", "", "resolver", RESOLVER, "task-module", "tasks.ablation", "task-name", "make_part")
    execute = command(tmp_path, "pyflyte-map-execute", inputs, *names)
    index = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX", "FLYTE_K8S_ARRAY_INDEX": "1"}
    assert f"policy-rl_zero failed: {reason}" in error_of(tmp_path, execute, **index)
    first, second = (ending(root, "abl", context.execution.partition("/")[2]) for context in variants)
    assert first is None
    assert second is not None and second.reason
