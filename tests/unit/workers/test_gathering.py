"""A generation over engines whose rollouts take as many seconds as they have tokens, on a clock of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.protocol import Portion, RunningTime
from slipstream.engine.requests import GroupRequest, group_requests
from slipstream.records.steps import AcceptanceStats
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup
from slipstream.workers.dealing import Deal, SeenLengths, deal
from slipstream.workers.gathering import Call, gather, joined, together


def rollout_groups(request: GroupRequest) -> RolloutGroup:
    rollout = Rollout(
        prompt_id=request.prompt.id,
        token_ids=(7,),
        rollout_logprobs=(0.0,),
        finish_reason=FinishReason.STOP,
        policy_version=0,
        draft_version=None,
    )
    return RolloutGroup(prompt=request.prompt, rollouts=(rollout,) * len(request.seeds))


@dataclass
class TimedEngines:
    """Engines that run `num_slots` rollouts at once; a prompt's id says how many seconds each of its rollouts takes."""

    num_engines: int
    num_slots: int
    calls: list[tuple[int, Call]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = [0.0] * self.num_engines
        self.left: list[dict[int, tuple[GroupRequest, float]]] = [{} for _ in range(self.num_engines)]
        self.ended: dict[int, Portion] = {}

    def start(self, engine: int, call: Call) -> int:
        """The whole call at once: nothing from outside changes what an engine does before it returns."""
        self.calls.append((engine, call))
        started_s, left = self.now[engine], self.left[engine]
        for request in call.requests:
            left[request.index] = (request, self.now[engine] + float(request.prompt.id))
        done = []
        while left:
            index = min(left, key=lambda i: left[i][1])
            request, self.now[engine] = left.pop(index)
            done.append((index, rollout_groups(request)))
            running = sum(len(other.seeds) for other, _ in left.values())
            if call.room_for is not None and running + call.room_for <= self.num_slots:
                break
        self.ended[len(self.calls)] = Portion(
            groups=tuple(done), acceptance=None, started_s=started_s, ended_s=self.now[engine]
        )
        return len(self.calls)

    def wait(self, calls: Sequence[int]) -> tuple[int, Portion]:
        first = min(calls, key=lambda call: self.ended[call].ended_s)
        return first, self.ended[first]


def requests_of(*seconds: int, group_size: int = 2) -> tuple[GroupRequest, ...]:
    prompts = [Prompt(id=str(second), text="", token_ids=(1,), answer="") for second in seconds]
    return group_requests(prompts, group_size=group_size, seed=0)


def accepted(drafts: int, num_accepted: int) -> AcceptanceStats:
    """Of drafts of two tokens, all in the first place."""
    return AcceptanceStats(
        num_drafts=drafts,
        num_draft_tokens=2 * drafts,
        num_accepted_tokens=num_accepted,
        accepted_by_position=(num_accepted, 0),
        mean_acceptance_length=1 + num_accepted / drafts,
        acceptance_rate=num_accepted / (2 * drafts),
        rate_by_position=(num_accepted / drafts, 0.0),
    )


def test_without_a_queue_every_engine_gets_one_call_that_runs_to_its_end() -> None:
    engines = TimedEngines(num_engines=2, num_slots=8)
    requests = requests_of(5, 3, 2)
    portions = gather(engines, deal(requests, SeenLengths(), num_engines=2, num_slots=8))
    result = joined(requests, portions)
    assert [(engine, call.is_first, call.room_for) for engine, call in engines.calls] == [
        (0, True, None),
        (1, True, None),
    ]
    assert [group.prompt.id for group in result.groups] == ["5", "3", "2"]
    # 5 and 2 on the first engine, at the same time; 3 on the second, which idles for 2 of 2 x 5 seconds.
    assert (result.generation_s, result.engine_idle_fraction) == (5.0, pytest.approx(0.2))


def test_an_engine_takes_from_the_queue_when_a_group_has_room() -> None:
    engines = TimedEngines(num_engines=2, num_slots=2)
    requests = requests_of(4, 1, 2, 3)
    portions = gather(engines, Deal(shares=(requests[:1], requests[1:2]), queue=requests[2:]))
    result = joined(requests, portions)
    # The second engine has done the 1 at second 1, takes the 2, is done at 3, takes the 3, and ends at 6.
    assert [(engine, [r.prompt.id for r in call.requests], call.room_for) for engine, call in engines.calls] == [
        (0, ["4"], 2),
        (1, ["1"], 2),
        (1, ["2"], 2),
        (1, ["3"], None),
    ]
    assert [call.is_first for _, call in engines.calls] == [True, True, False, False]
    assert [group.prompt.id for group in result.groups] == ["4", "1", "2", "3"]
    assert (result.generation_s, result.engine_idle_fraction) == (6.0, pytest.approx(2 / 12))


def test_an_engine_that_returned_early_is_let_go_on_when_the_queue_is_empty() -> None:
    engines = TimedEngines(num_engines=2, num_slots=4)
    requests = requests_of(9, 1, 8, 2, 3)
    portions = gather(engines, Deal(shares=(requests[:2], requests[2:4]), queue=requests[4:]))
    # The first returns at second 1 for the 3; the second at 2, to an empty queue, with the 8 unfinished.
    assert [(engine, [r.prompt.id for r in call.requests], call.room_for) for engine, call in engines.calls] == [
        (0, ["9", "1"], 2),
        (1, ["8", "2"], 2),
        (0, ["3"], None),
        (1, [], None),
    ]
    assert [call.is_first for _, call in engines.calls] == [True, True, False, False]
    result = joined(requests, portions)
    assert [group.prompt.id for group in result.groups] == ["9", "1", "8", "2", "3"]
    assert (result.generation_s, result.engine_idle_fraction) == (9.0, pytest.approx(1 / 18))


def test_engines_that_got_nothing_are_idle_all_the_time() -> None:
    requests = requests_of(4)
    engines = TimedEngines(num_engines=3, num_slots=4)
    result = joined(requests, gather(engines, deal(requests, SeenLengths(), num_engines=3, num_slots=4)))
    assert result.engine_idle_fraction == pytest.approx(2 / 3)


def test_one_engine_is_never_idle() -> None:
    requests = requests_of(4, 2)
    engines = TimedEngines(num_engines=1, num_slots=4)
    result = joined(requests, gather(engines, deal(requests, SeenLengths(), num_engines=1, num_slots=None)))
    assert (result.generation_s, result.engine_idle_fraction, result.acceptance) == (4.0, 0.0, None)


def test_the_time_is_that_of_the_engine_that_took_longest_from_its_first_call_to_its_last() -> None:
    """The pause between two calls of a lone engine is its own: nobody waits for anybody."""
    requests = requests_of(1, 2)
    entries = [(index, rollout_groups(requests[index])) for index in (0, 1)]
    steps = RunningTime(num_running=2, num_steps=5, num_tokens=20, elapsed_s=0.5)
    first = Portion(groups=(entries[0],), acceptance=None, started_s=7.0, ended_s=8.0, running=(steps,))
    second = Portion(groups=(entries[1],), acceptance=None, started_s=9.0, ended_s=10.0, running=(steps,))
    result = joined(requests, [[first, second]])
    assert (result.generation_s, result.engine_idle_fraction) == (3.0, 0.0)
    assert result.running == (RunningTime(num_running=2, num_steps=10, num_tokens=40, elapsed_s=1.0),)


def test_acceptance_is_that_of_all_calls_together() -> None:
    def portion(index: int, drafts: int, num_accepted: int) -> Portion:
        groups = ((index, rollout_groups(requests[index])),)
        return Portion(groups=groups, acceptance=accepted(drafts, num_accepted), started_s=0.0, ended_s=1.0)

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
    entries = [(index, rollout_groups(requests[index])) for index in (0, 1)]
    one = Portion(groups=(entries[1],), acceptance=None, started_s=7.0, ended_s=10.0, running=tuple(steps[:1]))
    other = Portion(
        groups=(entries[0],), acceptance=accepted(6, 4), started_s=1.0, ended_s=2.0, running=tuple(steps[1:])
    )

    assert together([one, other], num_engines=2) == Portion(
        groups=(entries[1], entries[0]),
        acceptance=accepted(6, 4),
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
    portions = gather(engines, deal(requests, lengths, num_engines=num_engines, num_slots=num_slots))
    result = joined(requests, portions)
    assert [group.prompt.id for group in result.groups] == [str(second) for second in seconds]
    taken_s = [
        engines.ended[number].started_s
        for number, (_, call) in enumerate(engines.calls, start=1)
        if call.requests and not call.is_first
    ]
    if taken_s:
        assert min(engine[-1].ended_s for engine in portions) >= max(taken_s)
    for engine in portions:  # and no engine waits between two of its calls
        assert all(a.ended_s == b.started_s for a, b in pairwise(engine))
