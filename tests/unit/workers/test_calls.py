"""Calls to actors under a deadline: the named worker of a failure, the length of a wait, and the pool of idle ones."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from slipstream.refit.config import ChannelBrokeError, RefitError
from slipstream.workers import calls
from slipstream.workers.calls import Crew, Deadline, Idle, LostWorkerError, Proxy, Worker

DEADLINE = Deadline(5.0, "learner.answer_timeout_s")
RANKS = [Worker(None, f"learner rank {rank}", f"10.77.0.1{rank}", f"node{rank}", 40 + rank) for rank in range(3)]


class Answers:
    """Ray, as far as waiting goes: answers arrive in the order given; one that is not there never comes."""

    def __init__(self, outcomes: Mapping[str, Any]) -> None:
        self._outcomes = outcomes
        self.timeouts: list[float] = []

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.timeouts.append(timeout)
        ready = [ref for ref in self._outcomes if ref in refs][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any) -> Any:
        outcome = self._outcomes[ref]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def raised(cause: Exception) -> Exception:
    """Make the exception that Ray raises in the driver for an actor's error."""
    return RayTaskError("LearnerProcess.train_step", f"traceback of the rank: {cause}", cause).as_instanceof_cause()


def ask(outcomes: Mapping[str, Any], states: Mapping[str, str] | None = None) -> list[Any]:
    def states_of(workers: Sequence[Worker]) -> dict[Worker, str]:
        return {worker: (states or {})[worker.name] for worker in workers}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "ray", Answers(outcomes))
        patch.setattr(calls, "process_states", states_of)
        crew = Crew(RANKS, DEADLINE)
        crew.last_done = "logprobs of policy version 3"
        return crew.gather("train_step of policy version 3", list(zip(RANKS, "abc", strict=True)))


def test_answers_come_in_the_order_of_the_calls_whoever_is_first() -> None:
    assert ask({"c": 3, "a": 1, "b": 2}) == [1, 2, 3]


def test_a_dead_rank_is_named_with_its_host_what_it_did_and_what_it_did_before() -> None:
    with pytest.raises(
        LostWorkerError,
        match=r"^learner rank 1 on 10\.77\.0\.11 died during train_step of policy version 3 "
        r"\(done before: logprobs of policy version 3\): The actor died unexpectedly",
    ) as caught:
        ask({"a": 1, "b": ActorDiedError()})
    assert caught.value.workers == (RANKS[1],)


def test_a_broken_collective_is_blamed_on_the_rank_that_died() -> None:
    broken = raised(RuntimeError("Connection closed by peer [10.77.0.11]:4242"))

    with pytest.raises(LostWorkerError, match=r"learner rank 1 on 10\.77\.0\.11 died"):
        ask({"a": broken, "c": broken, "b": ActorDiedError()})


def test_a_broken_collective_without_a_dead_rank_is_the_error_of_who_saw_it_first() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
        ask({"a": raised(RuntimeError("Connection closed by peer")), "c": raised(RuntimeError("timed out"))})
    assert caught.value.__notes__ == [
        "learner rank 0 on 10.77.0.10 failed during train_step of policy version 3 "
        "(done before: logprobs of policy version 3)"
    ]


def test_an_error_of_a_ranks_own_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Answers({"b": raised(ValueError("weight w must be finite, got NaN or Inf"))})
    monkeypatch.setattr(calls, "ray", backend)

    with pytest.raises(ValueError, match="must be finite") as caught:
        Crew(RANKS, DEADLINE).gather("publish", [(RANKS[0], "a"), (RANKS[1], "b")])
    assert len(backend.timeouts) == 1
    assert "learner rank 1 on 10.77.0.11 failed during publish" in caught.value.__notes__[0]


def test_what_broke_a_collective_goes_before_the_broken_collective() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        ask({"a": raised(RuntimeError("Connection closed")), "b": raised(ValueError("w must be finite"))})


def test_who_stands_still_is_named_and_not_those_that_saw_the_channel_break() -> None:
    broken = raised(ChannelBrokeError("the gloo channel broke, or stood still for 5 s"))
    states = {"learner rank 1": "stopped", "learner rank 2": "sleeping"}

    with pytest.raises(LostWorkerError, match=r"^learner rank 1 on 10\.77\.0\.11 \(stopped\)") as caught:
        ask({"a": broken}, states)
    assert caught.value.workers == (RANKS[1],)


def test_who_failed_by_itself_goes_before_those_that_saw_the_channel_break_and_those_that_are_silent() -> None:
    broken, own = raised(ChannelBrokeError("the gloo channel broke")), raised(RefitError("shapes differ"))

    for outcomes in ({"a": broken, "b": own}, {"b": own, "a": broken}, {"a": broken, "c": broken, "b": own}):
        with pytest.raises(RefitError, match="shapes differ"):
            ask(outcomes)


def test_a_broken_channel_alone_is_the_error_of_who_saw_it_first() -> None:
    broken = [raised(ChannelBrokeError(f"the gloo channel broke for {name}")) for name in "abc"]

    with pytest.raises(ChannelBrokeError, match="broke for b"):
        ask({"b": broken[1], "a": broken[0], "c": broken[2]})


def test_an_engine_that_a_rank_lost_is_named_to_the_driver_as_the_rank_named_it() -> None:
    engine = Worker(object(), "engine 1", "10.77.0.13", "node3", 50)
    sent = pickle.loads(pickle.dumps(LostWorkerError("engine 1 on 10.77.0.13 died during a transfer", [engine])))

    with pytest.raises(LostWorkerError, match=r"^engine 1 on 10\.77\.0\.13 died during a transfer$") as caught:
        ask({"a": raised(sent)})  # the other ranks wait for the one that fails
    assert caught.value.workers == (engine,)
    assert caught.value.workers[0].actor is None


def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it() -> None:
    with pytest.raises(
        LostWorkerError,
        match=r"^learner rank 1 on 10\.77\.0\.11 \(stopped\) did not answer within 5 s \(learner\.answer_timeout_s\) "
        r"during train_step of policy version 3 \(done before: logprobs of policy version 3\); "
        r"learner rank 0 on 10\.77\.0\.10 waited as well$",
    ) as caught:
        ask({"c": 3}, {"learner rank 0": "sleeping", "learner rank 1": "stopped"})
    assert caught.value.workers == (RANKS[1],)


def test_where_all_processes_run_all_that_are_silent_are_named() -> None:
    states = {rank.name: "sleeping" for rank in RANKS}

    with pytest.raises(LostWorkerError, match=r"rank 0 .*\(sleeping\), .*rank 1 .*\(sleeping\), .*rank 2") as caught:
        ask({}, states)
    assert caught.value.workers == tuple(RANKS)


def test_a_broken_collective_shortens_the_wait_and_never_lengthens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = raised(RuntimeError("Connection closed"))
    for seconds, cause_s in ((5.0, 2.0), (5.0, 9.0)):
        backend = Answers({"a": broken})
        monkeypatch.setattr(calls, "ray", backend)
        with pytest.raises(RuntimeError, match="Connection closed"):
            crew = Crew(RANKS, Deadline(seconds, "x"), cause_s=cause_s)
            crew.gather("publish", [(RANKS[0], "a"), (RANKS[1], "b")])
        first, second = backend.timeouts
        assert 4.0 < first <= 5.0
        assert second <= min(seconds, cause_s)


def test_the_lost_workers_are_those_that_died_and_those_that_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = [SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda ref=ref: ref)) for ref in "abc"]
    workers = [replace(rank, actor=actor) for rank, actor in zip(RANKS, actors, strict=True)]
    monkeypatch.setattr(calls, "process_states", lambda asked: dict.fromkeys(asked, "stopped"))
    monkeypatch.setattr(calls, "ray", Answers({"a": ActorDiedError(), "b": True}))
    assert Proxy(workers, DEADLINE).lost_workers() == [workers[0], workers[2]]
    monkeypatch.setattr(calls, "ray", Answers(dict.fromkeys("abc", True)))
    assert Proxy(workers, DEADLINE).lost_workers() == []


class Process:
    """An engine or a learner."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self.is_dead = is_dead
        self.is_closed = False

    def lost_workers(self) -> list[Worker]:
        return list(RANKS[:1]) if self.is_dead else []

    def close(self) -> None:
        self.is_closed = True


def test_an_engine_comes_back_only_to_who_asks_for_its_settings() -> None:
    idle, engine = Idle[Process](), Process()
    idle.put("k=0", engine, capacity=2)

    assert [idle.take("k=5"), idle.take("k=0"), idle.take("k=0")] == [None, engine, None]
    assert not engine.is_closed


def test_beyond_the_capacity_the_longest_idle_is_closed() -> None:
    idle, engines = Idle[Process](), [Process() for _ in range(4)]
    for k, engine in enumerate(engines[:3]):
        idle.put(f"k={k}", engine, capacity=2)

    assert [engine.is_closed for engine in engines] == [True, False, False, False]
    assert [idle.take("k=0"), idle.take("k=2")] == [None, engines[2]]
    idle.put("k=3", engines[3], capacity=0)
    assert [engine.is_closed for engine in engines] == [True, True, False, True]


def test_an_engine_that_died_while_idle_is_not_given_out() -> None:
    idle, alive, dead = Idle[Process](), Process(), Process(is_dead=True)
    idle.put("k=0", alive, capacity=2)
    idle.put("k=0", dead, capacity=2)

    assert idle.take("k=0") is alive
    assert dead.is_closed


def test_a_process_is_kept_after_the_block_and_closed_after_an_error() -> None:
    idle = Idle[Process]()
    with idle.lent("k=0", Process, capacity=1) as (first, was_kept):
        assert not was_kept
    with (
        pytest.raises(ValueError, match="within the block"),
        idle.lent("k=0", Process, capacity=1) as (second, was_kept),
    ):
        assert (second, was_kept) == (first, True)
        raise ValueError("within the block")
    assert first.is_closed
    assert idle.take("k=0") is None
