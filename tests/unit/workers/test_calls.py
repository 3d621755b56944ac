"""Calls to actors under a deadline: the named worker of a failure, the length of a wait, and the pool of idle ones."""

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from slipstream.refit.config import ChannelBrokeError, RefitError
from slipstream.workers import calls
from slipstream.workers.calls import Crew, Deadline, Idle, LostWorkerError, Proxy, Worker

DEADLINE = Deadline(5.0, "learner.answer_timeout_s")
RANKS = [Worker(None, f"learner rank {rank}", f"10.77.0.1{rank}", f"node{rank}", 40 + rank) for rank in range(3)]
CUT, NAN = RuntimeError("Connection closed by peer [10.77.0.11]:4242"), ValueError("w must be finite, got NaN or Inf")
BROKEN, SHAPES = ChannelBrokeError("the gloo channel broke, or stood still for 5 s"), RefitError("shapes differ")
WHAT = r"train_step of policy version 3 \(done before: logprobs of policy version 3\)"


class Answers:
    """Ray, as far as waiting goes: answers arrive in the order given; one that is not there never comes.

    An exception is what an actor raised, or that the actor died.
    """

    def __init__(self, outcomes: Mapping[str, Any]) -> None:
        self._outcomes = outcomes
        self.timeouts: list[float] = []

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.timeouts.append(timeout)
        ready = [ref for ref in self._outcomes if ref in refs][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any) -> Any:
        outcome = self._outcomes[ref]
        if isinstance(outcome, ActorDiedError):
            raise outcome
        if isinstance(outcome, Exception):
            raise RayTaskError("LearnerProcess.train_step", f"traceback: {outcome}", outcome).as_instanceof_cause()
        return outcome


def ask(outcomes: Mapping[str, Any], *states: str) -> list[Any]:
    """Gather the answers a, b and c of the ranks; `states` are those of their processes."""

    def states_of(workers: Sequence[Worker]) -> dict[Worker, str]:
        return {worker: states[RANKS.index(worker)] for worker in workers}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "ray", Answers(outcomes))
        patch.setattr(calls, "process_states", states_of)
        crew = Crew(RANKS, DEADLINE)
        crew.last_done = "logprobs of policy version 3"
        return crew.gather("train_step of policy version 3", list(zip(RANKS, "abc", strict=True)))


def test_answers_come_in_the_order_of_the_calls_whoever_is_first() -> None:
    assert ask({"c": 3, "a": 1, "b": 2}) == [1, 2, 3]


@pytest.mark.parametrize(
    ("outcomes", "states", "said", "lost"),
    [
        ({"a": 1, "b": ActorDiedError()}, (), rf"rank 1 on 10\.77\.0\.11 died during {WHAT}: The actor died unex", [1]),
        ({"a": CUT, "c": CUT, "b": ActorDiedError()}, (), r"rank 1 on 10\.77\.0\.11 died", [1]),
        ({"a": BROKEN}, ("", "stopped", "sleeping"), r"rank 1 on 10\.77\.0\.11 \(stopped\)", [1]),
        (
            {"c": 3},
            ("sleeping", "stopped"),
            r"rank 1 on 10\.77\.0\.11 \(stopped\) did not answer within 5 s \(learner\.answer_timeout_s\) "
            rf"during {WHAT}; learner rank 0 on 10\.77\.0\.10 waited as well$",
            [1],
        ),
        ({}, ("sleeping",) * 3, r"rank 0 .*\(sleeping\), .*rank 1 .*\(sleeping\), .*rank 2", [0, 1, 2]),
    ],
    ids=[
        "a dead rank, with its host, what it did and what it did before",
        "the dead rank, not those whose collective broke",
        "the rank that stands still, not the one that saw the channel break",
        "the rank that hangs, not the one that waits for it",
        "all that are silent, where all processes run",
    ],
)
def test_a_lost_worker_is_named_and_not_its_victims(
    outcomes: dict[str, Any], states: tuple[str, ...], said: str, lost: list[int]
) -> None:
    with pytest.raises(LostWorkerError, match=rf"^learner {said}") as caught:
        ask(outcomes, *states)
    assert caught.value.workers == tuple(RANKS[rank] for rank in lost)


@pytest.mark.parametrize(
    ("outcomes", "rank"),
    [
        ({"a": CUT, "c": RuntimeError("timed out")}, "a"),
        ({"a": CUT, "b": NAN}, "b"),
        ({"a": BROKEN, "b": SHAPES}, "b"),
        ({"b": SHAPES, "a": BROKEN}, "b"),
        ({"a": BROKEN, "c": BROKEN, "b": SHAPES}, "b"),
        ({"b": ChannelBrokeError("for b"), "a": BROKEN, "c": BROKEN}, "b"),
    ],
)
def test_who_failed_by_itself_goes_before_who_first_saw_a_break(outcomes: dict[str, Any], rank: str) -> None:
    with pytest.raises(type(outcomes[rank]), match=re.escape(str(outcomes[rank]))) as caught:
        ask(outcomes)
    (note,) = caught.value.__notes__
    number = "abc".index(rank)
    assert re.match(rf"learner rank {number} on 10\.77\.0\.1{number} failed during {WHAT}$", note)


def test_an_error_of_a_ranks_own_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Answers({"b": NAN})
    monkeypatch.setattr(calls, "ray", backend)
    with pytest.raises(ValueError, match="must be finite") as caught:
        Crew(RANKS, DEADLINE).gather("publish", [(RANKS[0], "a"), (RANKS[1], "b")])
    assert len(backend.timeouts) == 1
    assert "learner rank 1 on 10.77.0.11 failed during publish" in caught.value.__notes__[0]


def test_an_engine_that_a_rank_lost_is_named_to_the_driver_as_the_rank_named_it() -> None:
    engine = Worker(object(), "engine 1", "10.77.0.13", "node3", 50)
    sent = pickle.loads(pickle.dumps(LostWorkerError("engine 1 on 10.77.0.13 died during a transfer", [engine])))
    with pytest.raises(LostWorkerError, match=r"^engine 1 on 10\.77\.0\.13 died during a transfer$") as caught:
        ask({"a": sent})  # the other ranks wait for the one that fails
    assert caught.value.workers == (engine,)
    assert caught.value.workers[0].actor is None


def test_a_broken_collective_shortens_the_wait_and_never_lengthens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for cause_s in (2.0, 9.0):
        backend = Answers({"a": CUT})
        monkeypatch.setattr(calls, "ray", backend)
        with pytest.raises(RuntimeError, match="Connection closed"):
            Crew(RANKS, DEADLINE, cause_s=cause_s).gather("publish", [(RANKS[0], "a"), (RANKS[1], "b")])
        first, second = backend.timeouts
        assert 4.0 < first <= 5.0
        assert second <= min(5.0, cause_s)


def test_the_lost_workers_are_those_that_died_and_those_that_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = [SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda ref=ref: ref)) for ref in "abc"]
    workers = [replace(rank, actor=actor) for rank, actor in zip(RANKS, actors, strict=True)]
    monkeypatch.setattr(calls, "process_states", lambda asked: dict.fromkeys(asked, "stopped"))
    monkeypatch.setattr(calls, "ray", Answers({"a": ActorDiedError(), "b": True}))
    assert Proxy(workers, DEADLINE).lost_workers() == [workers[0], workers[2]]
    monkeypatch.setattr(calls, "ray", Answers(dict.fromkeys("abc", True)))
    assert Proxy(workers, DEADLINE).lost_workers() == []


@dataclass(eq=False)
class Process:
    """An engine or a learner."""

    is_dead: bool = False
    is_closed: bool = False

    def lost_workers(self) -> list[Worker]:
        return list(RANKS[:1]) if self.is_dead else []

    def close(self) -> None:
        self.is_closed = True


def test_an_idle_engine_comes_back_once_to_who_asks_for_its_settings_and_is_closed_if_it_died() -> None:
    idle, alive, dead = Idle[Process](), Process(), Process(is_dead=True)
    idle.put("k=0", alive, capacity=2)
    idle.put("k=0", dead, capacity=2)
    assert [idle.take("k=5"), idle.take("k=0"), idle.take("k=0")] == [None, alive, None]
    assert (alive.is_closed, dead.is_closed) == (False, True)


def test_beyond_the_capacity_the_longest_idle_is_closed() -> None:
    idle, engines = Idle[Process](), [Process() for _ in range(4)]
    for k, engine in enumerate(engines[:3]):
        idle.put(f"k={k}", engine, capacity=2)
    assert [engine.is_closed for engine in engines] == [True, False, False, False]
    assert [idle.take("k=0"), idle.take("k=2")] == [None, engines[2]]
    idle.put("k=3", engines[3], capacity=0)
    assert [engine.is_closed for engine in engines] == [True, True, False, True]


def test_a_process_is_kept_after_the_block_and_closed_after_an_error() -> None:
    idle = Idle[Process]()
    with idle.lent("k=0", Process, capacity=1) as (first, was_kept):
        assert not was_kept
    with pytest.raises(ValueError, match="within"), idle.lent("k=0", Process, capacity=1) as (second, was_kept):
        assert (second, was_kept) == (first, True)
        raise ValueError("within the block")
    assert first.is_closed
    assert idle.take("k=0") is None
