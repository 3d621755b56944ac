"""Engines as a loop sees them: a lost one is replaced and asked again, memory is shared, and drafting is watched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.drafts import length
from slipstream.engine.protocol import GenerationResult, GroupRequest, Portion
from slipstream.records.steps import AutopilotStep, RefitCheck, ScheduleEntry
from slipstream.refit.gate import Export
from slipstream.train import recovery
from slipstream.train.recovery import Autopilot, FaultTolerantEngines, WeightsLostError
from slipstream.types import Prompt, RolloutGroup
from slipstream.workers.calls import LostWorkerError, Worker
from tests.unit.recipe_fields.base import NotedEngine, Tools, recipe_with
from tests.unit.recipe_fields.training import IN_TURN, NotedLearner, trained
from tests.unit.sampled import accepted, rollout
from tests.unit.train.world import PROMPTS, SAMPLING, export_of

ENGINES = (Worker(None, "engine 0", "10.77.0.11"), Worker(None, "engine 1", "10.77.0.12"))
ENGINE = ENGINES[0]
RANK = Worker(None, "learner rank 1", "10.77.0.12")
PROMPT = Prompt(id="0", text="", token_ids=(1,), answer="")
REQUESTS = tuple(GroupRequest(index=i, prompt=PROMPTS[i], seeds=(1, 2)) for i in range(3))
TABLE = (
    ScheduleEntry(batch_from=1, batch_to=4, num_speculative_tokens=5),
    ScheduleEntry(batch_from=5, batch_to=8, num_speculative_tokens=2),
)
NO_DRAFTS = (ScheduleEntry(batch_from=1, batch_to=1, num_speculative_tokens=0),)
ACCEPTANCE = accepted(2, 2, 0)


class World:
    """Engines, their gate and a learner; `losses` says who is lost at which call, counted over all that can be lost.

    A generation of two rollouts of 5 tokens takes `drafting_s`, or a second without drafts.
    """

    def __init__(
        self, losses: dict[int, Sequence[Worker]] | None = None, *, keeps_weights: bool = True, drafting_s: float = 1.0
    ) -> None:
        self.workers = ENGINES
        self.under_way: tuple[GroupRequest, ...] = ()
        self.calls: list[Any] = []
        self.generations: list[Any] = []
        self.sampled: list[Any] = []
        self.tables: list[Sequence[ScheduleEntry]] = []
        self.drafting_s = drafting_s
        self._losses, self._keeps_weights, self._num_asked = losses or {}, keeps_weights, 0

    def tolerant(self, *, max_restarts: int = 3, takes_turns: bool = False, **how: Any) -> FaultTolerantEngines:
        fakes: Any = self
        learner: Any = SimpleNamespace(offload=lambda: self.asked("learner offloads")) if takes_turns else None
        how |= {"max_restarts": max_restarts, "memory_sharer": learner}
        return FaultTolerantEngines(fakes, fakes, sampling=SAMPLING, **how)

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
        self.generations.append((list(prompts), how))
        self.asked(("generate", how["seed"]))
        one = rollout((7,) * 5, -1.0, draft_version=0)
        drafts = not self.tables or self.tables[-1] != NO_DRAFTS
        groups = (RolloutGroup(prompt=PROMPT, rollouts=(one, one)),)
        seconds = self.drafting_s if drafts else 1.0
        return GenerationResult(groups=groups, acceptance=ACCEPTANCE, generation_s=seconds)

    def unnoted(self) -> AbstractContextManager[None]:
        return nullcontext()

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        self.tables.append(tuple(schedule))

    def sleep(self) -> None:
        self.asked("engines sleep")

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        self.asked(("refit", version, draft_version))
        return RefitCheck(num_tensors=1, elapsed_s=0.0)

    def export(self, version: int, *, draft_version: int | None) -> Export:
        self.asked(("export", version, draft_version))
        return export_of(version, draft_version=draft_version)

    def deliver(self, export: Export) -> RefitCheck:
        self.asked(("deliver", export.version))
        return RefitCheck(num_tensors=1, elapsed_s=0.0)

    def deliver_again(self, version: int) -> bool:
        self.asked(("again", version))
        return self._keeps_weights

    def engines_changed(self) -> None:
        self.asked("changed")

    def replace(self, lost: Sequence[Worker]) -> None:
        self.calls.append(("replace", [engine.name for engine in lost]))

    def submit(self, requests: Sequence[GroupRequest], *, sampling: Any) -> None:
        self.under_way = (*self.under_way, *requests)
        self.sampled.append(sampling)
        self.asked(("submit", [request.index for request in requests]))

    def advance(self, *, max_s: float) -> Portion:
        self.asked("advance")
        return Portion(groups=(), acceptance=None, started_s=0.0, ended_s=max_s)

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        self.asked(("restart", list(indices), seeds(REQUESTS[0])))
        return len(indices)

    def take_lost(self, names: Collection[str]) -> tuple[GroupRequest, ...]:
        lost, self.under_way = self.under_way, ()
        return lost

    def asked(self, call: Any) -> None:
        self.calls.append(call)
        self._num_asked += 1
        if self._num_asked in self._losses:
            raise LostWorkerError("engine died", self._losses[self._num_asked])


def replaced(index: int) -> list[Any]:
    return [("replace", [f"engine {index}"]), "changed"]


def generated(tolerant: FaultTolerantEngines, num: int, *, first: int = 0) -> list[GenerationResult]:
    return [tolerant.generate([PROMPT], sampling=SAMPLING, group_size=2, seed=70 + step) for step in range(first, num)]


def steps(world: World, *, num: int = 1, **how: Any) -> list[int]:
    """Restarts in the results of so many steps."""
    tolerant, found = world.tolerant(**how), []
    for step in range(num):
        tolerant.refit(step, draft_version=10 * step)
        found += [result.num_engine_restarts for result in generated(tolerant, step + 1, first=step)]
    return found


REFIT, GENERATE = ("refit", 0, 0), ("generate", 70)


@pytest.mark.parametrize(
    ("losses", "is_beside_training", "calls"),
    [
        # lost while it generates: refitted, and the generation repeated from its seed
        ({2: 1}, False, [REFIT, GENERATE, *replaced(1), REFIT, GENERATE]),
        # the same beside training: it gets the weights that were sent last, without the learner
        ({2: 1}, True, [REFIT, GENERATE, *replaced(1), ("again", 0), GENERATE]),
        # lost in the refit, which the learner can repeat: it waits for it
        ({1: 0}, False, [REFIT, *replaced(0), REFIT, GENERATE]),
        ({1: 0}, True, [REFIT, *replaced(0), REFIT, GENERATE]),
        # another one is lost while a substitute joins, or right after it did
        ({1: 0, 2: 1}, False, [REFIT, *replaced(0), *replaced(1), REFIT, GENERATE]),
        ({2: 1, 4: 0}, False, [REFIT, GENERATE, *replaced(1), REFIT, *replaced(0), REFIT, GENERATE]),
    ],
)
def test_a_lost_engine_is_replaced_and_the_call_repeated(
    losses: dict[int, int], is_beside_training: bool, calls: list[Any]
) -> None:
    world = World({call: [ENGINES[engine]] for call, engine in losses.items()})
    assert steps(world, is_beside_training=is_beside_training) == [len(losses)]
    assert world.calls == calls


def test_a_loss_is_reported_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = World({2: [ENGINES[1]]})
    assert steps(world, num=2) == [1, 0]
    assert world.calls[-2:] == [("refit", 1, 10), ("generate", 71)]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.messages == ["engine died; restart 1 of at most 3 in this run"]


def test_between_two_steps_engines_generate_in_the_learners_memory_with_the_weights_that_they_have() -> None:
    world = World({5: [ENGINE]})
    tolerant = world.tolerant(takes_turns=True)
    tolerant.refit(0, draft_version=0)
    with tolerant.between_steps():
        generated(tolerant, 1)
    again = [*replaced(0), ("again", 0), GENERATE]
    offloads, sleep = "learner offloads", "engines sleep"
    assert world.calls == [offloads, REFIT, offloads, GENERATE, sleep, *again, sleep]
    # The loss is that of the step to come, and what is lost there is refitted by the learner.
    assert [result.num_engine_restarts for result in generated(tolerant, 1)] == [1]


def test_an_engine_lost_while_it_takes_weights_gets_the_same_ones_though_the_learner_has_moved_on() -> None:
    world = World({2: [ENGINE]})
    tolerant = world.tolerant(is_beside_training=True)
    assert tolerant.deliver(tolerant.export(4, draft_version=2)).num_tensors == 1
    assert world.calls == [("export", 4, 2), ("deliver", 4), *replaced(0), ("deliver", 4)]
    generated(tolerant, 1)
    assert world.calls[5:] == [GENERATE]


@pytest.mark.parametrize(
    ("losses", "max_restarts", "num_replaced"),
    [(range(1, 9), 3, 3), ([2, 5], 1, 1)],
    ids=["substitutes count", "more than allowed"],
)
def test_too_many_losses_end_the_run(losses: Sequence[int], max_restarts: int, num_replaced: int) -> None:
    world = World({call: [ENGINE] for call in losses})
    with pytest.raises(LostWorkerError, match="engine died"):
        steps(world, max_restarts=max_restarts)
    assert world.calls.count(("replace", ["engine 0"])) == num_replaced


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("lost", [[RANK], [ENGINE, RANK]])
def test_a_lost_rank_of_the_learner_is_not_an_engines_loss(lost: list[Worker], takes_turns: bool) -> None:
    """Nor is one that is lost when it gives memory back."""
    world = World({1: lost})
    with pytest.raises(LostWorkerError):
        steps(world, takes_turns=takes_turns)
    assert world.calls == ["learner offloads" if takes_turns else REFIT]


@pytest.mark.parametrize("in_flight", [False, True])
def test_weights_that_nobody_keeps_end_the_attempt_with_the_engine_replaced(in_flight: bool) -> None:
    world = World({2: [ENGINES[1]]}, keeps_weights=False)
    tolerant = world.tolerant(is_beside_training=True)
    tolerant.deliver(export_of(4))
    with pytest.raises(WeightsLostError, match="no engine can be given policy version 4 again"):
        tolerant.submit(REQUESTS) if in_flight else generated(tolerant, 1)
    assert world.calls[-3:] == [*replaced(1), ("again", 4)]


def test_a_repeated_generation_is_asked_for_the_same_and_its_rollouts_count_as_made_again() -> None:
    """Of three prompts with two rollouts each, in a second and a third try: 12 rollouts."""
    world = World({1: [ENGINE], 4: [ENGINES[1]]})
    tolerant = world.tolerant(max_restarts=2)
    result = tolerant.generate([PROMPT] * 3, sampling=SAMPLING, group_size=2, seed=70)
    assert world.generations == [([PROMPT] * 3, {"sampling": SAMPLING, "group_size": 2, "seed": 70})] * 3
    assert (result.num_regenerated, result.num_engine_restarts) == (12, 2)
    (again,) = generated(tolerant, 1)
    assert (again.num_regenerated, again.num_engine_restarts) == (0, 0)


def test_a_new_engine_gets_the_versions_that_were_delivered_and_the_first_ones_before_any() -> None:
    world = World({1: [ENGINE]})
    generated(world.tolerant(), 1)
    assert world.calls[-2:] == [("refit", 0, None), GENERATE]
    world = World({3: [ENGINE]})
    tolerant = world.tolerant()
    tolerant.deliver(tolerant.export(4, draft_version=2))
    generated(tolerant, 1)
    assert world.calls[-2:] == [("refit", 4, 2), GENERATE]


AGAIN = [*replaced(0), ("again", 4), ("submit", [0, 1, 2])]


def flying(world: World) -> FaultTolerantEngines:
    """Engines of version 4 with three groups under way."""
    tolerant = world.tolerant(is_beside_training=True)
    tolerant.deliver(export_of(4))
    tolerant.submit(REQUESTS)
    return tolerant


@pytest.mark.parametrize("losses", [(3,), (3, 7)])
def test_what_a_lost_engine_had_is_submitted_again_and_counted(losses: tuple[int, ...]) -> None:
    """Three groups with two rollouts each, and weights that are brought once for each loss."""
    world = World({call: [ENGINE] for call in losses})
    tolerant = flying(world)
    portion = tolerant.advance(max_s=0.25)
    assert world.calls[3:] == [*AGAIN, "advance"] * len(losses)
    assert world.sampled == [SAMPLING] * (1 + len(losses))
    assert (portion.ended_s, portion.num_regenerated) == (0.25, 6 * len(losses))
    assert (portion.num_engine_restarts, tolerant.advance(max_s=1.0).num_regenerated) == (len(losses), 0)
    assert tolerant.under_way == REQUESTS


def test_groups_that_were_handed_to_an_engine_that_died_are_handed_over_once() -> None:
    world = World({2: [ENGINE]})
    assert flying(world).under_way == REQUESTS
    assert world.calls[2:] == AGAIN


def test_an_engine_lost_in_a_refit_gets_the_new_weights_and_then_its_groups() -> None:
    world = World({3: [ENGINE]})
    flying(world).deliver(export_of(5))
    assert world.calls[3:] == [*replaced(0), ("deliver", 5), ("submit", [0, 1, 2])]


def test_restarted_groups_are_asked_for_with_their_new_seeds() -> None:
    world = World()
    assert flying(world).restart([1, 2], seeds=lambda request: (*request.seeds, 7)) == 2
    assert world.calls[2:] == [("restart", [1, 2], (1, 2, 7))]


STEP = ["learner offloads", REFIT, GENERATE, "engines sleep"]


@pytest.mark.parametrize(
    ("losses", "num_regenerated", "calls"),
    [
        ({}, 0, STEP),
        # lost in the refit: it restarts beside a learner that sleeps
        ({2: ENGINE}, 0, ["learner offloads", REFIT, *replaced(0), *STEP]),
        # lost while it generates, or gives memory back: all generate again
        ({3: ENGINE}, 2, [*STEP[:3], *replaced(0), *STEP]),
        ({4: ENGINE}, 2, [*STEP, *replaced(0), *STEP]),
    ],
)
def test_the_learner_gives_memory_back_before_the_refit_and_the_engines_after_the_generation(
    losses: dict[int, Worker], num_regenerated: int, calls: list[Any]
) -> None:
    world = World({call: [engine] for call, engine in losses.items()})
    tolerant = world.tolerant(takes_turns=True)
    tolerant.refit(0, draft_version=0)
    assert generated(tolerant, 1)[0].num_regenerated == num_regenerated
    assert world.calls == calls
    tolerant.export(4, draft_version=2)
    assert world.calls[len(calls) :] == ["learner offloads", ("export", 4, 2)]


def test_an_arm_begins_with_sleeping_engines_and_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, learner = NotedEngine(), NotedLearner()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **how: Any) -> Any:
            engine.calls.append(name)
            return call(*args, **how)

        return note

    for name in ("load", "offload", "train_step"):
        monkeypatch.setattr(learner, name, noted(name, getattr(learner, name)))
    recipe = recipe_with({**IN_TURN, "placement.memory": "in_turn", "grpo.num_steps": 2})
    trained(recipe, Tools(tmp_path, monkeypatch), engine=engine, learner=learner)
    words = [call[0] if isinstance(call, tuple) else call for call in engine.calls]
    turns = [word for word in words if word in ("sleep", "load", "offload", "generate", "train_step")]
    assert turns == ["sleep", "load", *["offload", "generate", "sleep", "train_step"] * 2]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An autopilot that probes and decides sooner."""
    monkeypatch.setattr(length, "PATIENCE_STEPS", 2)
    monkeypatch.setattr(length, "_PROBE_EVERY_STEPS", 4)
    monkeypatch.setattr(recovery, "PATIENCE_STEPS", 2)


def test_a_watched_step_says_whether_it_drafted_and_what_a_token_took() -> None:
    world = World(drafting_s=0.5)
    results = generated(world.tolerant(autopilot=Autopilot(TABLE)), 4)
    assert world.tables == [TABLE, TABLE, TABLE, NO_DRAFTS]
    assert [result.autopilot for result in results] == [
        *[AutopilotStep(speculates=True, is_probe=False, token_ms=50.0)] * 3,
        AutopilotStep(speculates=False, is_probe=True, token_ms=100.0),
    ]
    assert [result.acceptance for result in results] == [ACCEPTANCE] * 3 + [None]


def test_the_log_says_when_speculation_is_switched_off_and_on(caplog: pytest.LogCaptureFixture) -> None:
    world = World(drafting_s=2.0)
    tolerant = world.tolerant(autopilot=Autopilot(TABLE))
    last = generated(tolerant, 6)[-1].autopilot
    assert [table == NO_DRAFTS for table in world.tables] == [False, False, False, True, True, True]
    assert last is not None and last.has_switched and not last.is_probe
    world.drafting_s = 0.25
    results = generated(tolerant, 8)
    assert world.tables[-1] == TABLE
    assert [result.acceptance is None for result in results] == [table == NO_DRAFTS for table in world.tables[6:]]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert caplog.messages == [
        "speculation is off: for 2 steps it lost, 200.000 ms a token with it and 100.000 ms a token without; it is "
        "probed from time to time",
        "speculation is on again: probes of it took 25.000 ms a token, generation without it 100.000 ms a token",
    ]


def test_a_resumed_autopilot_takes_up_the_thread_of_the_records() -> None:
    whole = World(drafting_s=2.0)
    done = [result.autopilot for result in generated(whole.tolerant(autopilot=Autopilot(TABLE)), 16)]
    for stop in range(16):
        resumed = World(drafting_s=2.0)
        generated(resumed.tolerant(autopilot=Autopilot(TABLE, done[:stop])), 16 - stop)
        assert resumed.tables == whole.tables[stop:]


@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_substitute_is_told_how_to_draft_and_the_lost_call_counts_for_nothing(takes_turns: bool) -> None:
    """Lost in the seventh generation, when speculation is off, or as it gives memory back after that."""
    world = World({14 if takes_turns else 7: [ENGINE]}, drafting_s=2.0)
    results = generated(world.tolerant(autopilot=Autopilot(TABLE), takes_turns=takes_turns), 7)
    assert world.tables[-2:] == [NO_DRAFTS, NO_DRAFTS]
    assert [result.num_engine_restarts for result in results] == [0] * 6 + [1]
    assert results[-1].autopilot == AutopilotStep(speculates=False, is_probe=False, token_ms=100.0)
    assert len(world.tables) == 8
