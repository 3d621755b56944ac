"""Several engines whose rollouts go on across refits, as their driver sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.config import Backend, EngineConfig, SamplingConfig
from slipstream.engine.protocol import Portion
from slipstream.engine.requests import GroupRequest
from slipstream.grpo.loop_config import KvCache
from slipstream.refit.config import WeightFiles
from slipstream.types import Dtype, Prompt, RolloutGroup
from slipstream.workers import engines
from slipstream.workers.calls import Crew, Deadline, LostWorkerError, Worker
from slipstream.workers.engines import RemoteEngine, SglangProcess
from slipstream.workers.scheduler import Deal
from tests.unit.sampled import rollout

SAMPLING = SamplingConfig(max_response_tokens=4)


class Engine:
    """An engine of which each call of `advance` completes the oldest group."""

    def __init__(self) -> None:
        self.groups: list[GroupRequest] = []
        self.calls: list[Any] = []
        self.is_dead = False

    def run_in_flight(self, kv_cache: KvCache | None) -> None:
        self.calls.append(kv_cache)

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        assert sampling is SAMPLING
        self.groups += requests

    def restart(self, seeds: dict[int, tuple[int, ...]]) -> int:
        self.calls.append(seeds)
        return len(seeds)

    def history(self) -> bytes:
        return repr(self.calls).encode()

    def recall(self, history: bytes) -> None:
        self.calls.append(history)

    def trace(self, prompts: Sequence[Prompt], **how: Any) -> list[str]:
        self.calls.append(([prompt.id for prompt in prompts], how))
        return [f"{prompt.id} {number}" for prompt in prompts for number in range(how["group_size"])]

    def advance(self, *, max_s: float, stops_at_first: bool) -> Portion:
        self.calls.append((max_s, stops_at_first))
        first = self.groups.pop(0)
        group = RolloutGroup(prompt=first.prompt, rollouts=())
        return Portion(groups=((first.index, group),), acceptance=None, started_s=5.0, ended_s=7.0)


class InProcess(Crew):
    """Calls that were answered when they were made."""

    def ask(self, what: str, call: Callable[[Any], Any], *, deadline: Deadline | None = None) -> list[Any]:
        return self.gather(what, [(worker, call(worker.actor)) for worker in self.workers])

    def gather(self, what: str, calls: Sequence[tuple[Worker, Any]], *, deadline: Deadline | None = None) -> list[Any]:
        dead = [worker for worker, answer in calls if answer is None]
        answers = [answer() for _, answer in calls if answer is not None]  # the others have it whoever died
        if dead:
            raise LostWorkerError(f"{dead[0].name} died during {what}", dead)
        return answers


class Actor:
    """As Ray shows an engine."""

    def __init__(self, engine: Engine) -> None:
        for name in ("run_in_flight", "submit", "restart", "advance", "trace", "history", "recall"):
            setattr(self, name, SimpleNamespace(remote=self._remote(engine, getattr(engine, name))))

    @staticmethod
    def _remote(engine: Engine, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if engine.is_dead else lambda: method(*args, **kwargs)


def in_flight(*engines: Engine) -> RemoteEngine:
    workers = [Worker(Actor(engine), f"engine {index}") for index, engine in enumerate(engines)]
    deadline = Deadline(1.0, "engine.answer_timeout_s")
    remote = RemoteEngine(workers, deadline)
    remote._crew = InProcess(workers, deadline)
    return remote


def request(index: int) -> GroupRequest:
    return GroupRequest(index=index, prompt=Prompt(id=str(index), text="", token_ids=(2,), answer=""), seeds=(1, 2))


def done(portion: Portion) -> list[int]:
    return [index for index, _ in portion.groups]


def test_groups_are_spread_and_come_back_from_all_engines() -> None:
    first, second = Engine(), Engine()
    engines = in_flight(first, second)
    engines.submit([request(0), request(1), request(2)], sampling=SAMPLING)

    portion = engines.advance(max_s=0.2)

    assert done(portion) == [0, 1]
    assert (portion.started_s, portion.ended_s) == (0.0, 2.0)  # each worked 2 s
    assert [group.index for group in engines.under_way] == [2]
    assert [stops for _, stops in first.calls + second.calls] == [False, False]  # none may idle while another works
    portion = engines.advance(max_s=0.2)
    assert done(portion) == [2]
    assert portion.ended_s == 1.0  # the second one had no work
    assert len(second.calls) == 1
    assert done(engines.advance(max_s=60.0)) == []  # nothing is under way: at once


def test_traces_are_dealt_over_engines_and_a_prompts_rollouts_stay_together() -> None:
    first, second = Engine(), Engine()
    prompts = [Prompt(id=name, text="", token_ids=(2,), answer="") for name in "abcac"]
    traces = in_flight(first, second).trace(prompts, sampling=SAMPLING, group_size=2, seed=3)
    assert traces == [f"{name} {number}" for name in "abcac" for number in range(2)]
    assert first.calls == [(["a", "c", "a", "c"], {"sampling": SAMPLING, "group_size": 2, "seed": 3})]
    assert [names for names, _ in second.calls] == [["b"]]
    alone, idle = Engine(), Engine()
    assert len(in_flight(alone, idle).trace(prompts[:1], sampling=SAMPLING, group_size=2, seed=3)) == 2
    assert (len(alone.calls), idle.calls) == (1, [])


def test_histories_are_asked_of_every_engine_and_dealt_in_turn_where_there_are_fewer() -> None:
    three = [Engine() for _ in range(3)]
    engines = in_flight(*three)
    engines.recall([b"of 0", b"of 1"])
    assert engines.histories() == [b"[b'of 0']", b"[b'of 1']", b"[b'of 0']"]
    engines.recall([])
    engines.recall([b"of 0", b"of 1", b"of 2", b"of 3"])
    assert [each.calls[1:] for each in three] == [[b"of 0"], [b"of 1"], [b"of 2"]]


def test_a_single_engine_returns_with_its_first_group() -> None:
    engine = Engine()
    engines = in_flight(engine)
    engines.submit([request(0), request(1)], sampling=SAMPLING)

    assert done(engines.advance(max_s=20.0)) == [0]
    ((max_s, stops_at_first),) = engine.calls
    assert stops_at_first
    assert 19.0 < max_s <= 20.0


def test_what_an_engine_completed_while_another_died_is_not_lost() -> None:
    first, second = Engine(), Engine()
    engines = in_flight(first, second)
    engines.submit([request(index) for index in range(4)], sampling=SAMPLING)
    first.is_dead = True

    with pytest.raises(LostWorkerError, match="engine 0 died during generation in flight"):
        engines.advance(max_s=1.0)

    assert [group.index for group in engines.take_lost(["engine 0"])] == [0, 2]
    assert [group.index for group in engines.under_way] == [3]
    assert done(engines.advance(max_s=1.0)) == [1]  # completed beside the death
    assert done(engines.advance(max_s=1.0)) == [3]


def test_groups_that_a_dead_engine_was_given_are_known_as_its_own() -> None:
    first, second = Engine(), Engine()
    engines = in_flight(first, second)
    second.is_dead = True

    with pytest.raises(LostWorkerError):
        engines.submit([request(0), request(1)], sampling=SAMPLING)

    assert [group.index for group in engines.take_lost(["engine 1"])] == [1]


def test_each_engine_is_told_of_the_groups_that_it_has_to_start_anew() -> None:
    first, second = Engine(), Engine()
    engines = in_flight(first, second)
    engines.submit([request(0), request(1)], sampling=SAMPLING)

    assert engines.restart([1, 9], seeds=lambda group: (group.index + 10, 0)) == 1

    assert (first.calls, second.calls) == ([], [{1: (11, 0)}])


def test_a_change_of_mode_reaches_all_and_forgets_what_was_under_way() -> None:
    first, second = Engine(), Engine()
    engines = in_flight(first, second)
    engines.submit([request(0), request(1)], sampling=SAMPLING)

    engines.run_in_flight(KvCache.KEEP)

    assert (first.calls, second.calls) == ([KvCache.KEEP], [KvCache.KEEP])
    assert engines.under_way == ()


def test_what_is_generated_unnoted_teaches_no_dealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response to the second prompt is longer, and what is longest is dealt first once that is known."""
    prompts = [Prompt(id=name, text="", token_ids=(2,), answer="") for name in ("short", "long")]

    def group(prompt: Prompt) -> RolloutGroup:
        tokens = (3,) * len(prompt.id)
        one = rollout(tokens if prompt.id == "short" else 9 * tokens, (), prompt_id=prompt.id)
        return RolloutGroup(prompt=prompt, rollouts=(one,))

    dealt: list[list[str]] = []

    def generate_dealt(crew: Crew, deal: Deal, *_: Any) -> None:
        dealt.append([request.prompt.id for request in (*deal.shares[0], *deal.queue)])

    monkeypatch.setattr(engines, "generate_dealt", generate_dealt)
    monkeypatch.setattr(engines, "joined", lambda *_: SimpleNamespace(groups=[group(prompt) for prompt in prompts]))
    remote = in_flight(Engine())
    with remote.unnoted():
        remote.generate(prompts, sampling=SAMPLING, group_size=1, seed=0)
        remote.generate(prompts, sampling=SAMPLING, group_size=1, seed=0)
    for _ in range(2):
        remote.generate(prompts, sampling=SAMPLING, group_size=1, seed=0)
    assert dealt == [["short", "long"], ["long", "short"]] * 2


def test_the_end_of_sglangs_process_ends_its_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray then reports a lost engine, which is replaced."""
    model = '{"eos_token_id": 3, "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}'
    (tmp_path / "config.json").write_text(model)
    (tmp_path / "deadly").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines.os, "_exit", sys.exit)
    stand_in = Path(__file__).parents[1] / "engine/sglang_stand_in.py"
    config = EngineConfig(
        backend=Backend.SGLANG, max_model_len=16, max_num_seqs=1, dtype=Dtype.FLOAT32, kv_cache_gib=0.1
    )
    command = [sys.executable, str(stand_in), str(tmp_path / "calls")]
    engine = SglangProcess(tmp_path, config=config, executor="uni", can_sleep=False, command=command)
    with pytest.raises(SystemExit) as ended:
        engine.refit(WeightFiles(policy=Path("deadly"), policy_version=1))
    assert ended.value.code == 1
    engine.close()


@pytest.mark.parametrize("method", ["history", "ngram"])
def test_an_engine_that_was_kept_takes_the_new_weights_and_begins_an_empty_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    calls: list[Any] = []
    kept = SimpleNamespace(
        run_in_flight=calls.append, refit=calls.append, forget=lambda: calls.append("forget"), close=lambda: None
    )
    monkeypatch.setattr(engines.idle_engines, "take", lambda key: kept)
    config = EngineConfig(max_model_len=64, max_num_seqs=4, dtype=Dtype.FLOAT32, kv_cache_gib=0.1)
    with engines.start_engine(tmp_path, config=config, speculative_config={"method": method}) as engine:
        assert engine is kept
    refit = WeightFiles(policy=tmp_path, policy_version=0)
    assert calls == [None, refit, *(["forget"] if method == "history" else [])]
