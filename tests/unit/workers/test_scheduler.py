"""Scheduling of groups by seen lengths, over engines on clocks of their own, and in flight."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.protocol import GenerationResult, GroupRequest, Portion, RunningTime, group_requests
from slipstream.types import Prompt, RolloutGroup
from slipstream.workers.scheduler import Deal, Ledger, SeenLengths, deal, gather, joined, together
from tests.unit.sampled import accepted, rollout


def prompt(name: str, length: int = 4) -> Prompt:
    return Prompt(id=name, text="", token_ids=(1,) * length, answer="")


def group(prompt: Prompt, *lengths: int) -> RolloutGroup:
    rollouts = tuple(rollout((7,) * length, prompt_id=prompt.id) for length in lengths)
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


def portion(*groups: tuple[int, RolloutGroup], span: tuple[float, float] = (0.0, 1.0), **values: Any) -> Portion:
    return Portion(groups=groups, started_s=span[0], ended_s=span[1], **{"acceptance": None, **values})


def names(requests: Sequence[GroupRequest]) -> str:
    return "".join(request.prompt.id for request in requests)


def test_a_prompt_takes_what_it_took_last_and_all_are_equal_before_anything_was_seen() -> None:
    assert SeenLengths().expected(prompt("a")) == SeenLengths().expected(prompt("b", length=90)) == 1.0
    history = SeenLengths()
    for lengths, expected in (((10, 30), 20.0), ((100,), 100.0)):
        history.note([group(prompt("a"), *lengths)])
        assert history.expected(prompt("a")) == expected


def test_an_unseen_prompt_takes_the_mean_of_its_kind_or_of_all() -> None:
    history = SeenLengths()
    # Kinds are 0-7 and 16-23 prompt tokens; the newest length has a quarter of the weight.
    history.note([group(prompt("a", 4), 8), group(prompt("b", 5), 16), group(prompt("c", 16), 42)])
    assert history.expected(prompt("new", 7)) == 8 + (16 - 8) / 4 == 10.0
    assert history.expected(prompt("new", 23)) == 42.0
    assert history.expected(prompt("new", 8)) == 10 + (42 - 10) / 4 == 18.0


@pytest.mark.parametrize(
    ("lengths", "group_size", "num_slots", "shares", "queue"),
    [
        # 50 | 40, then 25 beside the 40, 20 beside the 50, and 10 beside the 65 of d and e, which is less than 70.
        ({"a": 10, "b": 50, "c": 20, "d": 40, "e": 25}, 2, None, ["bc", "dea"], ""),
        ({name: 0 for name in "abcdef"}, 1, None, ["ace", "bdf"], ""),  # none was seen
        # Five slots hold two groups of two, as four do: f and c, e and d.
        ({name: length for length, name in enumerate("abcdef", start=1)}, 2, 5, ["fc", "ed"], "ba"),
        ({name: length for length, name in enumerate("abcdef", start=1)}, 2, 4, ["fc", "ed"], "ba"),
        ({name: 0 for name in "abc"}, 8, 5, ["a", "b"], "c"),  # each is larger than an engine
    ],
)
def test_the_longest_goes_first_to_the_engine_with_the_least_to_do_and_what_has_no_room_waits(
    lengths: dict[str, int], group_size: int, num_slots: int | None, shares: list[str], queue: str
) -> None:
    history = SeenLengths()
    history.note(group(prompt(name), length) for name, length in lengths.items() if length)
    requests = group_requests([prompt(name) for name in lengths], group_size=group_size, seed=0)
    dealt = deal(requests, history, num_engines=2, num_slots=num_slots)
    assert ([names(share) for share in dealt.shares], names(dealt.queue)) == (shares, queue)


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
        self.ended[len(self.calls)] = portion(*done, span=(started_s, self.now[engine]))
        return len(self.calls)

    def wait(self, calls: Sequence[int]) -> tuple[int, Portion]:
        first = min(calls, key=lambda call: self.ended[call].ended_s)
        return first, self.ended[first]

    def generate(self, requests: Sequence[GroupRequest], dealt: Deal | None = None) -> GenerationResult:
        """Generate what is dealt, or the groups of unknown lengths."""
        dealt = dealt or deal(requests, SeenLengths(), num_engines=self.num_engines, num_slots=self.num_slots)
        self.portions = gather(dealt, start=self.start, wait=self.wait)
        return joined(requests, self.portions)


def requests_of(*seconds: int, group_size: int = 2) -> tuple[GroupRequest, ...]:
    prompts = [Prompt(id=str(second), text="", token_ids=(1,), answer="") for second in seconds]
    return group_requests(prompts, group_size=group_size, seed=0)


def test_without_a_queue_every_engine_gets_one_call_that_runs_to_its_end() -> None:
    engines = TimedEngines(num_engines=2, num_slots=8)
    result = engines.generate(requests_of(5, 3, 2))
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
    result = engines.generate(requests, dealt)
    assert [(engine, names(taken), room) for engine, taken, _, room in engines.calls] == calls
    assert [is_first for _, _, is_first, _ in engines.calls] == [True, True, False, False]
    assert "".join(each.prompt.id for each in result.groups) == seconds
    assert (result.generation_s, result.engine_idle_fraction) == (ends[0], pytest.approx(ends[1]))


def test_engines_that_got_nothing_are_idle_all_the_time_and_one_engine_never() -> None:
    result = TimedEngines(num_engines=3, num_slots=4).generate(requests_of(4))
    assert result.engine_idle_fraction == pytest.approx(2 / 3)
    result = TimedEngines(num_engines=1, num_slots=4).generate(requests_of(4, 2))
    assert (result.generation_s, result.engine_idle_fraction, result.acceptance) == (4.0, 0.0, None)


ONE_TWO = requests_of(1, 2)
ENTRIES = [(index, group(request.prompt, 1, 1)) for index, request in enumerate(ONE_TWO)]


def test_the_time_is_that_of_the_engine_that_took_longest_and_counts_are_those_of_all_calls() -> None:
    """From its first call to its last; the pause between two calls of a lone engine is its own."""
    steps = RunningTime(num_running=2, num_steps=5, num_tokens=20, elapsed_s=0.5)
    drafts = [{"acceptance": accepted(num_drafts, num, 0)} for num_drafts, num in ((4, 1), (6, 4))]
    first = portion(ENTRIES[0], span=(7.0, 8.0), running=(steps,), num_preemptions=2, **drafts[0])
    second = portion(ENTRIES[1], span=(9.0, 10.0), running=(steps,), num_preemptions=3, **drafts[1])
    result = joined(ONE_TWO, [[first, second]])
    assert (result.generation_s, result.engine_idle_fraction) == (3.0, 0.0)
    assert result.running == (RunningTime(num_running=2, num_steps=10, num_tokens=40, elapsed_s=1.0),)
    assert (result.num_preemptions, result.acceptance) == (5, accepted(10, 5, 0))
    assert joined(ONE_TWO, [[first], [second]]).acceptance == accepted(10, 5, 0)


def test_engines_that_share_no_clock_did_together_what_each_did_in_their_mean_time() -> None:
    """3 s on one engine's clock and 1 s on another's are 2 s of both; each step keeps the batch that ran in it."""
    steps = [
        RunningTime(num_running=2, num_steps=5, num_tokens=20, elapsed_s=0.5),
        RunningTime(num_running=1, num_steps=3, num_tokens=3, elapsed_s=0.25),
        RunningTime(num_running=2, num_steps=1, num_tokens=4, elapsed_s=0.25),
    ]
    one = portion(ENTRIES[1], span=(7.0, 10.0), running=tuple(steps[:1]))
    other = portion(ENTRIES[0], span=(1.0, 2.0), acceptance=accepted(6, 4, 0), running=tuple(steps[1:]))
    both = (steps[1], RunningTime(num_running=2, num_steps=6, num_tokens=24, elapsed_s=0.75))
    assert together([one, other], num_engines=2) == portion(
        ENTRIES[1], ENTRIES[0], span=(0.0, 2.0), acceptance=accepted(6, 4, 0), running=both
    )
    assert together([one], num_engines=2).acceptance is None


SECONDS = st.lists(st.integers(1, 50), min_size=1, max_size=30, unique=True)


@given(SECONDS, st.integers(1, 4), st.integers(2, 9), st.booleans())
def test_no_engine_idles_while_a_group_waits(
    seconds: list[int], num_engines: int, num_slots: int, lengths_are_known: bool
) -> None:
    requests = requests_of(*seconds)
    engines = TimedEngines(num_engines=num_engines, num_slots=num_slots)
    lengths = SeenLengths()
    if lengths_are_known:
        for request in requests:
            lengths._by_prompt[request.prompt.id] = float(request.prompt.id)
    dealt = deal(requests, lengths, num_engines=num_engines, num_slots=num_slots)
    result = engines.generate(requests, dealt)
    assert [each.prompt.id for each in result.groups] == [str(second) for second in seconds]
    taken_s = [
        engines.ended[number].started_s
        for number, (_, taken, is_first, _) in enumerate(engines.calls, start=1)
        if taken and not is_first
    ]
    if taken_s:
        assert min(engine[-1].ended_s for engine in engines.portions) >= max(taken_s)
    for engine in engines.portions:  # and no engine waits between two of its calls
        assert all(a.ended_s == b.started_s for a, b in pairwise(engine))


def placed(ledger: Ledger, *groups: tuple[int, int]) -> dict[str, list[int]]:
    """Where groups of these indices and numbers of rollouts go."""
    requests = [GroupRequest(index=index, prompt=prompt("p"), seeds=(1, 2, 3, 4)[:num]) for index, num in groups]
    return {engine: [each.index for each in given] for engine, given in ledger.place(requests, ["a", "b"]).items()}


def test_each_group_goes_to_the_engine_with_the_fewest_rollouts() -> None:
    ledger = Ledger()
    # a takes 4, b takes 2, then 2 more, then both have 4 and the first is asked.
    assert placed(ledger, (0, 4), (1, 2), (2, 2), (3, 1)) == {"a": [0, 3], "b": [1, 2]}
    assert placed(ledger, (4, 1), (5, 1)) == {"b": [4], "a": [5]}  # what an engine has already counts
    ledger.complete([0])
    assert placed(ledger, (6, 1)) == {"a": [6]}
