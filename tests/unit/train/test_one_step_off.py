"""The loop that runs a fixed number of batches behind, in a world where every difference shows in the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from slipstream.drafts.config import DraftConfig, DraftOnline
from slipstream.records.steps import RefitCheck, StepRecord
from slipstream.refit.config import RefitError
from slipstream.refit.gate import Export
from slipstream.train.loop import TrainedDraft
from slipstream.train.queues import ThreadGroup
from slipstream.types import Prompt
from tests.unit.train.world import (
    GROUP_SIZE,
    NUM_STEPS,
    PROMPTS_PER_STEP,
    START,
    STREAM,
    Delays,
    World,
    one_step_off,
    synchronous,
    timeless,
)

LAGS = [0, 1, 2, NUM_STEPS + 1]


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
def test_a_batch_comes_whole_from_the_version_that_is_as_old_as_the_lag(lag: int) -> None:
    world = World(Delays(seed=2))
    records = one_step_off(world, lag)

    assert [record.policy_version for record in records] == [max(0, step - lag) for step in range(NUM_STEPS)]
    assert [call[-1] for call in world.generated] == [max(0, step - lag) for step in range(NUM_STEPS)]
    assert [call[0] for call in world.generated] == [[p.id for p in STREAM.batch(step)] for step in range(NUM_STEPS)]
    assert [call[1] for call in world.calls if call[0] == "refit"] == list(range(NUM_STEPS))
    for step, (record, update) in enumerate(zip(records, world.updates, strict=True)):
        assert update.batch.policy_version == step
        assert [ids[:2] for ids in update.batch.token_ids[::GROUP_SIZE]] == [
            prompt.token_ids for prompt in STREAM.batch(step)
        ]
        assert [each.lag for each in record.lags] == [min(step, lag)]


def test_a_draft_that_learns_at_every_step_is_published_with_the_policy_that_it_was_trained_beside() -> None:
    """And the loop takes rollouts of no other pair of versions: they carry the one that they were drawn with."""
    draft = TrainedDraft(DraftConfig(aux_hidden_state_layer_ids=(1, 2, 3), online=DraftOnline.ALWAYS), reference=None)
    world = World(Delays(seed=2), draft=draft)
    records = one_step_off(world, lag=1)

    assert all(update.trains_draft for update in world.updates)
    assert world.drafts == {step: step for step in range(NUM_STEPS)}
    assert draft.version == NUM_STEPS
    assert all(record.draft_update is not None for record in records)


@pytest.mark.parametrize("lag", LAGS)
def test_nothing_depends_on_who_is_fast(lag: int) -> None:
    worlds = [World(Delays(seed=seed)) for seed in (None, 3, 4)]
    records = [timeless(one_step_off(world, lag)) for world in worlds]

    assert records[0] == records[1] == records[2]
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
    assert [regenerated(record) for record in found] == [0] * NUM_STEPS


def test_what_was_made_after_the_last_checkpoint_is_made_again_and_counted(tmp_path: Path) -> None:
    """Killed in step 3, with its batch of step 4 done: the checkpoint after step 2 holds that of step 3."""
    directory, lost = tmp_path, World()

    def killed(update: Any) -> Any:
        time.sleep(0.05)  # the batch of step 4 is submitted by then
        raise InterruptedError

    def step_done(record: StepRecord) -> None:
        if record.step == 2:
            lost.train_step = killed

    with pytest.raises(InterruptedError):
        one_step_off(lost, 1, directory=directory, on_step=step_done)
    found = one_step_off(World(), 1, directory=directory)

    assert timeless(found) == timeless(one_step_off(World(), 1))
    assert [regenerated(record) for record in found] == [0, 0, 0, PROMPTS_PER_STEP * GROUP_SIZE, 0, 0]


def test_between_checkpoints_nobody_waits_for_what_a_checkpoint_would_hold(tmp_path: Path) -> None:
    """Killed after step 3, the checkpoint after step 2 is the last: batches of steps 3 and 4 are made, 4 twice."""

    def killed(record: StepRecord) -> None:
        if record.step == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        one_step_off(World(Delays(seed=7)), 1, directory=tmp_path, on_step=killed, every=3)
    found = one_step_off(World(), 1, directory=tmp_path, every=3)

    assert timeless(found) == timeless(one_step_off(World(), 1))
    assert [regenerated(record) for record in found] == [0, 0, 0, PROMPTS_PER_STEP * GROUP_SIZE, 0, 0]


@pytest.mark.parametrize("lag", LAGS)
def test_weights_that_only_the_learner_holds_reach_the_engines_before_it_trains(lag: int) -> None:
    world = World(Delays(seed=8), frees_learner=False)

    assert timeless(one_step_off(world, lag)) == timeless(one_step_off(World(), lag))


@pytest.mark.parametrize("bad", [1, 3])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_nothing_is_drawn_by_weights_that_the_gate_refuses_and_no_step_of_theirs_is_recorded(
    lag: int, bad: int
) -> None:
    world, records = World(Delays(seed=9)), []
    deliver = world.deliver

    def refused(export: Export) -> RefitCheck:
        check = deliver(export)
        if export.version == bad:
            raise RefitError("other weights")
        return check

    world.deliver = refused
    with pytest.raises(RefitError, match="other weights"):
        one_step_off(world, lag, on_step=records.append)
    assert all(call[-1] < bad for call in world.generated)
    assert [record.step for record in records] == list(range(bad))


def test_training_goes_on_while_the_engines_take_its_weights() -> None:
    """Delivery and training take 0.3 s, generation nothing: one goes on beside the other, whatever else runs here."""
    world = World()
    deliver, train_step = world.deliver, world.train_step
    world.deliver, world.train_step = slowly(deliver, 0.3), slowly(train_step, 0.3)
    records = one_step_off(world, 1)

    overlaps = [record.overlap for record in records[1:] if record.overlap is not None]
    published_s = median(each.publish_s for each in overlaps)
    assert published_s >= 0.3 * 0.99
    assert median(each.exposed_publish_s for each in overlaps) < 0.5 * published_s
    assert [each.exposed_publish_s for each in overlaps] == [record.times.prepare_s for record in records[1:]]


def test_delivery_that_training_waits_for_counts_as_publication_and_not_as_generation() -> None:
    """Delivery takes 0.1 s and generation 0.2, at least, one after the other, and training nothing."""
    world = World()
    world.deliver, world.generate = slowly(world.deliver, 0.1), slowly(world.generate, 0.2)
    records = one_step_off(world, 1)

    times = [record.times for record in records[1:-1]]
    prepare_s, generation_s = (median(s) for s in zip(*((t.prepare_s, t.generation_s) for t in times), strict=True))
    assert prepare_s >= 0.1 * 0.9
    assert generation_s >= 0.2 * 0.9
    assert prepare_s < generation_s
    assert all(each.prepare_s + each.generation_s <= each.step_s * 1.01 for each in times)


def test_engines_that_rest_within_a_generation_or_make_rollouts_again_say_so_in_the_record() -> None:
    """Of each generation, which takes 0.05 s, half is rest; training takes nothing, so they generate all the time."""
    world = World()
    generate = slowly(world.generate, 0.05)

    def resting(prompts: Sequence[Prompt], **more: Any) -> Any:
        return replace(generate(prompts, **more), engine_idle_fraction=0.5, generation_s=0.05, num_regenerated=4)

    world.generate = resting
    records = one_step_off(world, 1)

    assert [regenerated(record) for record in records] == [4] * NUM_STEPS
    idle = median(record.overlap.engine_idle_fraction for record in records[1:-1] if record.overlap)
    assert 0.4 < idle < 0.9  # a busy machine adds to the half


def slowly(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def timed(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **more)

    return timed


def regenerated(record: StepRecord) -> int:
    assert record.overlap is not None
    return record.overlap.num_regenerated


class BoomError(Exception):
    """What goes wrong."""


def boom(*_: Any, **__: Any) -> Any:
    raise BoomError


_HANGS_S = 30.0


def hang(*_: Any, **__: Any) -> Any:
    time.sleep(_HANGS_S)


@pytest.mark.parametrize("failing", ["export", "deliver", "generate", "score", "train_step"])
@pytest.mark.parametrize("others", ["go on", "hang"])
def test_whatever_fails_ends_all_though_the_others_hang(failing: str, others: str) -> None:
    world = World()
    setattr(world, failing, boom)
    if others == "hang":  # whoever does not have to be done for the failing one to be called
        hanging = {"train_step": ["generate"]}.get(failing)
        original = world.generate

        def generate(prompts: Any, **more: Any) -> Any:
            return original(prompts, **more) if len(world.generated) < 1 else hang()

        if hanging:
            world.generate = generate
    start = time.monotonic()
    with pytest.raises(BoomError):
        one_step_off(world, 1)
    assert time.monotonic() - start < _HANGS_S / 2


def test_an_interrupt_ends_all_while_a_call_hangs() -> None:
    import signal

    world = World()
    world.train_step = hang
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # flytekit sets one, where it was imported
    try:
        threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            one_step_off(world, 1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_settling_waits_for_calls_that_were_under_way_at_the_end() -> None:
    world, threads, done = World(), ThreadGroup(), []
    original: Callable[..., Any] = world.generate

    def slow(prompts: Sequence[Prompt], **more: Any) -> Any:
        if world.generated:
            time.sleep(1.0)
            done.append(True)
        return original(prompts, **more)

    world.generate = slow
    world.train_step = boom
    with pytest.raises(BoomError):
        one_step_off(world, 1, threads=threads)
    assert not done
    threads.join()
    assert done


def test_a_step_says_how_much_of_generation_was_hidden_behind_training() -> None:
    """Generation takes 0.2 s at least and training 0.1 s; how long each waits beyond that is the machine's affair."""
    world = World()
    world.generate, world.train_step = slowly(world.generate, 0.2), slowly(world.train_step, 0.1)
    records = one_step_off(world, 1)

    overlaps = [record.overlap for record in records if record.overlap is not None]
    assert len(overlaps) == len(records)
    assert sum(overlap.generation_s for overlap in overlaps) >= 0.2 * len(records) * 0.99
    assert records[0].times.generation_s >= 0.2 * 0.99  # nothing is trained before the first batch is there
    assert sum(overlap.hidden_s for overlap in overlaps) > 0
    for record, overlap in zip(records, overlaps, strict=True):
        assert overlap.hidden_s <= overlap.generation_s
        assert overlap.hidden_s <= record.times.step_s
        assert 0 <= overlap.learner_idle_fraction < 1
        assert 0 <= overlap.engine_idle_fraction < 1
        stages_s = sum(record.times.by_stage().values())
        assert record.times.train_s >= 0.1 * 0.99
        assert 0.1 <= stages_s <= record.times.step_s * 1.01
