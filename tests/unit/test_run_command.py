"""Start and resumption of an execution, its inputs, and the last words of an interrupted one."""

import json
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream import run_command
from slipstream.cli import main
from slipstream.config import ConfigError, parse_overrides
from slipstream.recipe import load_recipe, write_recipe
from slipstream.run_command import Launch
from slipstream.stages.context import new_execution, recorded_recipe, write_arms
from slipstream.supervisor import Outcome
from slipstream.tracking.config import check_key
from slipstream.tracking.spool import Event, RunHeader, Spool, spool_path
from slipstream.types import Arms, Workload
from slipstream.workers.forked_workers import FORKING
from tests.unit.lagging import ONE_STEP_OFF


def execution(root: Path, name: str, *, started_s: int, is_finished: bool = False) -> None:
    overrides = {"grpo": {"seed": 7, "num_steps": 5}}
    recipe = load_recipe("tiny", workload=Workload.RL_THINK, overrides=overrides)
    path = write_recipe(recipe, recorded_recipe(root, name))
    os.utime(path, (started_s, started_s))
    if is_finished:
        report = root / name / "report_speedup" / "report.json"
        report.parent.mkdir()
        report.write_text("{}")


def started(recipe: str, **given: Any) -> Launch:
    return run_command.started(recipe, **{"reuse_stored": True, "arms": Arms.SPECULATIVE, **given})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    execution(tmp_path, "a", started_s=100)
    execution(tmp_path, "b", started_s=200)
    write_arms(tmp_path, "b", Arms.SPECULATIVE)
    execution(tmp_path, "c", started_s=300, is_finished=True)
    execution(tmp_path, "d", started_s=400)  # of the workflow `certify`, which trains nothing
    (tmp_path / "d" / "certify_losslessness").mkdir()
    return tmp_path


def test_the_latest_unfinished_execution_goes_on_with_its_own_recipe(root: Path) -> None:
    launch = run_command.resumed(root, run_command.LATEST, reuse_stored=True)
    inputs = {"recipe": str(recorded_recipe(root, "b")), "arms": Arms.SPECULATIVE, "resume_execution": "b"}
    assert launch == Launch(workflow="speculative_rl", execution="b", inputs=inputs)
    command = launch.command(root)
    assert command[command.index("--resume_execution") + 1] == "b"
    assert command[command.index("--arms") + 1] == "speculative"
    assert run_command.resumed(root, "a", reuse_stored=True).execution == "a"


@pytest.mark.parametrize("name", ["c", "d"])
def test_a_finished_or_unknown_execution_is_refused_with_those_that_can_be_resumed(
    root: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^--resume must name an .* got '{name}'; known: b, a$"):
        run_command.resumed(root, name, reuse_stored=True)
    with pytest.raises(ConfigError, match=r"got 'the latest'; known: none$"):
        run_command.resumed(tmp_path_factory.mktemp("empty"), run_command.LATEST, reuse_stored=True)


def test_a_new_execution_is_fresh_only_if_asked_for_and_has_the_inputs_that_were_given_0_too() -> None:
    for reuse_stored, flag in ((True, "--reuse_stored"), (False, "--no_reuse_stored")):
        launch = started("tiny", reuse_stored=reuse_stored)
        assert launch.command(Path("runs"))[-1] == flag
        assert "--resume_execution" not in launch.command(Path("runs"))
    inputs = {"--workload", "--num_steps", "--seed"}
    plain = started("tiny").command(Path("runs"))
    assert not inputs & set(plain)
    given = started("tiny", workload=Workload.RL_THINK, num_steps=2, seed=0)
    command = given.command(Path("runs"))
    assert [command[command.index(name) + 1] for name in sorted(inputs)] == ["2", "0", "rl_think"]
    assert "--overrides" not in command
    with pytest.raises(ConfigError, match=r"^grpo.num_steps must be .* got 0"):
        started("tiny", num_steps=0)


def test_a_workflow_gets_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch = started("tiny", overrides=["grpo.group_size=16", "data.train=[{path: ./mine.jsonl}]"])
    command = launch.command(Path("runs"))
    recipe = load_recipe("tiny", overrides=parse_overrides(json.loads(command[command.index("--overrides") + 1])))
    assert recipe.grpo.group_size == 16
    assert recipe.data.train[0].path == str(tmp_path / "mine.jsonl")
    write_recipe(load_recipe("tiny"), tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    assert started("mine.yaml").inputs["recipe"] == str(tmp_path / "mine.yaml")
    assert run_command.handed_on_recipe("tiny") == "tiny"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        *(("my recipe (2).yaml", "my-recipe-2"), ("_private.yaml", "private"), ("größe.yaml", "groe")),
        *(("日本.yaml", "recipe"), (".hidden.yaml", "hidden"), ("v1.5_a+b.yml", "v1.5_a-b")),
        ("long" * 60 + ".yaml", ("long" * 60)[:60]),
    ],
)
def test_a_recipe_file_of_any_name_gives_an_execution_a_name_that_can_be_tracked(file: str, name: str) -> None:
    execution = new_execution(file)
    assert re.fullmatch(rf"{re.escape(name)}-\d{{8}}-\d{{6}}.*", execution)
    check_key(f"{execution}/train_grpo_speculative_asynchronous")


def test_a_run_gets_an_absolute_profile_and_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def supervise(command: list[str], *, cwd: Path, environment: dict[str, str]) -> Outcome:
        seen.update(environment)
        return Outcome(pid=1, status=0, interrupted=False)

    (tmp_path / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "supervise", supervise)
    for name, handed_on in (("mine.yaml", f"{tmp_path}/mine.yaml"), ("local", "local")):
        monkeypatch.setenv("SLIPSTREAM_CLUSTER", name)
        assert run_command.run(started("tiny"), tmp_path / "runs") == 0
        assert seen["SLIPSTREAM_CLUSTER"] == handed_on
        assert {*FORKING} <= seen.keys()


def test_the_recipes_loop_chooses_the_workflow_also_of_one_that_is_gone_on_with(tmp_path: Path) -> None:
    path = write_recipe(load_recipe("tiny", overrides=ONE_STEP_OFF), recorded_recipe(tmp_path, "e"))
    begun = started(str(path))
    shipped = started("tiny_async")
    for launch in (begun, shipped, run_command.resumed(tmp_path, "e", reuse_stored=True)):
        assert launch.command(tmp_path)[2:4] == ["workflows/asynchronous_rl.py", "asynchronous_rl"]
    plain = started("tiny")
    assert plain.command(tmp_path)[2:4] == ["workflows/speculative_rl.py", "speculative_rl"]


def test_an_execution_that_runs_is_not_started_twice(root: Path) -> None:
    claim = partial(run_command._claimed, root, "a")
    running = "execution must not be running already, got 'a'; wait for it, or interrupt it"
    for _ in range(2):  # the second time none runs any more
        with claim(), pytest.raises(ConfigError, match=running), claim():
            pass


@pytest.mark.parametrize(
    ("name", "interrupted", "last"),
    [
        ("a", True, r"interrupted; resume with: .*slipstream.* run --run-root ROOT --resume a"),
        ("a", False, r"failed with status 1; resume with: .*slipstream.* run --run-root ROOT --resume a"),
        ("new", True, r"interrupted before its recipe was recorded; start again with the same command"),
    ],
)
def test_the_last_line_says_how_to_go_on(root: Path, name: str, interrupted: bool, last: str) -> None:
    outcome = Outcome(pid=1, status=130 if interrupted else 1, interrupted=interrupted)
    line = run_command._last_words(name, root, outcome).splitlines()[-1]
    assert re.fullmatch(last.replace("ROOT", re.escape(str(root))), line)


@pytest.mark.parametrize(("status", "when"), [(0, "by"), (1, "when you resume, or by")])
def test_what_mlflow_has_not_got_is_said_at_the_end_of_every_execution(tmp_path: Path, status: int, when: str) -> None:
    server = "http://mlflow:5000"
    write_recipe(load_recipe("tiny", overrides={"tracking": {"uri": server}}), recorded_recipe(tmp_path, "a"))
    outcome = Outcome(pid=1, status=status, interrupted=False)
    assert "MLflow" not in run_command._last_words("a", tmp_path, outcome)
    spool = Spool(spool_path(tmp_path, experiment="tiny", key="a/train"))
    spool.append(Event(kind="open", time_ms=1, header=RunHeader(experiment="tiny", key="a/train", name="train")))
    spool.append(Event(kind="metrics", time_ms=2, metrics={"train/loss": 1.0, "train/reward": 0.5}))
    spool.close()
    what, how = run_command._last_words("a", tmp_path, outcome).splitlines()[:2]
    assert what == "1 MLflow run(s) are not up to date: a/train (2 points and 1 other entries)"
    assert how.startswith(f"they are completed {when}: ") and how.endswith(f" replay {tmp_path} --uri {server}")


def test_executions_that_start_in_one_second_have_names_of_their_own_in_their_order() -> None:
    names = []
    for _ in range(20):
        names.append(new_execution("tiny"))
        time.sleep(0.001)
    assert sorted(set(names)) == names
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-\d{6}", names[0])


@pytest.mark.parametrize(
    ("command", "recipe", "arms"),
    [
        (["run", "tiny"], "tiny", "speculative"),
        (["run", "tiny", "--arms", "autoregressive"], "tiny", "autoregressive"),
        (["run", "--arms", "both", "tiny_async"], "tiny_async", "both"),
        (["demo"], "tiny", "both"),
        (["demo", "--recipe", "tiny_async"], "tiny_async", "both"),
    ],
)
def test_run_trains_the_arm_that_speculates_unless_asked_and_demo_both(
    monkeypatch: pytest.MonkeyPatch, command: list[str], recipe: str, arms: str
) -> None:
    seen: list[Launch] = []
    monkeypatch.setattr(run_command, "run", lambda launch, root: seen.append(launch) or 1)
    assert main(command) == 1
    assert (seen[0].inputs["recipe"], seen[0].inputs["arms"]) == (recipe, arms)
