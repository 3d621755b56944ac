"""Groups under way in an engine that finishes what it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.requests import GroupRequest
from slipstream.engine.vllm_groups import Drawn, GroupsUnderWay
from slipstream.types import Prompt


class Scheduled:
    """vLLM's engine as far as it is used; each step's outputs are set beforehand, by the order of the requests."""

    def __init__(self, *steps: list[int]) -> None:
        self.added: list[tuple[str, Any, Any]] = []
        self.aborted: list[str] = []
        self.steps = list(steps)
        self.counts: tuple[int, int] = (0, 0)  # running, waiting
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))
        self.running: list[Any] = []

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.added.append((name, prompt, params))

    def step(self) -> list[Any]:
        tokens = [SimpleNamespace(token_ids=[7])]
        unfinished = [SimpleNamespace(request_id=name, finished=False, outputs=tokens) for name, _, _ in self.added[:1]]
        return unfinished + [
            SimpleNamespace(request_id=self.added[number][0], finished=True, number=number, outputs=tokens)
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
    assert [(done.index, [each.output.number for each in drawn]) for done, drawn in second] == [(1, [2, 3])]
    assert [(done.index, [each.output.number for each in drawn]) for done, drawn in first] == [(0, [0, 1])]
    assert groups.is_empty()


def test_there_is_room_while_all_would_run_and_none_waits() -> None:
    engine = Scheduled()
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    engine.counts = (6, 0)
    assert groups.has_room(2)
    assert not groups.has_room(3)
    engine.counts = (5, 1)
    assert not groups.has_room(2)


def test_drafts_that_were_proposed_before_are_forgotten() -> None:
    engine = Scheduled()
    engine.running = [SimpleNamespace(spec_token_ids=[4, 5]), SimpleNamespace(spec_token_ids=[])]
    GroupsUnderWay(engine, max_num_seqs=8).forget_drafts()
    assert [running.spec_token_ids for running in engine.running] == [[], []]


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


class Decoding:
    """vLLM's engine as far as it is used; a step says how many tokens each rollout has after it, None if it is out."""

    def __init__(self, *steps: tuple[int | None, ...], ends: int) -> None:
        self.names: list[str] = []
        self.prompts: list[Any] = []
        self.seeds: list[Any] = []
        self.aborted: list[str] = []
        self.steps = list(steps)
        self.ends = ends
        self.ends_by_place: list[int] = []

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.names.append(name)
        self.prompts.append(prompt)
        self.seeds.append(params)

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def step(self) -> list[Any]:
        return [
            SimpleNamespace(
                request_id=name,
                finished=length == (self.ends_by_place[place] if self.ends_by_place else self.ends),
                outputs=[SimpleNamespace(token_ids=[7] * length)],
            )
            for place, (name, length) in enumerate(zip(self.names, self.steps.pop(0), strict=False))
            if length
        ]


def test_steps_are_counted_by_how_many_rollouts_ran_in_them_but_those_of_a_prompt() -> None:
    engine = Decoding((1, 1), (3, 2), (4, 4), (5, None), ends=5)
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.start(request(0, 1, 2), lambda seed: seed)
    for _ in range(4):
        groups.step()
    running = groups.take_running()
    # The prompts' step is left out; then 2 + 1 and 1 + 2 tokens of two rollouts, and one of one.
    assert [(time.num_running, time.num_steps, time.num_tokens) for time in running] == [(1, 1, 1), (2, 2, 6)]
    assert all(0.0 < time.elapsed_s < 60.0 for time in running)
    assert groups.take_running() == ()


@pytest.mark.parametrize("steps", [((1, 0), (2, 1), (3, 2)), ((0, 1), (1, 2), (2, 3))], ids=["second", "first"])
def test_a_step_in_which_another_rollout_got_its_first_token_is_left_out(steps: tuple[tuple[int, int], ...]) -> None:
    engine = Decoding(*steps, ends=9)
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.start(request(0, 1, 2), lambda seed: seed)
    for _ in steps:
        groups.step()
    assert [(time.num_running, time.num_tokens) for time in groups.take_running()] == [(2, 2)]


def spans(drawn: Drawn) -> list[tuple[int, int | None, int]]:
    return [(span.policy_version, span.draft_version, span.num_tokens) for span in drawn.versions]


def test_tokens_carry_the_versions_that_drew_them_and_the_windows_that_they_came_in() -> None:
    engine = Decoding((1, 0), (3, 1), (4, 4), (None, 5), ends=4)
    engine.ends_by_place = [4, 5]
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.adopt((1, 11))
    groups.start(request(0, 1, 2), lambda seed: seed)
    groups.step()
    groups.adopt((2, 12))
    groups.step()
    groups.adopt((3, 13))
    groups.adopt((4, 14))  # none was drawn under 3
    groups.step()
    ((_, (first, second)),) = groups.step()
    assert spans(first) == [(1, 11, 1), (2, 12, 2), (4, 14, 1)]
    assert first.window_lengths == (1, 2, 1)
    assert spans(second) == [(2, 12, 1), (4, 14, 4)]  # under version 1 it waited
    assert second.window_lengths == (1, 3, 1)


def test_a_step_that_gives_a_rollout_no_token_is_no_window_of_it() -> None:
    engine = Decoding((1, 1), (3, 2), (3, 4), (5, 5), ends=5)
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.start(request(0, 1, 2), lambda seed: seed)
    for _ in range(3):
        assert groups.step() == []
    ((_, (first, second)),) = groups.step()
    assert (first.window_lengths, second.window_lengths) == ((1, 2, 2), (1, 1, 2, 1))


def test_a_new_salt_keeps_what_starts_later_and_what_waits_from_old_blocks() -> None:
    engine = Decoding((1, 0), ends=9)
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.start(request(0, 1, 2), lambda seed: seed)
    groups.step()
    groups.leave_cached_prefixes()
    groups.start(request(1, 3), lambda seed: seed)
    groups.leave_cached_prefixes()
    salts = [prompt.get("cache_salt") for prompt in engine.prompts]
    # Two without; the second waited and starts anew, beside another group; then these two once more.
    assert salts == [None, None, "1", "1", "2", "2"]
    assert engine.aborted == [engine.names[1], engine.names[2], engine.names[3]]


def test_unfinished_rollouts_start_anew_with_the_seeds_of_their_places() -> None:
    engine = Decoding((4, 1, 1), ends=4)
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.start(request(7, 1, 2), lambda seed: seed)
    groups.start(request(8, 5), lambda seed: seed)
    groups.step()
    groups.adopt((1, None))
    assert groups.restart(7, (21, 22)) == 1
    assert engine.seeds == [1, 2, 5, 22]
    assert engine.aborted == [engine.names[1]]
    engine.steps = [(None, None, None, 4)]
    ((done, (first, second)),) = groups.step()
    assert done.index == 7
    assert (spans(first), spans(second)) == ([(0, None, 4)], [(1, None, 4)])


def test_steps_that_compute_a_cache_anew_are_no_decoding() -> None:
    engine = Decoding((1,), (2,), (3,), (4,), ends=9)
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.start(request(0, 1), lambda seed: seed)
    groups.step()
    groups.step()
    groups.expect_recomputation()
    groups.step()
    groups.step()
    assert [(time.num_steps, time.num_tokens) for time in groups.take_running()] == [(2, 2)]


def test_what_is_asked_beside_the_rollouts_costs_none_of_them() -> None:
    engine = Decoding((2, 1), (None, 2), ends=2)
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    groups.start(request(0, 1), lambda seed: seed)
    (answer,) = groups.aside([{"prompt_token_ids": [2]}], {"max_tokens": 2})
    assert answer.request_id == engine.names[1]
    assert (engine.prompts[1], engine.seeds[1]) == ({"prompt_token_ids": [2]}, {"max_tokens": 2})
    assert not groups.is_empty()  # it was completed meanwhile
    ((done, _),) = groups.step()
    assert done.index == 0
    assert groups.is_empty()
