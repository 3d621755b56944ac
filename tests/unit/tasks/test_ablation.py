"""Parts of an ablation as a pod of an array starts them: one of a list, by its index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slipstream.kubernetes.profile import read_profile
from slipstream.records.files import write_record
from slipstream.study.apart import PartRecord, ending, plan_ablation
from slipstream.study.variants import Grid, Kind

ROOT = Path(__file__).parents[3]
UNTRACKED = {"uri": "http://127.0.0.1:9", "close_wait_s": 0.0}
POLICY = PartRecord(reason="ConfigError: no such model")


def test_a_pod_makes_the_part_of_its_index_and_leaves_its_error(tmp_path: Path) -> None:
    from flyteidl.core.errors_pb2 import ErrorDocument
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    from slipstream.stages.context import RunContext

    planned = plan_ablation(
        "tiny",
        Grid(draft_lengths=(3, 5)),
        root=tmp_path / "runs",
        execution="abl",
        requested={"tracking": UNTRACKED},
        cluster=read_profile("local"),
    )
    write_record(POLICY, tmp_path / "runs" / "abl" / "policy-rl_zero" / "part.json")
    flyte = FlyteContextManager.current_context()
    literals = TypeEngine.dict_to_literal_map(flyte, {"context": planned[Kind.VARIANT]}, {"context": list[RunContext]})
    (tmp_path / "inputs.pb").write_bytes(literals.to_flyte_idl().SerializeToString())
    (tmp_path / "outputs").mkdir()
    command = [
        str(Path(sys.executable).with_name("pyflyte-map-execute")),
        *("--inputs", str(tmp_path / "inputs.pb"), "--output-prefix", str(tmp_path / "outputs")),
        *("--raw-output-data-prefix", str(tmp_path / "raw")),
        *("--resolver", "flytekit.core.array_node_map_task.ArrayNodeMapTaskResolver", "--", "vars", ""),
        *("resolver", "flytekit.core.python_auto_container.default_task_resolver"),
        *("task-module", "tasks.ablation", "task-name", "make_part"),
    ]
    array = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX", "FLYTE_K8S_ARRAY_INDEX": "1"}
    environment = {**os.environ, **array, "PYTHONPATH": str(ROOT), "FLYTE_INTERNAL_EXECUTION_ID": "e"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, timeout=120)

    error = ErrorDocument.FromString((tmp_path / "outputs" / "error.pb").read_bytes()).error
    assert "policy-rl_zero failed: ConfigError: no such model" in error.message
    names = [context.execution.partition("/")[2] for context in planned[Kind.VARIANT]]
    endings = [ending(tmp_path / "runs", "abl", name) for name in names]
    assert endings[0] is None
    assert endings[1] is not None and endings[1].reason
