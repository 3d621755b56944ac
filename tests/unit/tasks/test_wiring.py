"""What every task and workflow is declared with: read off the registered objects, for a pod meets nothing else."""

from datetime import UTC, datetime, timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from flytekit import WorkflowFailurePolicy
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.workflow import PythonFunctionWorkflow

from slipstream.study.variants import day_seed
from tasks.bake_off import fail_bake_off
from tasks.fail_run import fail_certificate, fail_run
from tasks.project_request import project_request
from tasks.recoverable import recoverable
from tests.unit.tasks.declared import declared_tasks
from workflows.ablation import ablation as decorated
from workflows.asynchronous_rl import asynchronous_rl
from workflows.bake_off import bake_off
from workflows.losslessness import certify
from workflows.speculative_rl import speculative_rl

_LAUNCH = ""  # flytekit's id of where inputs come from
_ATTEMPT = recoverable(timedelta(1))(lambda: None).__code__


TASKS = declared_tasks()


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_says_which_failures_another_attempt_may_outlive(task: PythonFunctionTask) -> None:
    assert task.task_function.__code__ is _ATTEMPT


def test_the_store_alone_keeps_outputs_and_every_task_but_those_that_only_check_is_tried_again() -> None:
    assert [name for name, task in TASKS.items() if task.metadata.cache] == []
    tried_once = {name for name, task in TASKS.items() if task.metadata.retries != 2}
    checks = {"check_drafters", "plan_ablation", "require_lossless", "require_no_drift", "require_ready", "start_run"}
    assert tried_once == checks


@pytest.mark.parametrize(
    ("workflow", "closes"),
    [(speculative_rl, fail_run), (asynchronous_rl, fail_run), (certify, fail_certificate), (bake_off, fail_bake_off)],
    ids=["chain", "asynchronous", "certify", "bake-off"],
)
def test_a_failed_node_ends_no_other_and_the_run_is_closed(
    workflow: PythonFunctionWorkflow, closes: PythonFunctionTask
) -> None:
    workflow.compile()

    assert workflow.failure_node is not None
    assert workflow.failure_node.flyte_entity is closes
    assert workflow.workflow_metadata.on_failure == WorkflowFailurePolicy.FAIL_AFTER_EXECUTABLE_NODES_COMPLETE
    assert set(closes.python_interface.inputs) == {*workflow.python_interface.inputs, "err"}
    # A local execution hands on what has a value, and nothing of an input that is None.
    left_out = [name for name, (_, given) in workflow.python_interface.inputs_with_defaults.items() if given is None]
    for name in left_out:
        assert signature(closes.task_function).parameters[name].default is None or name in ("policy", "draft"), name


@pytest.mark.parametrize(
    "workflow", [speculative_rl, asynchronous_rl, certify, bake_off, decorated], ids=lambda each: each.__name__
)
def test_the_first_task_is_handed_each_input_of_the_launch_under_its_own_name(workflow: PythonFunctionWorkflow) -> None:
    workflow.compile()

    first = next(node for node in workflow.nodes if node.id in ("start-run", "plan-ablation"))
    promised = {each.var: each.binding.promise for each in first.bindings if each.binding.promise is not None}
    shared = {*workflow.python_interface.inputs} & {each.var for each in first.bindings}
    assert {"recipe", "overrides", "run_root"} < shared
    assert shared == {*promised}
    assert {(var, each.node_id, each.var) for var, each in promised.items()} == {(var, _LAUNCH, var) for var in shared}


@pytest.mark.parametrize("of_the_day", [False, True])
def test_the_day_seeds_recurring_projections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_the_day: bool) -> None:
    seen: list[int] = []

    def write_request(request: Any, directory: Path, *, seed: int) -> Path:
        seen.append(seed)
        (tmp_path / "projection.json").touch()
        return tmp_path / "projection.json"

    monkeypatch.setattr("tasks.project_request.write_request", write_request)
    shape = {"model": "qwen3-8b", "hardware": "gb200", "num_gpus": 32, "generation_fraction": 0.5}
    numbers = {"num_speculative_tokens": 3, "mean_acceptance_length": 2.5, "max_off_policy_steps": 0}
    before = day_seed(datetime.now(UTC))
    project_request.task_function(**shape, **numbers, seed_of_the_day=of_the_day)
    assert before <= seen[0] <= before + 1 if of_the_day else seen == [0]
