"""Loops beside which engines generate: whole batches at a fixed lag, and in flight; and which groups a step takes.

In these worlds every difference shows in the weights; engines in flight give one token a call and complete groups in
any order.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.drafts.config import DraftOnline
from slipstream.engine.protocol import GroupRequest, Portion, group_requests, rollout_seed
from slipstream.grpo.config import TooOld
from slipstream.records.steps import Overlap, RefitCheck, StepRecord
from slipstream.refit.config import RefitError
from slipstream.refit.gate import Export
from slipstream.rewards.reward import RewardResult
from slipstream.train.asynchronous import choose_batch, num_missing, overdue
from slipstream.train.batch import Pending
from slipstream.train.loop import TrainedDraft, engine_seed
from slipstream.train.queues import Ended, ThreadGroup
from slipstream.types import Arm, Prompt
from tests.small import draft_with
from tests.unit.sampled import accepted
from tests.unit.train.world import (
    CONFIG,
    GROUP_SIZE,
    NUM_STEPS,
    PROMPTS_PER_STEP,
    START,
    STREAM,
    Delays,
    FlightWorld,
    World,
    in_flight,
    one_step_off,
    scored,
    synchronous,
    timeless,
)

LAGS = [0, 1, 2, NUM_STEPS + 1]
NUM_GROUPS = NUM_STEPS * PROMPTS_PER_STEP
EVERY_PROMPT = Counter(prompt.id for step in range(NUM_STEPS) for prompt in STREAM.batch(step))
FAST = 0.002  # longest call: a long rollout takes forty of them


def overlaps(records: Sequence[StepRecord]) -> list[Overlap]:
    found = [record.overlap for record in records if record.overlap is not None]
    assert len(found) == len(records)
    return found


def test_without_a_lag_it_is_the_synchronous_loop_to_the_last_call_and_bit() -> None:
    expected, found = World(), World(Delays(seed=1))
    records = synchronous(expected)
    assert timeless(one_step_off(found, lag=0)) == timeless(records)
    assert found.calls == expected.calls
    assert found.generated == expected.generated
    assert found.updates == expected.updates
    assert found.scored == expected.scored
    assert found.weights == expected.weights != START


@pytest.mark.parametrize("lag", LAGS)
def test_a_batch_comes_whole_from_the_version_that_is_as_old_as_the_lag_whoever_is_fast(lag: int) -> None:
    worlds = [World(Delays(seed=seed)) for seed in (2, None, 4)]
    records, *others = (one_step_off(world, lag) for world in worlds)
    world = worlds[0]

    versions = [max(0, step - lag) for step in range(NUM_STEPS)]
    batches = [STREAM.batch(step) for step in range(NUM_STEPS)]
    assert [record.policy_version for record in records] == versions
    assert [call[-1] for call in world.generated] == versions
    assert [call[0] for call in world.generated] == [[prompt.id for prompt in batch] for batch in batches]
    assert [call[1] for call in world.calls if call[0] == "refit"] == list(range(NUM_STEPS))
    for step, (record, update) in enumerate(zip(records, world.updates, strict=True)):
        assert update.batch.policy_version == step
        prompts = [ids[:2] for ids in update.batch.token_ids[::GROUP_SIZE]]
        assert prompts == [prompt.token_ids for prompt in batches[step]]
        assert [each.lag for each in record.lags] == [min(step, lag)]
    assert [timeless(other) for other in others] == [timeless(records)] * 2
    assert len({world.weights for world in worlds}) == 1


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("stop", range(1, NUM_STEPS))
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path, lag: int, stop: int) -> None:
    whole = World()
    expected = one_step_off(whole, lag)

    def killed(record: StepRecord) -> None:
        if record.step == stop - 1:
            raise InterruptedError

    first = World(Delays(seed=5))
    with pytest.raises(InterruptedError):
        one_step_off(first, lag, directory=tmp_path, on_step=killed)
    second = World(Delays(seed=6))
    found = one_step_off(second, lag, directory=tmp_path)

    assert timeless(found) == timeless(expected)
    assert second.weights == whole.weights
    # Nothing is made twice: what the first attempt had generated ahead came with its checkpoint.
    assert [call[0] for call in first.generated + second.generated] == [call[0] for call in whole.generated]
    assert [each.num_regenerated for each in overlaps(found)] == [0] * NUM_STEPS


def test_what_was_made_after_the_last_checkpoint_is_made_again_and_counted(tmp_path: Path) -> None:
    """Killed in step 3, with its batch of step 4 done: the checkpoint after step 2 holds that of step 3."""
    lost = World()

    def killed(update: Any) -> Any:
        time.sleep(0.05)  # the batch of step 4 is submitted by then
        raise InterruptedError

    def step_done(record: StepRecord) -> None:
        if record.step == 2:
            lost.train_step = killed

    with pytest.raises(InterruptedError):
        one_step_off(lost, 1, directory=tmp_path, on_step=step_done)
    found = one_step_off(World(), 1, directory=tmp_path)

    assert timeless(found) == timeless(one_step_off(World(), 1))
    assert [each.num_regenerated for each in overlaps(found)] == [0, 0, 0, PROMPTS_PER_STEP * GROUP_SIZE, 0, 0]


@pytest.mark.parametrize("lag", LAGS)
def test_weights_that_only_the_learner_holds_reach_the_engines_before_it_trains(lag: int) -> None:
    world = World(Delays(seed=8), frees_learner=False)
    assert timeless(one_step_off(world, lag)) == timeless(one_step_off(World(), lag))
    if lag == 2:
        flown = flight(2, seed=9, frees_learner=False)
        in_flight(flown, 2)
        assert Counter(flown.trained) == EVERY_PROMPT


@pytest.mark.parametrize("bad", [1, 3])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_nothing_is_drawn_by_weights_that_the_gate_refuses_and_no_step_of_theirs_is_recorded(
    lag: int, bad: int
) -> None:
    world, records = World(Delays(seed=9)), []
    world.deliver = refusing(world.deliver, bad)
    with pytest.raises(RefitError, match="other weights"):
        one_step_off(world, lag, on_step=records.append)
    assert all(call[-1] < bad for call in world.generated)
    assert [record.step for record in records] == list(range(bad))


def test_training_goes_on_while_the_engines_take_its_weights() -> None:
    """Delivery and training take 0.3 s, generation nothing: one goes on beside the other, whatever else runs here."""
    world = World()
    world.deliver, world.train_step = slowly(world.deliver, 0.3), slowly(world.train_step, 0.3)
    records = one_step_off(world, 1)[1:]

    found = overlaps(records)
    published_s = median(each.publish_s for each in found)
    assert published_s >= 0.3 * 0.99
    assert median(each.exposed_publish_s for each in found) < 0.5 * published_s
    assert [each.exposed_publish_s for each in found] == [record.times.prepare_s for record in records]


def test_engines_that_rest_within_a_generation_or_make_rollouts_again_say_so_in_the_record() -> None:
    """Half of each generation, of 0.05 s at least, is rest; training takes nothing, so they generate all the time."""
    world = World()
    generate = slowly(world.generate, 0.05)

    def resting(prompts: Sequence[Prompt], **more: Any) -> Any:
        start_s, result = time.perf_counter(), generate(prompts, **more)
        generation_s = time.perf_counter() - start_s
        return replace(result, engine_idle_fraction=0.5, generation_s=generation_s, num_regenerated=4)

    world.generate = resting
    found = overlaps(one_step_off(world, 1))
    assert [each.num_regenerated for each in found] == [4] * NUM_STEPS
    assert 0.4 < median(each.engine_idle_fraction for each in found[1:-1]) < 0.9  # a busy machine adds to the half


def slowly(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def timed(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **more)

    return timed


def refusing(deliver: Callable[..., RefitCheck], version: int) -> Callable[..., RefitCheck]:
    """A delivery whose weights of this version the gate refuses."""

    def refused(export: Export) -> RefitCheck:
        check = deliver(export)
        if export.version == version:
            raise RefitError("other weights")
        return check

    return refused


class BoomError(Exception):
    """What goes wrong."""


def boom(*_: Any, **__: Any) -> Any:
    raise BoomError


def dying(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """A call that dies at its `number`-th time, counted from 1."""
    num_calls = 0

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            raise BoomError
        return call(*args, **more)

    return counted


_HANGS_S = 30.0


def hang(*_: Any, **__: Any) -> Any:
    time.sleep(_HANGS_S)


@pytest.mark.parametrize("failing", ["export", "deliver", "generate", "score", "train_step", "advance"])
def test_whatever_fails_ends_all_though_the_others_hang(failing: str) -> None:
    """Beside a failing training step the engines hang in their second batch; `advance` is a call in flight."""
    world = flight(1, seed=8)
    setattr(world, failing, boom)
    generate = world.generate
    if failing == "train_step":
        world.generate = lambda *args, **how: hang() if world.generated else generate(*args, **how)
    start_s = time.monotonic()
    with pytest.raises(BoomError):
        in_flight(world, 1) if failing == "advance" else one_step_off(world, 1)
    assert time.monotonic() - start_s < _HANGS_S / 2  # and does not wait for what never comes


def test_an_interrupt_ends_all_while_a_call_hangs() -> None:
    world, threads = World(), ThreadGroup()
    world.train_step = hang
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # flytekit sets one, where it was imported
    try:
        threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            one_step_off(world, 1, threads=threads)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(Ended):
        threads.update(lambda: None)


def test_a_step_says_how_much_of_generation_was_hidden_behind_training() -> None:
    """Generation takes 0.2 s at least and training 0.1 s; how long each waits beyond that is the machine's affair."""
    world = World()
    world.generate, world.train_step = slowly(world.generate, 0.2), slowly(world.train_step, 0.1)
    records = one_step_off(world, 1)

    found = overlaps(records)
    assert sum(overlap.generation_s for overlap in found) >= 0.2 * len(records) * 0.99
    assert records[0].times.generation_s >= 0.2 * 0.99  # nothing is trained before the first batch is there
    assert sum(overlap.hidden_s for overlap in found) > 0
    for record, overlap in zip(records, found, strict=True):
        assert overlap.hidden_s <= min(overlap.generation_s, record.times.step_s)
        assert 0 <= overlap.learner_idle_fraction < 1
        assert 0 <= overlap.engine_idle_fraction <= 1  # the last batch may be there before the last step
        assert record.times.train_s >= 0.1 * 0.99
        assert 0.1 <= sum(record.times.by_stage().values()) <= record.times.step_s * 1.01
        assert record.machine is not None


def seeds_of(step: int) -> list[tuple[int, ...]]:
    """Of each group of a batch, as the synchronous loop would have them."""
    seed = engine_seed(CONFIG.seed, Arm.AUTOREGRESSIVE, step)
    return [each.seeds for each in group_requests(STREAM.batch(step), group_size=GROUP_SIZE, seed=seed)]


def flight(lag: int, seed: int | None = None, **more: Any) -> FlightWorld:
    return FlightWorld(delays=Delays(seed=seed, longest_s=FAST), lag=lag, **more)


@pytest.mark.parametrize("too_old", TooOld)
@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_all_groups_are_trained_on_once_and_in_time(too_old: TooOld, lag: int, seed: int) -> None:
    """Groups come out of order, and their rollouts carry the versions that gave their tokens."""
    world = flight(lag, seed)
    records = in_flight(world, lag, too_old=too_old)

    assert world.submitted == list(range(NUM_GROUPS))
    assert world.submitted_seeds == [seeds for step in range(NUM_STEPS) for seeds in seeds_of(step)]
    assert sorted(world.completed) == list(range(NUM_GROUPS))
    assert Counter(world.trained) == EVERY_PROMPT
    assert [update.batch.policy_version for update in world.updates] == list(range(NUM_STEPS))
    lags = [each for record in records for each in record.lags]
    assert max(each.lag for each in lags) <= lag
    if lag == 2 and too_old is TooOld.FINISH:
        assert world.completed != sorted(world.completed)
        assert max(len(record.lags) for record in records) > 1
    assert sum(each.num_tokens for each in lags) == sum(world.lengths)
    # No bias to short answers: what is trained on is as long as what was generated.
    trained = [len(row) for update in world.updates for row in update.batch.rollout_logprobs]
    assert sorted(trained) == sorted(world.lengths)
    assert 40 in trained or too_old is TooOld.RESTART  # which may draw a shorter one for each that is long
    assert world.delivered == list(range(NUM_STEPS))


@pytest.mark.parametrize("loop", [one_step_off, in_flight])
def test_a_draft_that_learns_at_every_step_is_published_with_the_policy_that_it_was_trained_beside(loop: Any) -> None:
    """And the loop takes rollouts of no other pair of versions: they carry the one that they were sampled with."""
    learns = draft_with(eagle3={"aux_hidden_state_layer_ids": (1, 2, 3)}, online={"when": DraftOnline.ALWAYS})
    draft = TrainedDraft(learns, reference=None)
    world = flight(1, seed=1, draft=draft)
    records = loop(world, 1)

    assert all(update.trains_draft for update in world.updates)
    assert world.drafts == {step: step for step in range(NUM_STEPS)}
    assert draft.version == NUM_STEPS
    assert all(record.draft_update is not None for record in records)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_checkpoint_knows_the_versions_of_its_rollouts_and_no_older_ones(tmp_path: Path, lag: int) -> None:
    in_flight(flight(lag), lag, directory=tmp_path)
    *_, newest = sorted(tmp_path.glob("*.pending"))
    last = NUM_STEPS - 1
    assert newest.stem == f"step-{NUM_STEPS:06}"
    assert Pending.from_bytes(newest.read_bytes()).published == tuple((last - n, None) for n in range(lag, -1, -1))


def test_a_group_that_starts_anew_as_a_whole_is_as_young_as_the_newest_version() -> None:
    """Group 0 does not end before step 4 is due: it starts anew under version 2 and 4, not under 3 as well."""
    world = flight(2)
    advance = world.advance

    def holding(*, max_s: float) -> Portion:
        for index, flying in world.flying.items():
            is_held = index == 0 and world.delivered[-1] < 4
            flying.lengths = [len(tokens) + (2 if is_held else 1) for tokens in flying.versions]
        return advance(max_s=max_s)

    world.advance = holding
    found = overlaps(in_flight(world, 2, too_old=TooOld.RESTART))
    assert [overlap.num_restarted for overlap in found] == [0, 0, GROUP_SIZE, 0, GROUP_SIZE, 0]


def test_rollouts_that_training_waits_for_lest_they_grow_too_old_are_counted() -> None:
    """Training takes 0.2 s, by which all is there but a group of the second batch: it ends 0.5 s after step 1 began."""
    world, began_s, held = flight(1), list[float](), PROMPTS_PER_STEP + 1
    advance, export = world.advance, world.export

    def holding(*, max_s: float) -> Any:
        if held in world.flying:
            is_over = len(began_s) > 1 and time.monotonic() - began_s[1] > 0.5
            world.flying[held].lengths = [len(tokens) + 2 * (not is_over) for tokens in world.flying[held].versions]
        return advance(max_s=max_s)

    def noted(version: int, *, draft_version: int | None) -> Export:
        began_s.append(time.monotonic())
        return export(version, draft_version=draft_version)

    world.advance, world.export, world.train_step = holding, noted, slowly(world.train_step, 0.2)
    awaited = [overlap.num_awaited for overlap in overlaps(in_flight(world, 1))]
    assert awaited == [0, GROUP_SIZE, 0, 0, 0, 0]


@pytest.mark.parametrize("point", ["export", "deliver", "advance", "score", "train_step", "submit", "save_checkpoint"])
@pytest.mark.parametrize("at", [2, 4])
def test_after_a_death_no_group_is_lost_and_none_trained_twice(tmp_path: Path, point: str, at: int) -> None:
    dead = flight(2, seed=5)
    number = at * 8 if point == "advance" else min(at, 3) if point == "submit" else at
    setattr(dead, point, dying(getattr(dead, point), number))
    with pytest.raises(BoomError):
        in_flight(dead, 2, directory=tmp_path)
    resumed = flight(2, seed=6)
    records = in_flight(resumed, 2, directory=tmp_path)

    assert [record.step for record in records] == list(range(NUM_STEPS))
    assert Counter(resumed.trained) == EVERY_PROMPT
    made_again = len(dead.submitted) + len(resumed.submitted) - NUM_GROUPS
    counted = sum(overlap.num_regenerated for overlap in overlaps(records))
    # `tally` counts a group before the engine has it, so what it refused counts as lost too.
    assert 0 <= counted - made_again * GROUP_SIZE <= (PROMPTS_PER_STEP * GROUP_SIZE * 3 if point == "submit" else 0)


@pytest.mark.parametrize("loop", [one_step_off, in_flight])
def test_each_death_counts_what_it_lost_and_what_was_not_begun_again_counts_once(tmp_path: Path, loop: Any) -> None:
    """Step 0 dies in training twice, with both of its batches submitted, then in the delivery of its weights; step 2 in
    training."""
    num_submitted, records = 0, list[StepRecord]()
    for point, number in (("train_step", 1), ("train_step", 1), ("deliver", 1), ("train_step", 3), ("", 0)):
        world = flight(1)
        if point:
            setattr(world, point, slowly(dying(getattr(world, point), number), 0.1))
        with pytest.raises(BoomError) if point else nullcontext():
            records = loop(world, 1, directory=tmp_path)
        num_submitted += len(world.submitted) + PROMPTS_PER_STEP * len(world.generated)
    counted = [overlap.num_regenerated for overlap in overlaps(records)]
    assert counted[0] == 2 * 2 * PROMPTS_PER_STEP * GROUP_SIZE
    assert sum(counted) == (num_submitted - NUM_GROUPS) * GROUP_SIZE > counted[0]


@pytest.mark.parametrize("too_old", TooOld)
def test_no_token_is_drawn_by_weights_that_the_gate_refuses(too_old: TooOld) -> None:
    world, records = flight(2, seed=10), []
    advance, drawn_by = world.advance, []

    def noted(*, max_s: float) -> Any:
        drawn_by.append(world.version)
        return advance(max_s=max_s)

    world.deliver, world.advance = refusing(world.deliver, 3), noted
    with pytest.raises(RefitError, match="other weights"):
        in_flight(world, 2, too_old=too_old, on_step=records.append)
    assert max(drawn_by) == 2
    assert [record.step for record in records] == [0, 1, 2]


@dataclass
class NotingWorld(FlightWorld):
    """Its engines draft, one of them was lost before the first call, and each call says how long they worked in it."""

    longest_s: list[float] = field(default_factory=list)
    seeds: list[tuple[GroupRequest, tuple[int, ...], int]] = field(default_factory=list)
    num_drafts: int = 4
    num_lost: int = 3
    works: bool = True

    def advance(self, *, max_s: float) -> Portion:
        self.longest_s.append(max_s)
        start_s = time.perf_counter()
        time.sleep(FAST)
        portion = super().advance(max_s=max_s)
        num, self.num_lost = self.num_lost, 0
        return replace(
            portion,
            acceptance=accepted(self.num_drafts, self.num_drafts // 2) if len(self.longest_s) % 2 else None,
            started_s=start_s,
            ended_s=time.perf_counter() if self.works else start_s,
            num_regenerated=num,
            num_engine_restarts=num,
        )

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        requests = [self.flying[index].request for index in indices]
        self.seeds += [(request, seeds(request), self.version) for request in requests]
        return super().restart(indices, seeds=seeds)

    def score(self, groups: Sequence[Any]) -> RewardResult:
        return replace(super().score(groups), num_crashes=2)


def test_engines_are_asked_as_the_recipe_says_and_what_they_report_is_in_the_records() -> None:
    world = NotingWorld(lag=1)
    records = in_flight(world, 1)

    assert set(world.longest_s) == {0.05}
    assert sum(overlap.num_regenerated for overlap in overlaps(records)) == 3
    assert sum(record.num_engine_restarts for record in records) == 3
    accepted = [record.acceptance for record in records if record.acceptance is not None]
    assert {each.mean_acceptance_length for each in accepted} == {1.5}
    assert 4 < sum(each.num_drafts for each in accepted) <= 4 * (len(world.longest_s) + 1) // 2
    # Three groups a step, each scored on its own: one timeout and two crashes of each.
    assert {(record.num_reward_timeouts, record.num_reward_crashes) for record in records} == {(3, 6)}
    # On a busy machine engines wait for their turn, and the trainer for more than a moment until weights are published.
    assert median(overlap.engine_idle_fraction for overlap in overlaps(records)) < 0.85
    assert median(overlap.exposed_publish_s for overlap in overlaps(records)) < 0.1


def test_engines_that_neither_drafted_nor_worked_in_a_call_have_no_acceptance_and_were_idle() -> None:
    records = in_flight(NotingWorld(lag=1, num_drafts=0, works=False), 1)
    assert {record.acceptance for record in records} == {None}
    assert median(overlap.engine_idle_fraction for overlap in overlaps(records)) > 0.9
    assert {record.engine_idle_fraction for record in records if record.engine_idle_fraction} == {1.0}


def test_in_flight_a_step_generates_beside_its_training_too() -> None:
    learns = draft_with(eagle3={"aux_hidden_state_layer_ids": (1, 2, 3)}, online={"when": DraftOnline.ALWAYS})
    world = flight(1, seed=1, draft=TrainedDraft(learns, reference=None))
    world.advance, world.train_step = slowly(world.advance, FAST), slowly(world.train_step, 40 * FAST)
    records = in_flight(world, 1)
    told_s = [record.draft_decision.generation_s for record in records if record.draft_decision is not None]
    assert sum(told_s) == pytest.approx(sum(each.generation_s for each in overlaps(records)), rel=0.2)


def test_a_rollout_that_starts_anew_has_a_seed_of_its_own_for_each_version() -> None:
    world = NotingWorld(delays=Delays(seed=4, longest_s=FAST), lag=1)
    in_flight(world, 1, too_old=TooOld.RESTART)
    assert world.seeds
    for request, seeds, version in world.seeds:
        assert seeds == tuple(rollout_seed(seed, request.prompt.id, version) for seed in request.seeds)


def taken(there: list[int], started: dict[int, int], step: int, *, lag: int, per_step: int) -> list[int] | None:
    chosen = choose_batch([scored(index) for index in there], started, step, lag=lag, per_step=per_step)
    return None if chosen is None else [each.index for each in chosen]


@given(
    lag=st.integers(1, 4),
    per_step=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    dies_at=st.none() | st.integers(0, 7),
    restarts=st.booleans(),
)
def test_all_groups_are_taken_once_and_in_time_in_whatever_order_they_come(
    lag: int, per_step: int, num_steps: int, seed: int, dies_at: int | None, restarts: bool
) -> None:
    """Of a training that may die once: what it had begun starts anew under the version of the step that goes on."""
    chance, started, there, trained = random.Random(seed), dict[int, int](), list[int](), list[int]()
    patience = chance.random()  # of steps: whether more comes back before a batch is asked for
    for step in range(num_steps):
        if step == dies_at:
            started = {index: version if index in there else step for index, version in started.items()}
        if restarts:
            for index in overdue(started, step, lag=lag) - set(there):
                started[index] = step
        num_submitted = len(trained) + len(started)
        for index in range(num_submitted, min(step + lag + 1, num_steps) * per_step):
            started[index] = step
        while True:
            under_way = [index for index in started if index not in there]
            missing = num_missing(there, started, step, lag=lag, per_step=per_step)
            chosen = taken(there, started, step, lag=lag, per_step=per_step)
            assert missing <= len(under_way)
            assert chosen is None or not missing
            assert chosen is not None or missing or len(there) < per_step
            if chosen is not None and (not under_way or chance.random() > patience):
                break
            there.append(chance.choice(under_way))
        assert len(set(chosen)) == per_step
        assert all(step - started[index] <= lag for index in chosen)
        trained += chosen
        there = [index for index in there if index not in chosen]
        for index in chosen:
            del started[index]
    assert sorted(trained) == list(range(num_steps * per_step))


YOUNG, CROWDED = dict.fromkeys(range(4), 3), {3: 0, 4: 0, 5: 0, 6: 0, 9: 1, 10: 1}
MIXED = {3: 0, 4: 1, 5: 1, 6: 2, 7: 2}


@pytest.mark.parametrize(
    ("started", "there", "step", "lag", "missing", "chosen"),
    [
        # a step that only waits for a batch of young groups misses none that grew old
        (YOUNG, [], 3, 1, 0, None),
        (YOUNG | {4: 2}, [], 3, 1, 1, None),
        # version 0 has four left and steps 1 and 2 for them: 9 is there, but step 2 could not take three
        (CROWDED, [9, 3, 10], 1, 2, 1, None),
        (CROWDED, [9, 3, 10, 5], 1, 2, 0, [3, 5]),
        # what is due comes first, then what came first: 3 is not there, or no batch is yet
        (MIXED, [6, 4], 2, 2, 1, None),
        (MIXED, [6, 4, 3], 2, 2, 0, [3, 6]),
        (MIXED, [3], 2, 2, 0, None),
    ],
)
def test_a_step_of_two_groups_takes_those_that_later_steps_could_not_and_then_what_came_first(
    started: dict[int, int], there: list[int], step: int, lag: int, missing: int, chosen: list[int] | None
) -> None:
    assert num_missing(there, started, step, lag=lag, per_step=2) == missing
    assert taken(there, started, step, lag=lag, per_step=2) == chosen


def test_groups_that_a_later_step_could_not_take_are_overdue() -> None:
    assert overdue(MIXED, 2, lag=2) == {3}
    assert overdue(MIXED, 3, lag=2) == {3, 4, 5}


def test_more_than_a_batch_that_has_to_be_taken_is_a_mistake_of_the_steps_before() -> None:
    started = {3: 0, 4: 0, 5: 0, 6: 1}
    with pytest.raises(AssertionError, match="3 groups of version 0 or before have to be taken in step 2"):
        taken([3, 4], started, 2, lag=2, per_step=2)
    assert taken([3, 4, 5], started, 2, lag=2, per_step=3) == [3, 4, 5]


def test_delivery_that_training_waits_for_counts_as_publication_and_not_as_generation() -> None:
    """Delivery takes 0.1 s and generation 0.2, at least, one after the other, and training nothing."""
    world = World()
    world.deliver, world.generate = slowly(world.deliver, 0.1), slowly(world.generate, 0.2)
    times = [record.times for record in one_step_off(world, 1)[1:-1]]
    assert median(each.prepare_s for each in times) >= 0.1 * 0.9
    assert all(each.generation_s > 0 for each in times)
    assert all(each.prepare_s + each.generation_s <= each.step_s * 1.01 for each in times)
