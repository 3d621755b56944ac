"""Several engines whose rollouts go on across refits, as their driver sees them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.config import Backend, EngineConfig, SamplingConfig
from slipstream.engine.protocol import GroupRequest, Portion
from slipstream.grpo.config import KvCache
from slipstream.refit.config import WeightFiles
from slipstream.types import Dtype, Prompt, RolloutGroup
from slipstream.workers import engines
from slipstream.workers.calls import Crew, Deadline, LostWorkerError, Worker
from slipstream.workers.engines import RemoteEngine, SglangProcess
from slipstream.workers.scheduler import Deal
from tests.small import replace_in
from tests.unit.sampled import rollout

SAMPLING = SamplingConfig(max_response_tokens=4)
CONFIG = EngineConfig(max_model_len=16, max_num_seqs=1, dtype=Dtype.FLOAT32, kv_cache_gib=0.1)


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


def actor(engine: Engine) -> Any:
    """The engine as Ray shows it."""

    def remote(method: Callable[..., Any]) -> Any:
        return SimpleNamespace(
            remote=lambda *given, **more: None if engine.is_dead else partial(method, *given, **more)
        )

    names = ("run_in_flight", "submit", "restart", "advance", "trace", "history", "recall")
    return SimpleNamespace(**{name: remote(getattr(engine, name)) for name in names})


def in_flight(num_engines: int, num_groups: int = 0) -> tuple[list[Engine], RemoteEngine]:
    """Engines, and their driver's side, which gave them groups."""

    made = [Engine() for _ in range(num_engines)]
    workers = [Worker(actor(engine), f"engine {index}") for index, engine in enumerate(made)]
    deadline = Deadline(1.0, "engine.answer_timeout_s")
    remote = RemoteEngine(workers, deadline)
    remote._crew = InProcess(workers, deadline)
    remote.submit([request(index) for index in range(num_groups)], sampling=SAMPLING)
    return made, remote


def prompts_of(*names: str) -> list[Prompt]:
    return [Prompt(id=name, text="", token_ids=(2,), answer="") for name in names]


def request(index: int) -> GroupRequest:
    return GroupRequest(index=index, prompt=prompts_of(str(index))[0], seeds=(1, 2))


def done(portion: Portion) -> list[int]:
    return [index for index, _ in portion.groups]


def test_groups_are_spread_and_come_back_from_all_engines() -> None:
    (first, second), engines = in_flight(2, num_groups=3)
    portion = engines.advance(max_s=0.2)
    assert done(portion) == [0, 1]
    assert (portion.started_s, portion.ended_s) == (0.0, 2.0)  # each worked 2 s
    assert [group.index for group in engines.under_way] == [2]
    assert [stops for _, stops in first.calls + second.calls] == [False, False]  # none may idle while another works
    portion = engines.advance(max_s=0.2)
    assert (done(portion), portion.ended_s) == ([2], 1.0)  # the second one had no work
    assert len(second.calls) == 1
    assert done(engines.advance(max_s=60.0)) == []  # nothing is under way: at once


def test_a_single_engine_returns_with_its_first_group() -> None:
    (engine,), engines = in_flight(1, num_groups=2)
    assert done(engines.advance(max_s=20.0)) == [0]
    ((max_s, stops_at_first),) = engine.calls
    assert stops_at_first
    assert 19.0 < max_s <= 20.0


def test_traces_are_dealt_over_engines_and_a_prompts_rollouts_stay_together() -> None:
    (first, second), engines = in_flight(2)
    how = {"sampling": SAMPLING, "group_size": 2, "seed": 3}
    traces = engines.trace(prompts_of(*"abcac"), **how)
    assert traces == [f"{name} {number}" for name in "abcac" for number in range(2)]
    assert first.calls == [(["a", "c", "a", "c"], how)]
    assert [names for names, _ in second.calls] == [["b"]]
    (alone, idle), engines = in_flight(2)
    assert len(engines.trace(prompts_of("a"), **how)) == 2
    assert (len(alone.calls), idle.calls) == (1, [])


def test_histories_are_asked_of_every_engine_and_dealt_in_turn_where_there_are_fewer() -> None:
    three, engines = in_flight(3)
    engines.recall([b"of 0", b"of 1"])
    assert engines.histories() == [b"[b'of 0']", b"[b'of 1']", b"[b'of 0']"]
    engines.recall([])
    engines.recall([b"of 0", b"of 1", b"of 2", b"of 3"])
    assert [each.calls[1:] for each in three] == [[b"of 0"], [b"of 1"], [b"of 2"]]


def test_what_an_engine_completed_while_another_died_is_not_lost() -> None:
    (first, _), engines = in_flight(2, num_groups=4)
    first.is_dead = True
    with pytest.raises(LostWorkerError, match="engine 0 died during generation in flight"):
        engines.advance(max_s=1.0)
    assert [group.index for group in engines.take_lost(["engine 0"])] == [0, 2]
    assert [group.index for group in engines.under_way] == [3]
    assert done(engines.advance(max_s=1.0)) == [1]  # completed beside the death
    assert done(engines.advance(max_s=1.0)) == [3]


def test_groups_that_a_dead_engine_was_given_are_known_as_its_own() -> None:
    (_, second), engines = in_flight(2)
    second.is_dead = True
    with pytest.raises(LostWorkerError):
        engines.submit([request(0), request(1)], sampling=SAMPLING)
    assert [group.index for group in engines.take_lost(["engine 1"])] == [1]


def test_engines_that_start_in_place_of_others_are_kept_though_one_fails_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the one that failed is named as lost, and the others have the mode and their place."""
    made, remote = in_flight(3)
    remote.run_in_flight(KvCache.KEEP)
    killed: list[Any] = []
    new, starts = [Engine() for _ in made], [0, 1, 2, 1]

    def start(index: int) -> Worker:
        substitute = Worker(actor(new[index]), f"engine {index}")
        if starts.pop(0) == 1 and starts:
            raise LostWorkerError("engine 1 died during its start", [substitute])
        return substitute

    monkeypatch.setattr(remote, "_start", start)
    monkeypatch.setattr(engines.ray, "kill", killed.append)
    before = remote.workers
    with pytest.raises(LostWorkerError, match="engine 1 died") as error:
        remote.replace(before)
    assert [worker.name for worker in error.value.workers] == ["engine 1"]
    assert killed == [worker.actor for worker in before]
    remote.replace(error.value.workers)
    assert [each.calls for each in new] == [[KvCache.KEEP]] * 3
    remote.submit([request(index) for index in range(3)], sampling=SAMPLING)
    assert [len(each.groups) for each in (*made, *new)] == [0, 0, 0, 1, 1, 1]


def test_engines_are_told_of_the_groups_to_start_anew_and_all_of_a_change_of_mode_which_forgets_them() -> None:
    (first, second), engines = in_flight(2, num_groups=2)
    assert engines.restart([1, 9], seeds=lambda group: (group.index + 10, 0)) == 1
    assert (first.calls, second.calls) == ([], [{1: (11, 0)}])
    assert [group.seeds for group in engines.under_way] == [(1, 2), (11, 0)]
    engines.run_in_flight(KvCache.KEEP)
    assert (first.calls, second.calls[1:]) == ([KvCache.KEEP], [KvCache.KEEP])
    assert engines.under_way == ()


def test_what_is_generated_unnoted_teaches_no_dealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response to the second prompt is longer, and what is longest is dealt first once that is known."""
    prompts = prompts_of("short", "long")
    groups = [
        RolloutGroup(prompt=prompt, rollouts=(rollout((3,) * length, (), prompt_id=prompt.id),))
        for prompt, length in zip(prompts, (5, 36), strict=True)
    ]
    dealt: list[list[str]] = []

    def generate_dealt(crew: Crew, deal: Deal, *_: Any) -> None:
        dealt.append([request.prompt.id for request in (*deal.shares[0], *deal.queue)])

    replace_in(monkeypatch, engines, generate_dealt=generate_dealt, joined=lambda *_: SimpleNamespace(groups=groups))
    _, remote = in_flight(1)
    with remote.unnoted():
        for _ in range(2):
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
    config = replace(CONFIG, backend=Backend.SGLANG)
    command = [sys.executable, str(stand_in), str(tmp_path / "calls")]
    engine = SglangProcess(tmp_path, config=config, executor="uni", can_sleep=False, command=command)
    with pytest.raises(SystemExit) as ended:
        engine.refit(WeightFiles(policy=Path("deadly"), policy_version=1))
    assert ended.value.code == 1
    engine.close()


@pytest.mark.parametrize("method", ["history", "ngram"])
def test_a_kept_engine_takes_weights_and_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    calls: list[Any] = []
    forget = partial(calls.append, "forget")
    kept = SimpleNamespace(run_in_flight=calls.append, refit=calls.append, forget=forget, close=lambda: None)
    monkeypatch.setattr(engines.idle_engines, "take", lambda key: kept)
    with engines.start_engine(tmp_path, config=CONFIG, speculative_config={"method": method}) as engine:
        assert engine is kept
    refit = WeightFiles(policy=tmp_path, policy_version=0)
    assert calls == [None, refit, *(["forget"] if method == "history" else [])]
