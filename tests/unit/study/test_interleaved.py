"""Arms of a bake-off: each is trained in its own execution, their steps in turn."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.recipe import load_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.steps import ArmRecord
from slipstream.stages import train_grpo
from slipstream.study import interleaved
from slipstream.study.ranking import StudyRecord
from slipstream.study.variants import Grid, Study, drafter_recipes
from slipstream.tracking.spool import read_spool
from slipstream.train.arm import ArmPlan
from slipstream.train.turns import in_turn
from slipstream.types import Arm
from tests.small import UNTRACKED, run_context


def test_arms_take_turns_after_engines_started_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    starting: list[str] = []

    @contextmanager
    def start_engine(name: str) -> Iterator[Any]:
        assert starting == [], "another engine is starting"
        starting.append(name)
        time.sleep(0.02)
        starting.remove(name)
        yield None

    def run(*, plan: ArmPlan, turn: Any, directory: Path, **given: Any) -> Any:
        assert given["decode"] == "decoder"

        def train() -> ArmRecord:
            with plan.start_engine():
                for step in range(2):
                    turn.begin(step)
                    steps.append(f"{plan.label}{step}")
            return ArmRecord(arm=plan.arm, num_speculative_tokens=plan.num_speculative_tokens, steps=())

        return SimpleNamespace(directory=directory, train=train)

    tracker = SimpleNamespace(log=None, log_artifact=lambda path: None)
    monkeypatch.setattr(interleaved, "execution_run", lambda *_: nullcontext(tracker))
    monkeypatch.setattr(train_grpo, "Run", run)
    nothing: Any = None
    members = {}
    for name, k in (("a", 1), ("b", 2)):
        how = {"start_engine": partial(start_engine, name), "draft": None, "label": name}
        plan = ArmPlan(arm=Arm.SPECULATIVE, num_speculative_tokens=k, **how)
        members[name] = interleaved._Member(context=run_context(tmp_path, f"e/{name}"), recipe=nothing, plan=plan)
    how = {"starting": threading.Semaphore(1), "policy": tmp_path, "prompts": (), "decode": "decoder"}
    found = in_turn({name: partial(interleaved._train, member, **how) for name, member in members.items()})
    assert steps == ["a0", "b0", "b1", "a1"]
    for name, k in (("a", 1), ("b", 2)):
        record = read_record(ArmRecord, tmp_path / "e" / name / "train_grpo" / "arm.json")
        assert record == found[name]
        assert record.num_speculative_tokens == k


def test_without_its_autoregressive_arm_no_drafter_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def train(member: Any, turn: Any, **_: Any) -> None:
        for step in range(3):
            turn.begin(step)
            taken.append(f"{member.plan}{step}")
            if (member.plan, step) == ("autoregressive", 1):
                raise ConnectionError("its engine was lost")

    monkeypatch.setattr(interleaved, "_train", train)
    monkeypatch.setattr(interleaved, "execution_run", lambda *_, **__: SimpleNamespace(detach=lambda: None))
    monkeypatch.setattr(interleaved, "arm_plan", lambda _, arm, **__: arm.value)
    monkeypatch.setattr(interleaved, "read_prompt_sets", lambda _: SimpleNamespace(train=()))
    for name in ("end_idle", "tokenizer", "decode"):
        monkeypatch.setattr(interleaved, name, lambda *_: None)
    grid = Grid(
        methods=(DraftMethod.NGRAM,), draft_inits=(DraftInit.GENERAL,), online=(DraftOnline.OFF,), draft_lengths=(3,)
    )
    recipe = load_recipe("tiny")
    (drafter,) = drafter_recipes(recipe, grid)
    plan: Any = "drafter"
    member = interleaved._Member(context=run_context(tmp_path, "e/drafter"), recipe=recipe, plan=plan)
    with pytest.raises(ConnectionError):
        interleaved._trained(run_context(tmp_path, "e"), {drafter: member}, 1, policy=tmp_path, data=tmp_path)
    assert taken == ["autoregressive0", "drafter0", "drafter1", "autoregressive1"]


def test_an_attempt_after_all_were_compared_ends_the_executions_run_with_the_results(tmp_path: Path) -> None:
    context, recipe = run_context(tmp_path), load_recipe("tiny", overrides={"tracking": UNTRACKED})
    interleaved.execution_run(context, recipe).detach()  # the pod was lost after the record was written
    record = StudyRecord(study=Study.BAKE_OFF, execution="e", recipe="tiny", rows=(), failures=())
    write_record(record, context.directory("bake_off") / "bake_off.json")
    interleaved.bake_off(context, recipe, Grid(), policy=tmp_path, data=tmp_path)
    (spool,) = (tmp_path / "spool").glob("*.jsonl")
    events = read_spool(spool).events
    assert events[-1].status == "FINISHED"
    assert any("result/num_drafters" in event.metrics for event in events)
