"""An execution is resumed with the recipe that it was started with, and with no other."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.kubernetes.profile import ClusterProfile, read_profile
from slipstream.recipe import load_recipe
from slipstream.stages.context import RunContext, recorded_arms, recorded_recipe
from slipstream.stages.fail_run import fail_run
from slipstream.stages.runs import tracked
from slipstream.stages.start_run import start_run
from slipstream.tracking.spool import RunStatus, end_open_runs, read_spool
from slipstream.types import Arms
from tests.small import UNTRACKED, run_context

QUEUED = read_profile("gb200")
ALONE = replace(QUEUED, queue=None)


def start(root: Path, recipe: str = "tiny", **given: Any) -> tuple[RunContext, Path]:
    """Start an execution; what is no input of `start_run` is an override."""
    inputs = {name: given.pop(name) for name in ("execution", "resume", "arms", "cluster") if name in given}
    overrides = {"tracking": UNTRACKED, **given}
    return start_run(recipe, root=root, overrides=overrides, **{"execution": "run", **inputs})


def test_a_resumed_execution_keeps_its_directory_and_its_recipe(tmp_path: Path) -> None:
    first, recorded = start(tmp_path)
    again, resolved = start(tmp_path, resume=True, tracking={**UNTRACKED, "replay_every_s": 0.2})
    assert again == first
    assert resolved == recorded == tmp_path / "run" / "start_run" / "recipe.yaml"
    assert load_recipe(str(resolved)).tracking.replay_every_s == 0.2  # where it is tracked is no part of it
    message = r"^grpo\.num_steps must be 24, with which run was started, got 25; give it that value, or start a new"
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, resume=True, grpo={"num_steps": 25})
    assert load_recipe(str(recorded)).grpo.num_steps == 24


def test_an_execution_goes_on_with_the_arms_that_it_was_started_with_and_no_others(tmp_path: Path) -> None:
    assert start(tmp_path, arms=Arms.SPECULATIVE)[0].arms == "speculative"
    assert start(tmp_path, arms=Arms.SPECULATIVE, resume=True)[0].speculates
    with pytest.raises(ConfigError, match=r"^arms must be 'speculative', with which run was started, got 'both'; "):
        start(tmp_path, arms=Arms.BOTH, resume=True)
    assert recorded_arms(tmp_path, "run") is Arms.SPECULATIVE
    assert recorded_arms(tmp_path, "other") is Arms.BOTH  # of an execution that recorded none


def test_a_recorded_recipe_that_goes_on_says_who_gave_its_values_at_the_start(tmp_path: Path) -> None:
    _, recorded = start(tmp_path, grpo={"seed": 3})
    before = recorded.read_text()
    assert "  seed: 3  # launch\n" in before
    _, resolved = start_run(str(recorded), root=tmp_path, execution="run", overrides={}, resume=True)
    assert resolved == recorded
    assert recorded.read_text() == before


def test_a_reward_function_is_kept_with_the_execution_and_a_changed_one_is_refused_by_name(tmp_path: Path) -> None:
    own = tmp_path / "reward.py"
    own.write_text("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    reward = {"function": f"{own}:f"}
    _, recorded = start(tmp_path, reward=reward)
    kept = load_recipe(str(recorded)).reward.function
    assert kept is not None
    copy = Path(kept.removesuffix(":f"))
    assert (copy.parent, copy.read_text()) == (recorded.parent, own.read_text())
    start(tmp_path, resume=True, reward=reward)
    own.write_text(own.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"^reward\.function must be '.*reward-[0-9a-f]{12}\.py:f', with which run"):
        start(tmp_path, resume=True, reward=reward)
    assert [path.name for path in recorded.parent.glob("*.py")] == [copy.name]
    with pytest.raises(ConfigError, match=r"^reward\.function must name a file"):
        start(tmp_path / "other", reward={"function": f"{tmp_path}/absent.py:f"})
    assert not (tmp_path / "other").exists()


def test_a_reward_function_that_needs_a_file_beside_it_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("SCORE = 1.0\n")
    (tmp_path / "reward.py").write_text(
        "from helper import SCORE\n\ndef f(data_source, solution_str, ground_truth, extra_info):\n    return SCORE\n"
    )
    with pytest.raises(ConfigError) as caught:
        start(tmp_path / "root", reward={"function": f"{tmp_path}/reward.py:f"})
    assert str(caught.value).startswith("reward.function must be a function that can be loaded ")
    assert "No module named 'helper'; the run scores with a copy of the file alone: put " in str(caught.value)
    assert list((tmp_path / "root").rglob("*.py")) == []


def test_the_executions_run_stays_open_and_too_long_an_instruction_is_cut_in_mlflow_alone(tmp_path: Path) -> None:
    instruction = "{problem}" + "x" * 7000
    _, recorded = start(tmp_path, data={"instruction": instruction})
    spool = next((tmp_path / "spool").glob("*.jsonl"))
    opened, logged = read_spool(spool).events
    assert opened.header is not None
    assert (opened.kind, logged.kind) == ("open", "artifact")  # and not closed
    param = opened.header.params["data.instruction"]
    assert len(param) == 6000 and param.endswith("x [cut: 7009 characters in all]")
    assert load_recipe(str(recorded)).data.instruction == instruction
    assert (spool.parent / logged.path).read_bytes() == recorded.read_bytes()


NAME = "must be 1 to 500 characters that are not all"
NO_ARCTIC = pytest.mark.skipif(find_spec("arctic_inference") is not None, reason="it is installed")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, f"name {NAME}"),
        ({"tracking": {"experiment": ""}}, rf"tracking\.experiment {NAME}"),
        ({"resume": True}, "resume_execution must name an execution under .*, got 'run'"),
        pytest.param(
            {"draft": {"method": "suffix"}},
            "draft.method must do without the package arctic_inference, which is not",
            marks=NO_ARCTIC,
        ),
        (
            {"recipe": "qwen3_8b", "cluster": read_profile("h200")},
            r"placement\.nodes must be <= 1, the nodes of cluster h200, got 8",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        start(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_is_tracked_by_the_server_that_it_names_or_by_the_clusters(tmp_path: Path) -> None:
    patience = {"replay_every_s": 0.1, "close_wait_s": 0.0}
    _, resolved = start(tmp_path, "qwen3_8b", cluster=QUEUED, tracking=patience)
    assert load_recipe(str(resolved)).tracking.uri == "http://mlflow.mlflow.svc.cluster.local:5000"
    for cluster, recipe in (("cpu", "tiny"), ("local", "qwen3_8b")):  # one machine takes any recipe
        _, named = start(tmp_path / cluster, recipe, cluster=read_profile(cluster))
        assert load_recipe(str(named)).tracking.uri == UNTRACKED["uri"]


def test_a_recipe_that_may_want_memory_starts_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for recipe in ("qwen3_8b", "dapo_8b"):
        start(tmp_path / recipe, recipe, cluster=QUEUED)
    assert "memory" not in caplog.text
    start(tmp_path / "long", "qwen3_8b", cluster=QUEUED, learner={"max_tokens_per_microbatch": 100_000})
    assert "memory: GPU: " in caplog.text and "lower learner.max_tokens_per_microbatch to " in caplog.text


def test_gpu_nodes_without_a_queue_take_one_execution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(execution: str, profile: ClusterProfile = ALONE) -> None:
        start(tmp_path, "qwen3_8b", execution=execution, cluster=profile)

    begin("first")
    begin("first")  # another attempt of the same
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "first")
    recipe = load_recipe(str(recorded_recipe(tmp_path, "first")))
    with pytest.raises(OSError, match="node lost"), tracked(run_context(tmp_path, "first"), recipe, "train_grpo"):
        raise OSError("node lost")  # Flyte starts another attempt of this task
    with pytest.raises(ConfigError, match=r"must be alone on cluster gb200, which has no queue, got 'second, first'"):
        begin("second")
    begin("second", QUEUED)  # waits in the queue
    end_open_runs(tmp_path, "first", RunStatus.FINISHED)
    end_open_runs(tmp_path, "second", RunStatus.KILLED)
    begin("third")


def test_a_resume_that_is_refused_leaves_the_execution_that_it_names_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> str:
        return read_spool(next(tmp_path.glob("spool/run-*.jsonl"))).events[-1].status

    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "run")
    start(tmp_path)
    end_open_runs(tmp_path, "run", RunStatus.FINISHED)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "second")
    with pytest.raises(ConfigError, match=r"^grpo\.num_steps must be 24"):
        start(tmp_path, resume=True, grpo={"num_steps": 25})
    fail_run(tmp_path, "run", message="grpo.num_steps must be 24")  # Flyte's failure node, of the second execution
    assert end() == "FINISHED" and not (tmp_path / "run" / "fail_run").exists()
    start(tmp_path, resume=True)
    fail_run(tmp_path, "run", message="lost")
    assert end() == "FAILED"


def test_of_two_executions_that_start_at_one_moment_one_is_refused(tmp_path: Path) -> None:
    def begin(execution: str) -> str:
        try:
            start(tmp_path, "qwen3_8b", execution=execution, cluster=ALONE)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(begin, ("first", "second")))
    assert said[0] == ""
    assert said[1].startswith("execution must be alone on cluster gb200, which has no queue")
