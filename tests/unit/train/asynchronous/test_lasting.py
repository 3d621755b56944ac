"""A lost engine in flight: what it had starts anew beside the others, which go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from slipstream.engine.protocol import Portion
from slipstream.engine.requests import GroupRequest
from slipstream.records.steps import RefitCheck
from slipstream.refit.gate import Export
from slipstream.train.asynchronous.lasting import LastingInFlight
from slipstream.train.recovery import WeightsLostError
from slipstream.workers.calls import LostWorkerError, Worker
from tests.unit.train.asynchronous.world import PROMPTS, SAMPLING, export_of

ENGINE = Worker(None, "engine 0", "10.77.0.11")
RANK = Worker(None, "learner rank 0", "10.77.0.11")
REQUESTS = tuple(GroupRequest(index=i, prompt=PROMPTS[i], seeds=(1, 2)) for i in range(3))


class Run:
    """Engines and their gate; whoever is in `lost` dies at the call of that number."""

    def __init__(self, lost: dict[int, Worker], *, keeps_weights: bool = True) -> None:
        self.engines = (ENGINE,)
        self.under_way: tuple[GroupRequest, ...] = ()
        self.calls: list[Any] = []
        self.sampled: list[Any] = []
        self._lost, self._keeps_weights = lost, keeps_weights

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        raise AssertionError("learner and engines do their parts in turn")

    def export(self, version: int, *, draft_version: int | None) -> Export:
        raise AssertionError("the learner has done its part")

    def deliver(self, export: Export) -> RefitCheck:
        self._asked(("refit", export.version))
        return RefitCheck(num_tensors=1, elapsed_s=0.0)

    def submit(self, requests: Sequence[GroupRequest], *, sampling: Any) -> None:
        self.under_way = (*self.under_way, *requests)
        self.sampled.append(sampling)
        self._asked(("submit", [request.index for request in requests]))

    def advance(self, *, max_s: float) -> Portion:
        self._asked("advance")
        return Portion(groups=(), acceptance=None, started_s=0.0, ended_s=max_s)

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        self._asked(("restart", list(indices), seeds(REQUESTS[0])))
        return len(indices)

    def take_lost(self, names: Collection[str]) -> tuple[GroupRequest, ...]:
        lost, self.under_way = self.under_way, ()
        self.calls.append(("take", list(names)))
        return lost

    def replace(self, lost: Sequence[Worker]) -> None:
        self.calls.append(("replace", [engine.name for engine in lost]))

    def engines_changed(self) -> None:
        self.calls.append("changed")

    def deliver_again(self, version: int) -> bool:
        self.calls.append(("again", version))
        return self._keeps_weights

    def generate(self, *args: Any, **more: Any) -> Any:
        raise AssertionError("nothing is generated in one call")

    def _asked(self, call: Any) -> None:
        self.calls.append(call)
        lost = self._lost.pop(sum(each[0] in ("refit", "submit") or each == "advance" for each in self.calls), None)
        if lost is not None:
            raise LostWorkerError(f"{lost} died", [lost])


def lasting(run: Run, *, max_restarts: int = 3) -> LastingInFlight:
    return LastingInFlight(run, run, sampling=SAMPLING, max_restarts=max_restarts)


RECOVERY = [("take", ["engine 0"]), ("replace", ["engine 0"]), "changed"]


def test_what_a_lost_engine_had_is_submitted_again_to_one_with_the_same_weights_and_counted() -> None:
    run = Run({3: ENGINE})
    engines = lasting(run)
    engines.deliver(export_of(4))
    engines.submit(REQUESTS, sampling=SAMPLING)
    assert engines.advance(max_s=0.25).ended_s == 0.25

    assert run.calls[3:] == [*RECOVERY, ("again", 4), ("submit", [0, 1, 2]), "advance"]
    assert run.sampled == [SAMPLING, SAMPLING]
    assert (engines.take_num_regenerated(), engines.take_num_regenerated()) == (6, 0)
    assert engines.under_way == REQUESTS


def test_groups_that_were_handed_to_an_engine_that_died_are_handed_over_once() -> None:
    run = Run({2: ENGINE})
    engines = lasting(run)
    engines.deliver(export_of(4))
    engines.submit(REQUESTS, sampling=SAMPLING)

    assert run.calls[2:] == [*RECOVERY, ("again", 4), ("submit", [0, 1, 2])]
    assert engines.under_way == REQUESTS


def test_an_engine_lost_in_a_refit_gets_the_new_weights_and_then_its_groups() -> None:
    run = Run({3: ENGINE})
    engines = lasting(run)
    engines.deliver(export_of(4))
    engines.submit(REQUESTS, sampling=SAMPLING)
    engines.deliver(export_of(5))

    assert run.calls[3:] == [*RECOVERY, ("refit", 5), ("submit", [0, 1, 2])]


def test_weights_that_nobody_keeps_end_the_attempt_with_the_engine_replaced() -> None:
    run = Run({2: ENGINE}, keeps_weights=False)
    engines = lasting(run)
    engines.deliver(export_of(4))
    with pytest.raises(WeightsLostError):
        engines.submit(REQUESTS, sampling=SAMPLING)
    assert ("replace", ["engine 0"]) in run.calls


@pytest.mark.parametrize(("lost", "max_restarts"), [(RANK, 3), (ENGINE, 0)])
def test_a_lost_learner_and_one_engine_too_many_end_the_run(lost: Worker, max_restarts: int) -> None:
    engines = lasting(Run({1: lost}), max_restarts=max_restarts)
    with pytest.raises(LostWorkerError):
        engines.deliver(export_of(4))


def test_nothing_was_regenerated_before_an_engine_was_lost() -> None:
    assert lasting(Run({})).take_num_regenerated() == 0


def test_what_starts_anew_is_asked_for_with_its_new_seeds() -> None:
    run = Run({})
    engines = lasting(run)
    engines.deliver(export_of(4))
    engines.submit(REQUESTS, sampling=SAMPLING)
    assert engines.restart([1, 2], seeds=lambda request: (*request.seeds, 7)) == 2
    assert run.calls[2:] == [("restart", [1, 2], (1, 2, 7))]


def test_each_loss_submits_what_that_engine_had_and_counts_it_once() -> None:
    """Two losses of three groups with two rollouts each, and weights that were brought once for each."""
    run = Run({3: ENGINE, 5: ENGINE})
    engines = lasting(run)
    engines.deliver(export_of(4))
    engines.submit(REQUESTS, sampling=SAMPLING)
    engines.advance(max_s=1.0)

    again = [*RECOVERY, ("again", 4), ("submit", [0, 1, 2])]
    assert run.calls[3:] == [*again, "advance", *again, "advance"]
    assert engines.take_num_regenerated() == 12
