"""Scheduling of groups by seen lengths, over engines on clocks of their own, and in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.protocol import Portion, RunningTime
from slipstream.engine.requests import GroupRequest, group_requests
from slipstream.types import Prompt, RolloutGroup
from slipstream.workers.scheduler import Deal, Ledger, SeenLengths, deal, gather, joined, together
from tests.unit.sampled import accepted, rollout


def prompt(name: str, length: int = 4) -> Prompt:
    return Prompt(id=name, text="", token_ids=(1,) * length, answer="")


def group(prompt: Prompt, *lengths: int) -> RolloutGroup:
    return RolloutGroup(
        prompt=prompt, rollouts=tuple(rollout((7,) * length, prompt_id=prompt.id) for length in lengths)
    )


def seen(**lengths: int) -> SeenLengths:
    history = SeenLengths()
    history.note(group(prompt(name), length) for name, length in lengths.items())
    return history


def names(requests: Sequence[GroupRequest]) -> str:
    return "".join(request.prompt.id for request in requests)


def test_before_anything_was_seen_all_are_expected_to_be_equal() -> None:
    assert SeenLengths().expected(prompt("a")) == SeenLengths().expected(prompt("b", length=90)) == 1.0


def test_a_prompt_takes_what_it_took_last() -> None:
    history = SeenLengths()
    history.note([group(prompt("a"), 10, 30)])
    assert history.expected(prompt("a")) == 20.0
    history.note([group(prompt("a"), 100)])
    assert history.expected(prompt("a")) == 100.0


def test_an_unseen_prompt_takes_the_mean_of_its_kind_or_of_all() -> None:
    history = SeenLengths()
    # Kinds are 0-7 and 16-23 prompt tokens; the newest length has a quarter of the weight.
    history.note([group(prompt("a", 4), 8), group(prompt("b", 5), 16), group(prompt("c", 16), 42)])
    assert history.expected(prompt("new", 7)) == 8 + (16 - 8) / 4 == 10.0
    assert history.expected(prompt("new", 23)) == 42.0
    assert history.expected(prompt("new", 8)) == 10 + (42 - 10) / 4 == 18.0


def test_the_longest_goes_first_to_the_engine_with_the_least_to_do() -> None:
    requests = group_requests([prompt(name) for name in "abcde"], group_size=2, seed=0)
    dealt = deal(requests, seen(a=10, b=50, c=20, d=40, e=25), num_engines=2, num_slots=None)
    # 50 | 40, then 25 beside the 40, 20 beside the 50, and 10 beside the 65 of d and e, which is less than 70.
    assert [names(share) for share in dealt.shares] == ["bc", "dea"]
    assert dealt.queue == ()


def test_unknown_lengths_are_dealt_in_turn() -> None:
    requests = group_requests([prompt(name) for name in "abcdef"], group_size=1, seed=0)
    dealt = deal(requests, SeenLengths(), num_engines=3, num_slots=None)
    assert [names(share) for share in dealt.shares] == ["ad", "be", "cf"]


def test_what_has_no_room_waits_longest_first() -> None:
    requests = group_requests([prompt(name) for name in "abcdef"], group_size=2, seed=0)
    dealt = deal(requests, seen(a=1, b=2, c=3, d=4, e=5, f=6), num_engines=2, num_slots=5)
    # Five slots hold two groups of two: f and c, e and d.
    assert [names(share) for share in dealt.shares] == ["fc", "ed"]
    assert names(dealt.queue) == "ba"
    assert deal(requests, seen(a=1, b=2, c=3, d=4, e=5, f=6), num_engines=2, num_slots=4) == dealt


def test_a_group_larger_than_an_engine_is_dealt_to_one_of_its_own() -> None:
    requests = group_requests([prompt(name) for name in "abc"], group_size=8, seed=0)
    dealt = deal(requests, SeenLengths(), num_engines=2, num_slots=5)
    assert [names(share) for share in dealt.shares] == ["a", "b"]
    assert names(dealt.queue) == "c"


@dataclass
class TimedEngines:
    """Engines that run `num_slots` rollouts at once; a prompt's id says how many seconds each of its rollouts takes."""

    num_engines: int
    num_slots: int
    calls: list[tuple[int, Sequence[GroupRequest], bool, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = [0.0] * self.num_engines
        self.left: list[dict[int, tuple[GroupRequest, float]]] = [{} for _ in range(self.num_engines)]
        self.ended: dict[int, Portion] = {}

    def start(self, engine: int, requests: Sequence[GroupRequest], is_first: bool, room_for: int | None) -> int:
        """The whole call at once: nothing from outside changes what an engine does before it returns."""
        self.calls.append((engine, requests, is_first, room_for))
        started_s, left = self.now[engine], self.left[engine]
        for request in requests:
            left[request.index] = (request, self.now[engine] + float(request.prompt.id))
        done = []
        while left:
            index = min(left, key=lambda i: left[i][1])
            request, self.now[engine] = left.pop(index)
            done.append((index, group(request.prompt, *[1] * len(request.seeds))))
            running = sum(len(other.seeds) for other, _ in left.values())
            if room_for is not None and running + room_for <= self.num_slots:
                break
        self.ended[len(self.calls)] = Portion(
            groups=tuple(done), acceptance=None, started_s=started_s, ended_s=self.now[engine]
        )
        return len(self.calls)

    def generate(self, dealt: Deal) -> list[list[Portion]]:
        return gather(dealt, start=self.start, wait=self.wait)

    def wait(self, calls: Sequence[int]) -> tuple[int, Portion]:
        first = min(calls, key=lambda call: self.ended[call].ended_s)
        return first, self.ended[first]


def requests_of(*seconds: int, group_size: int = 2) -> tuple[GroupRequest, ...]:
    prompts = [Prompt(id=str(second), text="", token_ids=(1,), answer="") for second in seconds]
    return group_requests(prompts, group_size=group_size, seed=0)


def test_without_a_queue_every_engine_gets_one_call_that_runs_to_its_end() -> None:
    engines = TimedEngines(num_engines=2, num_slots=8)
    requests = requests_of(5, 3, 2)
    portions = engines.generate(deal(requests, SeenLengths(), num_engines=2, num_slots=8))
    result = joined(requests, portions)
    assert [(engine, *rest) for engine, _, *rest in engines.calls] == [(0, True, None), (1, True, None)]
    assert [each.prompt.id for each in result.groups] == ["5", "3", "2"]
    # 5 and 2 on the first engine, at the same time; 3 on the second, which idles for 2 of 2 x 5 seconds.
    assert (result.generation_s, result.engine_idle_fraction) == (5.0, pytest.approx(0.2))


@pytest.mark.parametrize(
    ("seconds", "num_slots", "shares", "calls", "ends"),
    [
        # The second engine has done the 1 at second 1, takes the 2, is done at 3, takes the 3, and ends at 6.
        ("4123", 2, (1, 2), [(0, "4", 2), (1, "1", 2), (1, "2", 2), (1, "3", None)], (6.0, 2 / 12)),
        # The first returns at second 1 for the 3; the second at 2, to an empty queue, and goes on with the 8.
        ("91823", 4, (2, 4), [(0, "91", 2), (1, "82", 2), (0, "3", None), (1, "", None)], (9.0, 1 / 18)),
    ],
)
def test_an_engine_takes_from_the_queue_when_a_group_has_room_and_goes_on_when_it_is_empty(
    seconds: str, num_slots: int, shares: tuple[int, int], calls: list[Any], ends: tuple[float, float]
) -> None:
    engines, requests = TimedEngines(num_engines=2, num_slots=num_slots), requests_of(*map(int, seconds))
    first, second = shares
    dealt = Deal(shares=(requests[:first], requests[first:second]), queue=requests[second:])
    result = joined(requests, engines.generate(dealt))
    assert [(engine, names(taken), room) for engine, taken, _, room in engines.calls] == calls
    assert [is_first for _, _, is_first, _ in engines.calls] == [True, True, False, False]
    assert "".join(each.prompt.id for each in result.groups) == seconds
    assert (result.generation_s, result.engine_idle_fraction) == (ends[0], pytest.approx(ends[1]))


def test_engines_that_got_nothing_are_idle_all_the_time() -> None:
    requests = requests_of(4)
    engines = TimedEngines(num_engines=3, num_slots=4)
    result = joined(requests, engines.generate(deal(requests, SeenLengths(), num_engines=3, num_slots=4)))
    assert result.engine_idle_fraction == pytest.approx(2 / 3)


def test_one_engine_is_never_idle() -> None:
    requests = requests_of(4, 2)
    engines = TimedEngines(num_engines=1, num_slots=4)
    result = joined(requests, engines.generate(deal(requests, SeenLengths(), num_engines=1, num_slots=None)))
    assert (result.generation_s, result.engine_idle_fraction, result.acceptance) == (4.0, 0.0, None)


def test_the_time_is_that_of_the_engine_that_took_longest_from_its_first_call_to_its_last() -> None:
    """The pause between two calls of a lone engine is its own: nobody waits for anybody."""
    requests = requests_of(1, 2)
    entries = [(index, group(requests[index].prompt, 1, 1)) for index in (0, 1)]
    steps = RunningTime(num_running=2, num_steps=5, num_tokens=20, elapsed_s=0.5)
    first = Portion(
        groups=(entries[0],), acceptance=None, started_s=7.0, ended_s=8.0, running=(steps,), num_preemptions=2
    )
    second = Portion(
        groups=(entries[1],), acceptance=None, started_s=9.0, ended_s=10.0, running=(steps,), num_preemptions=3
    )
    result = joined(requests, [[first, second]])
    assert (result.generation_s, result.engine_idle_fraction) == (3.0, 0.0)
    assert result.running == (RunningTime(num_running=2, num_steps=10, num_tokens=40, elapsed_s=1.0),)
    assert result.num_preemptions == 5
    assert together([first, second], num_engines=1).num_preemptions == 5


def test_acceptance_is_that_of_all_calls_together() -> None:
    def portion(index: int, drafts: int, num_accepted: int) -> Portion:
        groups = ((index, group(requests[index].prompt, 1, 1)),)
        return Portion(groups=groups, acceptance=accepted(drafts, num_accepted, 0), started_s=0.0, ended_s=1.0)

    requests = requests_of(1, 2)
    acceptance = joined(requests, [[portion(0, 4, 1)], [portion(1, 6, 4)]]).acceptance
    assert acceptance is not None
    assert (acceptance.num_drafts, acceptance.num_accepted_tokens, acceptance.mean_acceptance_length) == (10, 5, 1.5)


def test_engines_that_share_no_clock_did_together_what_each_did_in_their_mean_time() -> None:
    """3 s on one engine's clock and 1 s on another's are 2 s of both; each step keeps the batch that ran in it."""
    requests = requests_of(1, 2)
    steps = [
        RunningTime(num_running=2, num_steps=5, num_tokens=20, elapsed_s=0.5),
        RunningTime(num_running=1, num_steps=3, num_tokens=3, elapsed_s=0.25),
        RunningTime(num_running=2, num_steps=1, num_tokens=4, elapsed_s=0.25),
    ]
    entries = [(index, group(requests[index].prompt, 1, 1)) for index in (0, 1)]
    one = Portion(groups=(entries[1],), acceptance=None, started_s=7.0, ended_s=10.0, running=tuple(steps[:1]))
    other = Portion(
        groups=(entries[0],), acceptance=accepted(6, 4, 0), started_s=1.0, ended_s=2.0, running=tuple(steps[1:])
    )

    assert together([one, other], num_engines=2) == Portion(
        groups=(entries[1], entries[0]),
        acceptance=accepted(6, 4, 0),
        started_s=0.0,
        ended_s=2.0,
        running=(steps[1], RunningTime(num_running=2, num_steps=6, num_tokens=24, elapsed_s=0.75)),
    )
    assert together([one], num_engines=2).acceptance is None


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30, unique=True),
    st.integers(1, 4),
    st.integers(2, 9),
    st.booleans(),
)
def test_no_engine_is_idle_while_a_group_waits(
    seconds: list[int], num_engines: int, num_slots: int, lengths_are_known: bool
) -> None:
    requests = requests_of(*seconds)
    engines = TimedEngines(num_engines=num_engines, num_slots=num_slots)
    lengths = SeenLengths()
    if lengths_are_known:
        for request in requests:
            lengths._by_prompt[request.prompt.id] = float(request.prompt.id)
    portions = engines.generate(deal(requests, lengths, num_engines=num_engines, num_slots=num_slots))
    result = joined(requests, portions)
    assert [each.prompt.id for each in result.groups] == [str(second) for second in seconds]
    taken_s = [
        engines.ended[number].started_s
        for number, (_, taken, is_first, _) in enumerate(engines.calls, start=1)
        if taken and not is_first
    ]
    if taken_s:
        assert min(engine[-1].ended_s for engine in portions) >= max(taken_s)
    for engine in portions:  # and no engine waits between two of its calls
        assert all(a.ended_s == b.started_s for a, b in pairwise(engine))


def submitted(index: int, *seeds: int) -> GroupRequest:
    return GroupRequest(index=index, prompt=Prompt(id=str(index), text="", token_ids=(2,), answer=""), seeds=seeds)


def indices(placed: dict[str, list[GroupRequest]]) -> dict[str, list[int]]:
    return {engine: [group.index for group in groups] for engine, groups in placed.items()}


def test_each_group_goes_to_the_engine_with_the_fewest_rollouts() -> None:
    ledger = Ledger()

    # a takes 4, b takes 2, then 2 more, then both have 4 and the first is asked.
    placed = ledger.place(
        [submitted(0, 1, 2, 3, 4), submitted(1, 1, 2), submitted(2, 1, 2), submitted(3, 1)], ["a", "b"]
    )

    assert indices(placed) == {"a": [0, 3], "b": [1, 2]}
    ledger.complete([0, 3])
    assert indices(ledger.place([submitted(4, 1)], ["a", "b"])) == {"a": [4]}


def test_what_an_engine_has_already_counts() -> None:
    ledger = Ledger()
    ledger.place([submitted(0, 1, 2)], ["a", "b"])

    assert indices(ledger.place([submitted(1, 1)], ["a", "b"])) == {"b": [1]}


def test_what_a_lost_engine_had_is_taken_once_and_what_came_back_is_not() -> None:
    ledger = Ledger()
    ledger.place([submitted(0, 1), submitted(1, 1), submitted(2, 1), submitted(3, 1)], ["a", "b"])
    ledger.complete([0])

    assert [group.index for group in ledger.take(["a"])] == [2]
    assert ledger.take(["a"]) == ()
    assert [group.index for group in ledger.requests] == [1, 3]


def test_other_seeds_are_told_to_the_engine_that_has_the_group_and_a_group_that_came_back_is_passed_over() -> None:
    ledger = Ledger()
    ledger.place([submitted(0, 1, 2), submitted(1, 3, 4)], ["a", "b"])

    told = ledger.reseed([7, 1], lambda group: tuple(seed + 10 for seed in group.seeds))

    assert told == {"b": {1: (13, 14)}}
    assert [group.seeds for group in ledger.requests] == [(1, 2), (13, 14)]
