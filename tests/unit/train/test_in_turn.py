"""Who gives memory back when: the order of a step, also when an engine is lost in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import RefitCheck
from slipstream.refit.gate import Export
from slipstream.train.in_turn import EnginesInTurn, GateInTurn
from slipstream.train.recovery import LastingEngines
from slipstream.types import Prompt
from slipstream.workers.calls import LostWorkerError, Worker
from tests.unit.recipe_fields.base import NotedEngine, Tools, recipe_with
from tests.unit.recipe_fields.training import IN_TURN, NotedLearner, trained

ENGINES = (Worker(None, "engine 0"), Worker(None, "engine 1"))
RANK = Worker(None, "learner rank 0")
PROMPT = Prompt(id="0", text="", token_ids=(1,), answer="")
STEP = ["learner rests", "refit", "generate", "engines rest"]


class Run:
    """Engines, their gate and a learner; whoever is in `losses` is lost at that call, counted over all."""

    def __init__(self, losses: dict[int, Sequence[Worker]] | None = None) -> None:
        self.engines = ENGINES
        self.calls: list[str] = []
        self._losses = losses or {}
        self._num_asked = 0
        self.learner = RestingLearner(self)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        self.asked("generate")
        return GenerationResult(groups=(), acceptance=None, generation_s=1.0)

    def rest(self) -> None:
        self.asked("engines rest")

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        self.asked("refit")
        return RefitCheck(num_tensors=1, elapsed_s=0.0)

    def replace(self, lost: Sequence[Worker]) -> None:
        self.calls.append("replace")

    def export(self, version: int, *, draft_version: int | None) -> Export:
        raise AssertionError("a refit is whole where the learner does not train meanwhile")

    def deliver(self, export: Export) -> RefitCheck:
        raise AssertionError("a refit is whole where the learner does not train meanwhile")

    def deliver_again(self, version: int) -> bool:
        raise AssertionError("the learner does not train while engines generate")

    def engines_changed(self) -> None:
        self.calls.append("changed")

    def asked(self, call: str) -> None:
        self.calls.append(call)
        self._num_asked += 1
        if self._num_asked in self._losses:
            raise LostWorkerError("died", self._losses[self._num_asked])


class RestingLearner:
    def __init__(self, run: Run) -> None:
        self._run = run

    def rest(self) -> None:
        self._run.asked("learner rests")


def step(run: Run) -> Any:
    lasting = LastingEngines(EnginesInTurn(run, run), GateInTurn(run, run.learner), max_restarts=2)
    lasting.refit(0, draft_version=None)
    return lasting.generate([PROMPT], sampling=SamplingConfig(max_response_tokens=8), group_size=2, seed=7)


def test_the_learner_gives_back_before_the_refit_and_the_engines_after_the_generation() -> None:
    run = Run()
    step(run)
    assert run.calls == STEP


def test_an_engine_lost_in_the_refit_starts_anew_beside_a_learner_that_rests() -> None:
    run = Run({2: [ENGINES[0]]})
    assert step(run).num_engine_restarts == 1
    assert run.calls == ["learner rests", "refit", "replace", "changed", *STEP]


@pytest.mark.parametrize(("lost_at", "done"), [(3, ["generate"]), (4, ["generate", "engines rest"])])
def test_an_engine_lost_while_it_generates_or_gives_back_is_replaced_and_all_generate_again(
    lost_at: int, done: list[str]
) -> None:
    run = Run({lost_at: [ENGINES[1]]})
    assert step(run).num_regenerated == 2
    assert run.calls == ["learner rests", "refit", *done, "replace", "changed", *STEP]


def test_a_learner_lost_when_it_gives_back_is_no_engines_loss() -> None:
    run = Run({1: [RANK]})
    with pytest.raises(LostWorkerError):
        step(run)
    assert run.calls == ["learner rests"]


class LoggedEngine(NotedEngine):
    """Writes what it is asked for into a list that it shares with a learner."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls


class LoggedLearner(NotedLearner):
    """The same of a learner, as far as memory is concerned."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self._calls = calls

    def load(self, policy: Path, optimizer: Any, *, with_reference: bool) -> None:
        self._calls.append("load")
        super().load(policy, optimizer, with_reference=with_reference)

    def rest(self) -> None:
        self._calls.append("learner rests")

    def train_step(self, update: Any) -> Any:
        self._calls.append("train")
        return super().train_step(update)


def test_an_arm_begins_with_engines_at_rest_and_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    trained(
        recipe_with({**IN_TURN, "placement.memory": "in_turn", "grpo.num_steps": 2}),
        Tools(tmp_path, monkeypatch),
        engine=LoggedEngine(calls),
        learner=LoggedLearner(calls),
    )
    words = [call[0] if isinstance(call, tuple) else call for call in calls]
    turns = [word for word in words if word in ("rest", "load", "learner rests", "generate", "train")]
    assert turns == ["rest", "load", *["learner rests", "generate", "rest", "train"] * 2]
