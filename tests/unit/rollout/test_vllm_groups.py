"""Groups under way in an engine that finishes what it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slipstream.rollout.requests import GroupRequest
from slipstream.rollout.vllm_groups import GroupsUnderWay
from slipstream.types import Prompt


class Scheduled:
    """vLLM's engine as far as it is used; each step's outputs are set beforehand, by the order of the requests."""

    def __init__(self, *steps: list[int]) -> None:
        self.added: list[tuple[str, Any, Any]] = []
        self.aborted: list[str] = []
        self.steps = list(steps)
        self.counts: tuple[int, int] = (0, 0)  # running, waiting
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.added.append((name, prompt, params))

    def step(self) -> list[Any]:
        unfinished = [SimpleNamespace(request_id=name, finished=False) for name, _, _ in self.added[:1]]
        return unfinished + [
            SimpleNamespace(request_id=self.added[number][0], finished=True, number=number)
            for number in self.steps.pop(0)
        ]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names


def request(index: int, *seeds: int) -> GroupRequest:
    return GroupRequest(
        index=index, prompt=Prompt(id=str(index), text="", token_ids=(2, index), answer=""), seeds=seeds
    )


def test_each_rollout_is_asked_for_with_its_own_seed() -> None:
    engine = Scheduled()
    GroupsUnderWay(engine, max_num_seqs=8).start(request(5, 11, 12), lambda seed: {"seed": seed})
    assert [(prompt, params) for _, prompt, params in engine.added] == [
        ({"prompt_token_ids": [2, 5]}, {"seed": 11}),
        ({"prompt_token_ids": [2, 5]}, {"seed": 12}),
    ]
    assert len({name for name, _, _ in engine.added}) == 2


def test_a_group_comes_out_whole_in_the_order_of_its_seeds() -> None:
    engine = Scheduled([2], [1, 3], [0])
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    for index in (0, 1):
        groups.start(request(index, 1, 2), lambda seed: seed)
    assert groups.step() == []
    second, first = groups.step(), groups.step()
    assert [(done.index, [output.number for output in outputs]) for done, outputs in second] == [(1, [2, 3])]
    assert [(done.index, [output.number for output in outputs]) for done, outputs in first] == [(0, [0, 1])]
    assert groups.is_empty()


def test_there_is_room_while_all_would_run_and_none_waits() -> None:
    engine = Scheduled()
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    engine.counts = (6, 0)
    assert groups.has_room(2)
    assert not groups.has_room(3)
    engine.counts = (5, 1)
    assert not groups.has_room(2)


def test_what_was_left_behind_is_aborted_once_and_names_are_not_used_again() -> None:
    engine = Scheduled([0])
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.start(request(0, 1, 2), lambda seed: seed)
    groups.step()
    groups.drop()
    groups.drop()
    assert engine.aborted == [engine.added[1][0]]
    assert groups.is_empty()
    groups.start(request(1, 1, 2), lambda seed: seed)
    assert len({name for name, _, _ in engine.added}) == 4
