"""The client of flyteadmin on answers of a Flyte 1.16.8; what no recording covers, on a server that keeps calls."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from flyteidl.admin import execution_pb2, node_execution_pb2, task_execution_pb2
from flyteidl.core import execution_pb2 as phases
from google.protobuf.json_format import ParseDict

from slipstream.config import ConfigError
from slipstream.kubernetes.flyte_admin import FlyteAdmin, FlyteError, State, admin_of
from slipstream.kubernetes.profile import FlyteServer, read_profile
from slipstream.kubernetes.smoke import CASES, smoke
from slipstream.recipe import load_recipe, write_recipe
from slipstream.stages.context import recorded_recipe
from slipstream.stages.fail_run import reconcile
from slipstream.stages.runs import execution_run
from slipstream.stages.start_run import start_run
from slipstream.tracking.spool import open_executions, read_spool
from tests.small import UNTRACKED, run_context
from tests.unit.kubernetes.api_server import NO_HTTP, Answer, Cluster, serving, status

RECORDED = Path(__file__).parents[2] / "data" / "flyte"
OF = "slipstream/development"
API = "/api/v1"
ABORTED, SUCCEEDED, FAILED = "a7rw89b74wgqsjcz9dq6", "abbdzqlnsdncvkdhmm4h", "akzs29r2pf6m5bpr2x6c"
GOING_ON = "a9p2snh8fj6lvgkrgk8t"
MESSAGES = {
    "execution_": execution_pb2.Execution,
    "executions": execution_pb2.ExecutionList,
    "node_executions": node_execution_pb2.NodeExecutionList,
    "task_executions": task_execution_pb2.TaskExecutionList,
}


def recorded(name: str) -> Answer:
    return 200, json.loads((RECORDED / f"{name}.json").read_text())


ROUTES = {
    f"GET {API}/executions/{OF}": recorded("executions"),
    f"GET {API}/executions/{OF}/{ABORTED}": recorded("execution_aborted"),
    f"GET {API}/executions/{OF}/{SUCCEEDED}": recorded("execution_succeeded"),
    f"GET {API}/executions/{OF}/{FAILED}": recorded("execution_failed_recipe"),
    f"GET {API}/node_executions/{OF}/{FAILED}": recorded("node_executions_failed_recipe"),
    f"GET {API}/node_executions/{OF}/{SUCCEEDED}": recorded("node_executions_succeeded"),
    f"GET {API}/task_executions/{OF}/{SUCCEEDED}/train-autoregressive": recorded("task_executions_two_attempts"),
}


def at(address: str) -> FlyteAdmin:
    return FlyteAdmin(endpoint=address, project="slipstream", domain="development", timeout_s=5.0)


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_the_recorded_answers_are_flytes_own_messages(path: Path) -> None:
    kind = next(kind for prefix, kind in MESSAGES.items() if path.stem.startswith(prefix))
    ParseDict(json.loads(path.read_text()), kind())


def test_states_are_read_as_flyte_tells_them() -> None:
    with serving(Cluster(answers=dict(ROUTES))) as (_, address):
        flyte = at(address)
        assert flyte.execution(ABORTED) == State(name=ABORTED, phase="ABORTED", message="terminated in the UI")
        failed = flyte.execution(FAILED)
        assert failed is not None and failed.phase == "FAILED"
        assert "did you mean 'grpo.group_size'?" in failed.message
        assert flyte.execution("unknown") is None
        nodes = {each.name: each.phase for each in flyte.nodes(FAILED)}
        assert list(nodes.items()) == [("start-node", "SUCCEEDED"), ("start-run", "FAILED"), ("fn0", "SUCCEEDED")]
        assert [each.name for each in flyte.nodes(SUCCEEDED) if each.deck] == ["report-speedup"]
        attempts = [(each.name, each.phase) for each in flyte.attempts(SUCCEEDED, "train-autoregressive")]
        assert attempts == [("1", "SUCCEEDED"), ("0", "FAILED")]
        assert [each.name for each in flyte.going_on()] == [GOING_ON]
        for state in (*flyte.going_on(), *flyte.nodes(SUCCEEDED)):
            assert state.phase in phases.WorkflowExecution.Phase.DESCRIPTOR.values_by_name


def test_a_refusal_and_a_silent_server_are_named() -> None:
    answers, refused = {f"GET {API}/executions/{OF}": status(401, "no token")}, r"401 .*no token.*; set FLYTE_TOKEN"
    with serving(Cluster(answers=answers)) as (_, address), pytest.raises(FlyteError, match=refused):
        at(address).going_on()
    with pytest.raises(FlyteError, match="did not answer GET executions"):
        at(address).going_on()
    other = Cluster(answers={f"GET {API}/executions/{OF}": NO_HTTP})
    with serving(other) as (_, address), pytest.raises(FlyteError, match=r"did not answer GET executions.*BadStatus"):
        at(address).going_on()


def test_the_profile_names_the_server_and_the_pod_its_project() -> None:
    profile = read_profile("cpu")
    with pytest.raises(ConfigError, match=r"flyte\.endpoint must be set in the profile cpu, got None"):
        admin_of(profile)
    named = replace(profile, flyte=FlyteServer(endpoint="http://flyte:8088"))
    environment = {"FLYTE_INTERNAL_EXECUTION_PROJECT": "p", "FLYTE_INTERNAL_EXECUTION_DOMAIN": "d", "FLYTE_TOKEN": "t"}
    flyte = admin_of(named, environment=environment)
    assert (flyte.endpoint, flyte.project, flyte.domain, flyte.token) == ("http://flyte:8088", "p", "d", "t")


def opened(root: Path, execution: str) -> None:
    recipe = load_recipe("tiny", overrides={"tracking": UNTRACKED})
    write_recipe(recipe, recorded_recipe(root, execution))
    execution_run(run_context(root, execution), recipe).detach()


def test_runs_of_terminated_executions_end_and_those_that_go_on_or_are_recovered_do_not(tmp_path: Path) -> None:
    code, listed = recorded("executions")
    recovering = json.loads(json.dumps(listed["executions"][0]))
    recovering["id"]["name"] = "another"
    recovering["spec"]["metadata"]["referenceExecution"] = {"name": FAILED}  # the console's Recover
    answers = {**ROUTES, f"GET {API}/executions/{OF}": (code, {"executions": [*listed["executions"], recovering]})}
    for execution in (ABORTED, FAILED, GOING_ON, "demo-of-this-machine"):
        opened(tmp_path, execution)
    cluster = Cluster(answers=answers)
    with serving(cluster) as (_, address):
        assert reconcile(tmp_path, at(address)) == {ABORTED: "ABORTED"}
    # Of hundreds of executions an old one may recover: Flyte is asked for those that have not ended.
    assert "filters=value_not_in(phase,SUCCEEDED;FAILED;ABORTED;TIMED_OUT)" in unquote(cluster.asked[0][0])
    assert open_executions(tmp_path) == sorted([FAILED, GOING_ON, "demo-of-this-machine"])
    ends = [event.status for path in (tmp_path / "spool").glob("*.jsonl") for event in read_spool(path).events]
    assert [each for each in ends if each] == ["KILLED"]


def test_an_execution_that_another_resumes_ends_with_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_under(flyte_execution: str, *, resume: bool = True) -> None:
        monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", flyte_execution)
        start_run("tiny", root=tmp_path, execution=ABORTED, overrides={"tracking": UNTRACKED}, resume=resume)

    with serving(Cluster(answers=dict(ROUTES))) as (_, address):
        start_under(ABORTED, resume=False)
        start_under(GOING_ON)
        assert reconcile(tmp_path, at(address)) == {}
        start_under(FAILED)
        assert reconcile(tmp_path, at(address)) == {ABORTED: "FAILED"}


def test_an_execution_that_still_runs_is_not_resumed_beside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (going_on,) = (each for each in recorded("executions")[1]["executions"] if each["id"]["name"] == GOING_ON)
    answers = {**ROUTES, f"GET {API}/executions/{OF}/{GOING_ON}": (200, going_on)}
    with serving(Cluster(answers=answers)) as (_, address):
        cluster = replace(read_profile("cpu"), tracking=None, flyte=FlyteServer(endpoint=address))

        def start_under(flyte_execution: str, *, resume: bool = True) -> None:
            monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", flyte_execution)
            overrides = {"tracking": UNTRACKED}
            start_run("tiny", root=tmp_path, execution=ABORTED, overrides=overrides, resume=resume, cluster=cluster)

        start_under(ABORTED, resume=False)
        start_under(GOING_ON)
        start_under(GOING_ON)  # a retry of the task
        refused = rf"resume_execution must name an execution that has ended, got '{ABORTED}'; terminate {GOING_ON} in"
        with pytest.raises(ConfigError, match=refused):
            start_under(FAILED)


def kept(phase: str, *nodes: dict[str, Any], outputs: Sequence[str] = ()) -> Cluster:
    """A server that keeps calls, on which every execution is in this phase."""
    routes: dict[str, Answer] = {
        f"POST {API}/executions": (200, {"id": {"name": "e"}}),
        f"GET {API}/executions/{OF}/e": (200, {"id": {"name": "e"}, "closure": {"phase": phase}}),
        f"GET {API}/data/executions/{OF}/e": (200, {"fullOutputs": {"literals": {name: {} for name in outputs}}}),
        f"GET {API}/node_executions/{OF}/e": (200, {"nodeExecutions": list(nodes)}),
        f"GET {API}/task_executions/{OF}/e/train": (200, {"taskExecutions": []}),
        f"DELETE {API}/executions/{OF}/e": (200, {}),
    }
    return Cluster(answers=routes)


def test_a_smoke_test_launches_every_case_watches_it_and_says_what_held() -> None:
    """Launching, outputs and a deleted pod: by a server that keeps calls, never by a Flyte."""
    node = {"id": {"nodeId": "measure-0-report"}, "closure": {"phase": "SUCCEEDED", "deckUri": "s3://deck"}}
    cluster = kept("SUCCEEDED", node, outputs=("projection", "findings", "report"))
    quick: dict[str, Any] = {"sleep": lambda _: None}
    with serving(cluster) as (_, address):
        rows = smoke(at(address), "v1", delete_pod=None, tracked=lambda _: "FINISHED", **quick)
        watched = smoke(at(address), "v1", delete_pod=lambda *_: True, tracked=lambda _: "RUNNING", **quick)
    assert [held for held, *_ in rows] == [True, True, False, True]  # the wrong override succeeded here
    assert "SUCCEEDED, not FAILED" in rows[2][2] and "the failure handler: not run" in rows[2][2]
    assert "no pod of train was deleted" in watched[3][2] and "its MLflow run is RUNNING" in watched[3][2]
    launched = [body for call, body in cluster.asked if call.startswith("POST")][: len(CASES)]
    assert [body["spec"]["launchPlan"]["name"] for body in launched] == [case.plan for case in CASES]
    for body in launched:
        ParseDict(body, execution_pb2.ExecutionCreateRequest())


def test_a_smoke_test_outlives_answers_that_do_not_come_and_runs_that_nobody_tracked() -> None:
    cluster = kept("RUNNING", outputs=("projection", "findings", "report"))
    polled, ended = f"GET {API}/executions/{OF}/e", kept("SUCCEEDED").answers

    def wait(_: float) -> None:  # one poll sees it run, the next one nothing
        is_silent = cluster.answers[polled][0] == 503
        cluster.answers[polled] = ended[polled] if is_silent else status(503, "admin restarts")

    def untracked(name: str) -> str:
        raise ConfigError(f"runs must name executions, got {name}")

    with serving(cluster) as (_, address):
        rows = smoke(at(address), "v1", tracked=untracked, sleep=wait)
    assert [held for held, *_ in rows] == [True, True, False, False]
    assert "runs must name executions, got e" in rows[3][2]


def test_an_execution_that_does_not_end_is_terminated() -> None:
    cluster, times = kept("RUNNING"), iter(range(0, 10**6, 50))
    with serving(cluster) as (_, address):
        rows = smoke(at(address), "v1", timeout_s=100.0, now_s=lambda: next(times), sleep=lambda _: None)
    assert not any(held for held, *_ in rows)
    ended = [body for call, body in cluster.asked if call.startswith("DELETE")]
    assert ended[0] == {"cause": "smoke test: no end after 100 s"}
