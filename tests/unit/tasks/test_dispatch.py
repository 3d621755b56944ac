"""Every task as its container runs it, inputs in a blob store: its stage must find them on this machine.

The stages are fakes that read what they are given. A task that hands on the name of an input, which nobody fetched,
fails here; tests/integration/test_pods.py runs the chain with the stages that are real.
"""

import importlib
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fsspec
import pytest
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError
from flytekit.types.file import FlyteFile

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.kubernetes.kubernetes_api import Finding, State
from slipstream.kubernetes.preflight import PreflightRecord
from slipstream.kubernetes.profile import ClusterProfile
from slipstream.recipe import Recipe, load_recipe, write_recipe
from slipstream.records.files import write_record
from slipstream.stages.context import RunContext
from slipstream.study.variants import Grid, Kind
from slipstream.types import Arm, ArmLoop, Arms, Workload
from tests.small import run_context
from tests.unit.tasks.declared import declared_tasks, dispatched, error_in

TASKS = declared_tasks()
LENGTH = 7
LAST = "speculative"
FOUND = PreflightRecord(
    cluster="gb200",
    namespace="n",
    findings=(Finding(what="quota", found="none", needed="room", state=State.MISSING, fix="raise it"),),
)
_FOLDERS: dict[Any, Callable[[FlyteDirectory], Any]] = {  # inputs by type, of one folder
    FlyteDirectory: lambda folder: folder,
    FlyteDirectory | None: lambda folder: folder,
    list[FlyteDirectory]: lambda folder: [folder, folder],
    list[list[FlyteDirectory]]: lambda folder: [[folder], [folder]],
}
_FILES = {"recipe": "recipe.yaml", "findings": "findings.json"}  # by input
_MARK = "made_by.json"  # in each input: its name


@dataclass
class Stages:
    """Fakes of all stages, and what they were given."""

    recipe: Path
    seen: dict[str, Any] = field(default_factory=dict)
    num_named: int = 0

    def namespace(self) -> SimpleNamespace:
        """In the place of a stage's module."""
        written = {
            "prepare_data": ("train.jsonl", "manifest.json", "tokenizer/tokenizer.json"),
            "prepare_policy": ("policy.json", "config.json", "model.safetensors"),
            "pretrain_draft": ("draft.json", "draft/model.safetensors"),
            "tune_draft_length": ("tuning.json", "sweep.svg"),
            "evaluate_aime": ("evaluation.json",),
            "certify_losslessness": ("certificate.json",),
            "certify_alone": ("certificate.json",),
            "project_speedup": ("projection.json",),
            "report_speedup": ("report.html", "report.json", "run.json", "drift.json"),
            "bake_off": ("bake_off.html", "bake_off.json", "speedups.svg"),
        }
        return SimpleNamespace(
            **{name: self._writes(names) for name, names in written.items()},
            train_grpo=self._train_grpo,
            start_run=self._notes(
                *("recipe", "root", "overrides", "loop", "arms"),
                gives=lambda given: (run_context(given["root"]), self.recipe),
            ),
            fail_run=self._notes("root", "execution", "message", "stages"),
            require_lossless=self._notes("certificate"),
            require_no_drift=self._notes("recipe", "report"),
            tuned_length=self._notes("recipe", "tuning", gives=lambda _: LENGTH),
            START="start",
            trained_name=self._trained_name,
            preflight=self._notes("cluster", "root", "timeout_s", gives=lambda _: FOUND),
            require_ready=self._notes("findings"),
            PreflightRecord=PreflightRecord,
            plan_ablation=self._notes(
                *("recipe", "grid", "root", "execution", "requested"),
                gives=lambda given: {kind: [run_context(given["root"])] for kind in Kind},
            ),
            make_part=self._notes("part", gives=lambda given: given["part"].execution),
            rank_ablation=self._notes("root", "execution", gives=_ranking),
            fail_ablation=self._notes("root", "execution", "message"),
            check_drafters=self._notes("context", "recipe", "grid", gives=lambda _: []),
        )

    def _notes(self, *names: str, gives: Callable[[dict[str, Any]], Any] = lambda _: None) -> Callable[..., Any]:
        """A stage that notes its arguments of these names, in whose order it takes those that come without one."""

        def stage(*arguments: Any, **inputs: Any) -> Any:
            given = {**dict(zip(names, arguments, strict=False)), **inputs}
            self.seen |= {name: _read(given[name]) for name in names if name != "context"}
            return gives(given)

        return stage

    def _writes(self, names: tuple[str, ...]) -> Callable[..., Path]:
        def stage(context: RunContext, recipe: Recipe, *others: object, **inputs: Any) -> Path:
            assert recipe.name == "tiny"
            self.seen |= {name: _read(value) for name, value in inputs.items()}
            self.seen |= {"others": others} if others else {}
            directory = context.directory(self.seen.pop("node", "stage"))
            for name in names:
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_text("{}")
            return directory

        return stage

    def _train_grpo(self, context: RunContext, recipe: Recipe, arms: list[Arm], **inputs: Any) -> list[Path]:
        files = ("arm.json", "policy/model.safetensors")
        return [self._writes(files)(context, recipe, arms, node=arm.value, **inputs) for arm in arms]

    def _trained_name(self, directory: Path) -> str:
        if _read(directory) != "arms":  # from the training of the same run, which named it
            return directory.name
        self.num_named += 1
        return LAST if self.num_named == 2 else "first"


def _ranking(given: dict[str, Any]) -> Path:
    directory = given["root"] / "ranking"
    directory.mkdir(parents=True)
    for name in ("ablation.html", "ablation.json", "speedups.svg"):
        (directory / name).write_text("{}")
    return directory


def _read(value: Any) -> Any:
    """The mark in a folder, or its name where a stage made it; of a list those in each; names of what has one."""
    if isinstance(value, list):
        return [_read(item) for item in value]
    if isinstance(value, Recipe | ClusterProfile):
        return value.name
    if isinstance(value, RunContext):
        return value.execution
    if not isinstance(value, Path):
        return value
    return (value / _MARK).read_text() if (value / _MARK).is_file() else value.name


class Case:
    """A task: files that it hands on, `values` of inputs that are no files, and what its stage must have been given.

    `marks` are inputs whose folders the stage must have been given.
    """

    def __init__(self, *handed_on: str, values: Mapping[str, Any] | None = None, marks: str = "", **seen: Any) -> None:
        self.handed_on, self.values = handed_on, values or {}
        self.seen = {name: name for name in marks.split()} | seen


_FORM = {
    "recipe": "tiny",
    "workload": Workload.RL_THINK,
    "num_steps": None,
    "seed": 0,
    "overrides": [],
    "max_off_policy_steps": None,
    "arms": Arms.SPECULATIVE,
    "resume_execution": None,
    "reuse_stored": True,
    "num_speculative_tokens": 3,
    "err": FlyteError(message="no luck", failed_node_id="fn0"),
}
_VARIED: dict[str, list[Any]] = {
    "draft_inits": [DraftInit.IN_DOMAIN, DraftInit.GENERAL],
    "methods": [DraftMethod.EAGLE3],
    "losses": ["kl_div"],
    "draft_lengths": [3, 7],
    "seeds": [2],
    "workloads": [Workload.RL_THINK],
}
_GRID = {
    "recipe": "tiny",
    **_VARIED,
    "num_steps": 2,
    "overrides": [],
    "seed_of_the_day": False,
    "reuse_stored": True,
    "err": FlyteError(message="no luck", failed_node_id="variants"),
}
_FIELD = {
    "methods": [DraftMethod.EAGLE3, DraftMethod.NGRAM],
    "inits": [DraftInit.IN_DOMAIN],
    "online": [DraftOnline.OFF, DraftOnline.ALWAYS],
    "num_speculative_tokens": 3,
}
_REQUEST = {
    **{"model": "qwen3-8b", "hardware": "gb200", "num_gpus": 32, "num_speculative_tokens": 3},
    **{"mean_acceptance_length": 2.5, "max_off_policy_steps": 0, "generation_fraction": 0.5},
    **{"mean_response_tokens": None, "seed_of_the_day": False},
}
_TAKES_PART = Grid(
    methods=(DraftMethod.EAGLE3, DraftMethod.NGRAM),
    draft_inits=(DraftInit.IN_DOMAIN,),
    online=(DraftOnline.OFF, DraftOnline.ALWAYS),
    draft_lengths=(3,),
)
_CERTIFICATE, _DELIVERED = ("certificate.json", "deliverable.json"), "deliverable.json"
_DATA = (_DELIVERED, "manifest.json", "tokenizer.json", "train.jsonl")
_ARMS = ["arms", "arms"]
CASES = {
    "start_run": Case(
        "recipe.yaml",
        values={**_FORM, "loop": ArmLoop.SYNCHRONOUS},
        recipe="tiny",
        overrides={"workload": "rl_think", "grpo": {"seed": 0}},  # given is given, 0 too
        loop=ArmLoop.SYNCHRONOUS,
        arms=Arms.SPECULATIVE,
    ),
    "prepare_data": Case(*_DATA, trains_draft=True),
    "prepare_data_for": Case(*_DATA, marks="policy", trains_draft=False),
    "prepare_policy": Case("config.json", _DELIVERED, "policy.json", marks="data"),
    "pretrain_draft": Case(_DELIVERED, "draft.json", marks="policy data"),
    "tune_draft_length": Case(_DELIVERED, "sweep.svg", "tuning.json", marks="policy data draft"),
    "train_grpo": Case(
        *("arm.json", _DELIVERED, "arm.json", _DELIVERED),
        values={"arms": Arms.BOTH, "loop": ArmLoop.ASYNCHRONOUS},
        marks="policy data draft tuning",
        others=(tuple(Arm),),
        loop=ArmLoop.ASYNCHRONOUS,
    ),
    "evaluate_aime": Case(  # the arms after the start
        *([_DELIVERED] * 3 + ["evaluation.json"] * 3), marks="data", model="arms/policy", others=(LAST,)
    ),
    "certify_losslessness": Case(
        *_CERTIFICATE,
        marks="policy data draft tuning",
        trained="trained/policy",
        trained_draft="trained/draft",
        length=LENGTH,
    ),
    "certify_draft": Case(*_CERTIFICATE, values={"k": 3}, marks="policy data draft", k=3),
    "require_lossless": Case(marks="certificate"),
    "require_no_drift": Case(marks="report", recipe="tiny"),
    "project_speedup": Case(_DELIVERED, "projection.json", marks="tuning", arms=_ARMS),
    "report_speedup": Case(
        *(_DELIVERED, "drift.json", "report.html", "report.json", "run.json"),
        marks="policy data draft tuning certificate projection",
        arms=_ARMS,
        evaluations=["evaluations", "evaluations"],
    ),
    "fail_run": Case(values=_FORM, message="no luck", stages=()),
    "fail_certificate": Case(values=_FORM, message="no luck", stages=("prepare_data", "certify_losslessness")),
    "plan_ablation": Case(
        values=_GRID,
        recipe="tiny",
        grid=Grid(**{name: tuple(values) for name, values in _VARIED.items()}),
        requested={"grpo": {"num_steps": 2}},
    ),
    "make_policy": Case(part="e"),
    "make_part": Case(part="e"),
    "rank_ablation": Case(
        *("ablation.html", "ablation.json", _DELIVERED, "speedups.svg"),
        values={"finished": ["p0", None]},
        execution="whole",
    ),
    "fail_ablation": Case(values=_GRID, message="no luck"),
    "check_drafters": Case(values=_FIELD, grid=_TAKES_PART),
    "bake_off": Case(
        *("bake_off.html", "bake_off.json", _DELIVERED, "speedups.svg"),
        values=_FIELD,
        marks="policy data",
        others=(_TAKES_PART,),
    ),
    "fail_bake_off": Case(
        values={**_FORM, **_FIELD}, message="no luck", stages=("prepare_data", "prepare_policy", "bake_off")
    ),
    "preflight": Case("findings.json", values={"timeout_s": 2.0}, cluster="local", timeout_s=2.0),
    "require_ready": Case(findings=FOUND),
    "project_request": Case("projection.json", values=_REQUEST),
}


def test_every_task_is_tried() -> None:
    assert set(CASES) == set(TASKS)


def _put(stages: Stages, monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> None:
    for module in modules:
        if "stage" in vars(module):
            monkeypatch.setattr(module, "stage", stages.namespace())


@pytest.mark.parametrize("name", CASES)
def test_a_task_reads_and_writes_in_the_store_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from flyteidl.core.literals_pb2 import LiteralMap

    task, case, store = TASKS[name], CASES[name], f"memory://{uuid.uuid4().hex}"
    stages = Stages(recipe=write_recipe(load_recipe("tiny"), tmp_path / "recipe.yaml"))
    _put(stages, monkeypatch, (sys.modules[task.task_function.__module__], sys.modules["tasks.fail_run"]))
    given = _inputs(task, case, stages, store, tmp_path / "runs")
    meta = dispatched(task, given, tmp_path, raw=f"{store}/raw")
    assert not (meta / "error.pb").exists(), error_in(meta / "error.pb")[1]
    assert {key: value for key, value in stages.seen.items() if key in case.seen} == case.seen
    assert {key for key, value in stages.seen.items() if key not in case.seen} <= {"root", "execution", "recipe"}
    left = fsspec.filesystem("memory").find(f"{store}/raw")
    assert sorted(Path(path).name for path in left) == sorted(case.handed_on)
    outputs = LiteralMap.FromString((meta / "outputs.pb").read_bytes()).literals
    assert set(outputs) == set(task.python_interface.outputs)


def _inputs(task: PythonFunctionTask, case: Case, stages: Stages, store: str, root: Path) -> dict[str, Any]:
    """For each input its value, or a file or folder in the store."""
    files = fsspec.filesystem("memory")
    for path in (stages.recipe, write_record(FOUND, root.parent / "findings.json")):
        files.pipe_file(f"{store}/in/{path.name}", path.read_bytes())
    given: dict[str, Any] = {}
    for name, kind in task.python_interface.inputs.items():
        if kind in _FOLDERS:
            files.pipe_file(f"{store}/in/{name}/{_MARK}", name.encode())
            for part in ("policy", "draft"):  # weights that the output of an arm may hold
                files.pipe_file(f"{store}/in/{name}/{part}/{_MARK}", f"{name}/{part}".encode())
            folder = FlyteDirectory.from_source(f"{store}/in/{name}")
            given[name] = _FOLDERS[kind](folder)
        elif kind is FlyteFile:
            given[name] = FlyteFile.from_source(f"{store}/in/{_FILES[name]}")
        else:
            parts = [run_context(root, "whole/p0")]
            given[name] = {"context": run_context(root), "contexts": parts, "run_root": str(root), **case.values}[name]
    return given


def test_without_a_speculative_arm_the_tasks_of_a_draft_make_nothing(tmp_path: Path) -> None:
    """They return before they read an input: none of these could be fetched."""
    context, absent = run_context(tmp_path, arms=Arms.AUTOREGRESSIVE.value), FlyteDirectory("absent")
    shared = {"context": context, "recipe": FlyteFile("absent"), "policy": absent, "data": absent}
    without = {"draft": None, "tuning": None}
    assert TASKS["pretrain_draft"].task_function(**shared).draft is None
    assert TASKS["tune_draft_length"].task_function(**shared, draft=None).tuning is None
    assert TASKS["certify_losslessness"].task_function(**shared, **without, trained=[absent]).certificate is None
    assert TASKS["require_lossless"].task_function(certificate=None, report=absent).report is absent


@pytest.mark.parametrize(("name", "num_arms"), [("speculative_rl", 2), ("asynchronous_rl", 4)])
def test_nested_workflows_run_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_arms: int) -> None:
    stages = Stages(recipe=write_recipe(load_recipe("tiny"), tmp_path / "recipe.yaml"))
    _put(stages, monkeypatch, {sys.modules[task.task_function.__module__] for task in TASKS.values()})
    workflow = vars(importlib.import_module(f"workflows.{name}"))[name]
    made = workflow(recipe="tiny", run_root=str(tmp_path / "runs"))
    assert "report.html" in os.listdir(str(made.report.path))
    assert len(stages.seen["arms"]) == num_arms
    assert len(set(stages.seen["evaluations"])) == num_arms + 1  # each of another policy
    assert stages.seen["trained"] == "policy" and stages.seen["report"]
