"""The loop whose engines never stop, over engines that give one token a call and complete groups in any order."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.config import DraftConfig, DraftOnline
from slipstream.engine.protocol import Portion
from slipstream.engine.requests import GroupRequest, group_requests, rollout_seed
from slipstream.grpo.loop_config import TooOld
from slipstream.records.steps import AcceptanceStats, RefitCheck, StepRecord
from slipstream.refit.config import RefitError
from slipstream.refit.gate import Export
from slipstream.rewards.verifier import RewardResult
from slipstream.train.loop import TrainedDraft, engine_seed
from slipstream.train.pending import Pending
from slipstream.types import Arm, RolloutGroup
from tests.unit.train.world import (
    CONFIG,
    GROUP_SIZE,
    NUM_STEPS,
    PROMPTS_PER_STEP,
    STREAM,
    Delays,
    FlightWorld,
    in_flight,
)

NUM_GROUPS = NUM_STEPS * PROMPTS_PER_STEP
EVERY_PROMPT = Counter(prompt.id for step in range(NUM_STEPS) for prompt in STREAM.batch(step))
FAST = 0.002  # longest call: a long rollout takes forty of them


def seeds_of(step: int) -> list[tuple[int, ...]]:
    """Of each group of a batch, as the synchronous loop would have them."""
    seed = engine_seed(CONFIG.seed, Arm.AUTOREGRESSIVE, step)
    return [each.seeds for each in group_requests(STREAM.batch(step), group_size=GROUP_SIZE, seed=seed)]


def world(lag: int, seed: int) -> FlightWorld:
    return FlightWorld(delays=Delays(seed=seed, longest_s=FAST), lag=lag)


@pytest.mark.parametrize("too_old", TooOld)
@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_group_is_trained_on_once_and_no_token_is_older_than_the_lag(
    too_old: TooOld, lag: int, seed: int
) -> None:
    flight = world(lag, seed)
    records = in_flight(flight, lag, too_old=too_old)

    assert flight.submitted == list(range(NUM_GROUPS))
    assert flight.submitted_seeds == [seeds for step in range(NUM_STEPS) for seeds in seeds_of(step)]
    assert sorted(flight.completed) == list(range(NUM_GROUPS))
    assert Counter(flight.trained) == EVERY_PROMPT
    assert [update.batch.policy_version for update in flight.updates] == list(range(NUM_STEPS))
    assert max(each.lag for record in records for each in record.lags) <= lag
    # No bias to short answers: what is trained on is as long as what was generated.
    trained = [len(row) for update in flight.updates for row in update.batch.rollout_logprobs]
    assert sorted(trained) == sorted(flight.lengths)
    assert 40 in trained or too_old is TooOld.RESTART  # which may draw a shorter one for each that is long


@pytest.mark.parametrize("lag", [2, 3])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_groups_that_overtake_many_others_leave_no_more_of_these_than_later_steps_can_take(lag: int, seed: int) -> None:
    flight, lengths, seen = world(lag, seed), random.Random(seed), set[int]()
    advance = flight.advance

    def uneven(*, max_s: float) -> Portion:
        for index in flight.flying.keys() - seen:
            flight.flying[index].lengths = [lengths.choice([1, 2, 30])] * GROUP_SIZE
        seen.update(flight.flying)
        return advance(max_s=max_s)

    flight.advance = uneven
    records = in_flight(flight, lag)
    assert Counter(flight.trained) == EVERY_PROMPT
    assert max(each.lag for record in records for each in record.lags) <= lag


def test_a_draft_that_learns_at_every_step_is_published_with_the_policy_that_it_was_trained_beside() -> None:
    """And the loop takes rollouts of no other pair of versions: they carry the one that they were drawn with."""
    draft = TrainedDraft(DraftConfig(aux_hidden_state_layer_ids=(1, 2, 3), online=DraftOnline.ALWAYS), reference=None)
    world = FlightWorld(delays=Delays(seed=1, longest_s=FAST), lag=1, draft=draft)
    records = in_flight(world, 1)

    assert all(update.trains_draft for update in world.updates)
    assert world.drafts == {step: step for step in range(NUM_STEPS)}
    assert draft.version == NUM_STEPS
    assert all(record.draft_update is not None for record in records)


def test_groups_come_out_of_order_and_rollouts_carry_the_versions_that_gave_their_tokens() -> None:
    flight = world(2, seed=3)
    records = in_flight(flight, 2)

    assert flight.completed != sorted(flight.completed)
    assert max(len(record.lags) for record in records) > 1
    assert sum(each.num_tokens for record in records for each in record.lags) == sum(flight.lengths)


def test_what_grows_too_old_starts_anew_where_the_recipe_says_so_and_is_counted() -> None:
    finished, restarted = world(1, seed=4), world(1, seed=4)
    overlaps = [record.overlap for record in in_flight(finished, 1)]
    records = in_flight(restarted, 1, too_old=TooOld.RESTART)

    assert finished.num_restarts == 0 < restarted.num_restarts
    assert [overlap.num_restarted for overlap in overlaps if overlap] == [0] * NUM_STEPS
    assert sum(record.overlap.num_restarted for record in records if record.overlap) == restarted.num_restarts


@pytest.mark.parametrize("lag", [1, 2])
def test_a_checkpoint_knows_the_versions_that_its_rollouts_may_be_of_and_no_older_ones(
    tmp_path: Path, lag: int
) -> None:
    in_flight(FlightWorld(delays=Delays(), lag=lag), lag, directory=tmp_path)
    *_, newest = sorted(tmp_path.glob("*.pending"))
    last = NUM_STEPS - 1
    assert newest.stem == f"step-{NUM_STEPS:06}"
    assert Pending.from_bytes(newest.read_bytes()).published == tuple((last - n, None) for n in range(lag, -1, -1))


def test_a_group_that_starts_anew_as_a_whole_is_as_young_as_the_newest_version() -> None:
    """Group 0 does not end before step 4 is due: it starts anew under version 2 and 4, not under 3 as well."""
    flight, published = world(2, seed=4), list[int]()
    flight.delays = Delays()
    advance, deliver = flight.advance, flight.deliver

    def holding(*, max_s: float) -> Portion:
        for index, flying in flight.flying.items():
            is_held = index == 0 and published[-1] < 4
            flying.lengths = [len(tokens) + (2 if is_held else 1) for tokens in flying.versions]
        return advance(max_s=max_s)

    def noted(export: Export) -> RefitCheck:
        published.append(export.version)
        return deliver(export)

    flight.advance, flight.deliver = holding, noted
    overlaps = [record.overlap for record in in_flight(flight, 2, too_old=TooOld.RESTART) if record.overlap]
    assert [overlap.num_restarted for overlap in overlaps] == [0, 0, GROUP_SIZE, 0, GROUP_SIZE, 0]


def test_rollouts_that_training_waits_for_lest_they_grow_too_old_are_counted() -> None:
    """Training takes 0.2 s, by which all is there but a group of the second batch: it ends 0.5 s after step 1 began."""
    flight, began_s = world(1, seed=4), list[float]()
    flight.delays, held = Delays(), PROMPTS_PER_STEP + 1
    advance, export, train_step = flight.advance, flight.export, flight.train_step

    def holding(*, max_s: float) -> Any:
        if held in flight.flying:
            is_over = len(began_s) > 1 and time.monotonic() - began_s[1] > 0.5
            flight.flying[held].lengths = [len(tokens) + 2 * (not is_over) for tokens in flight.flying[held].versions]
        return advance(max_s=max_s)

    def noted(version: int, *, draft_version: int | None) -> Export:
        began_s.append(time.monotonic())
        return export(version, draft_version=draft_version)

    def slow(update: Any) -> Any:
        time.sleep(0.2)
        return train_step(update)

    flight.advance, flight.export, flight.train_step = holding, noted, slow
    records = in_flight(flight, 1)
    awaited = [record.overlap.num_awaited for record in records if record.overlap]
    assert awaited == [0, GROUP_SIZE, 0, 0, 0, 0]


@pytest.mark.parametrize("point", ["export", "deliver", "advance", "score", "train_step", "submit", "save_checkpoint"])
@pytest.mark.parametrize("at", [2, 4])
def test_after_a_death_at_any_point_no_group_is_lost_and_none_trained_twice(
    tmp_path: Path, point: str, at: int
) -> None:
    dying = world(2, seed=5)
    original, num_calls = getattr(dying, point), 0

    def die(*args: Any, **more: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == (at * 8 if point == "advance" else min(at, 3) if point == "submit" else at):
            raise InterruptedError
        return original(*args, **more)

    setattr(dying, point, die)
    with pytest.raises(InterruptedError):
        in_flight(dying, 2, directory=tmp_path)
    resumed = world(2, seed=6)
    records = in_flight(resumed, 2, directory=tmp_path)

    assert [record.step for record in records] == list(range(NUM_STEPS))
    assert Counter(resumed.trained) == EVERY_PROMPT
    made_again = len(dying.submitted) + len(resumed.submitted) - NUM_GROUPS
    counted = sum(record.overlap.num_regenerated for record in records if record.overlap)
    # `tally` counts a group before the engine has it, so what it refused counts as lost too.
    assert 0 <= counted - made_again * GROUP_SIZE <= (PROMPTS_PER_STEP * GROUP_SIZE * 3 if point == "submit" else 0)


def test_the_trainer_waits_for_a_moment_at_most_until_its_weights_are_published() -> None:
    flight, asked = world(1, seed=7), []
    deliver = flight.deliver

    def noted(export: Export) -> Any:
        asked.append(export.version)
        return deliver(export)

    flight.deliver = noted
    records = in_flight(flight, 1)
    assert asked == list(range(NUM_STEPS))
    waited_s = statistics.median(record.overlap.exposed_publish_s for record in records if record.overlap)
    assert waited_s < 0.1  # of most: on a busy machine a thread may wait longer for its turn


def test_weights_that_only_the_learner_holds_reach_the_engines_before_it_trains() -> None:
    flight = FlightWorld(delays=Delays(seed=9, longest_s=FAST), lag=2, frees_learner=False)
    in_flight(flight, 2)
    assert Counter(flight.trained) == EVERY_PROMPT


@pytest.mark.parametrize("too_old", TooOld)
def test_no_token_is_drawn_by_weights_that_the_gate_refuses(too_old: TooOld) -> None:
    flight, records = world(2, seed=10), []
    deliver, advance, drawn_by = flight.deliver, flight.advance, []

    def refused(export: Export) -> Any:
        check = deliver(export)
        if export.version == 3:
            raise RefitError("other weights")
        return check

    def noted(*, max_s: float) -> Any:
        drawn_by.append(flight.version)
        return advance(max_s=max_s)

    flight.deliver, flight.advance = refused, noted
    with pytest.raises(RefitError, match="other weights"):
        in_flight(flight, 2, too_old=too_old, on_step=records.append)
    assert max(drawn_by) == 2
    assert [record.step for record in records] == [0, 1, 2]


def test_a_failing_engine_ends_all() -> None:
    flight = world(1, seed=8)

    def boom(**_: Any) -> Any:
        raise ZeroDivisionError

    flight.advance = boom
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        in_flight(flight, 1)
    assert time.monotonic() - start < 15.0  # and does not wait for what never comes


def test_buffer_scoring_and_handing_over_take_less_than_three_milliseconds_of_a_processor_a_group() -> None:
    """The engines of the test included: of a step of 1.1 s with six groups, as in the tiny recipe, 1.6 %."""
    in_flight(FlightWorld(lag=1), 1)  # imports
    start_s = time.process_time()
    records: list[StepRecord] = in_flight(FlightWorld(lag=1), 1)
    elapsed_s = time.process_time() - start_s
    assert len(records) == NUM_STEPS
    assert elapsed_s / NUM_GROUPS < 0.003


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
        ended_s = time.perf_counter() if self.works else start_s
        num = self.num_drafts
        accepted = AcceptanceStats(
            num_drafts=num,
            num_draft_tokens=num,
            num_accepted_tokens=num // 2,
            accepted_by_position=(num // 2,),
            mean_acceptance_length=1.5 if num else 1.0,
            acceptance_rate=0.5 if num else 0.0,
            rate_by_position=(0.5 if num else 0.0,),
        )
        acceptance = accepted if len(self.longest_s) % 2 else None
        num, self.num_lost = self.num_lost, 0
        return replace(portion, acceptance=acceptance, started_s=start_s, ended_s=ended_s, num_regenerated=num)

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        self.seeds += [
            (self.flying[index].request, seeds(self.flying[index].request), self.version) for index in indices
        ]
        return super().restart(indices, seeds=seeds)

    def score(self, groups: Sequence[RolloutGroup]) -> RewardResult:
        return replace(super().score(groups), num_crashes=2)


def test_engines_are_asked_as_the_recipe_says_and_what_they_report_is_in_the_records() -> None:
    flight = NotingWorld(lag=1)
    records = in_flight(flight, 1)

    assert set(flight.longest_s) == {0.05}
    assert sum(record.overlap.num_regenerated for record in records if record.overlap) == 3
    accepted = [record.acceptance for record in records if record.acceptance is not None]
    assert {each.mean_acceptance_length for each in accepted} == {1.5}
    assert 4 < sum(each.num_drafts for each in accepted) <= 4 * (len(flight.longest_s) + 1) // 2
    # Three groups a step, each scored on its own: one timeout and two crashes of each.
    assert {(record.num_reward_timeouts, record.num_reward_crashes) for record in records} == {(3, 6)}


def test_engines_that_did_not_draft_have_no_acceptance() -> None:
    assert {record.acceptance for record in in_flight(NotingWorld(lag=1, num_drafts=0), 1)} == {None}


@pytest.mark.parametrize("works", [True, False])
def test_what_engines_did_not_work_of_a_call_counts_as_idle(works: bool) -> None:
    records = in_flight(NotingWorld(lag=1, works=works), 1)
    idle = statistics.median(record.overlap.engine_idle_fraction for record in records if record.overlap)
    assert idle < 0.85 if works else idle > 0.9  # on a busy machine they wait for their turn


def test_a_rollout_that_starts_anew_has_a_seed_of_its_own_for_each_version() -> None:
    flight = NotingWorld(delays=Delays(seed=4, longest_s=FAST), lag=1)
    in_flight(flight, 1, too_old=TooOld.RESTART)

    assert flight.seeds
    for request, seeds, version in flight.seeds:
        assert seeds == tuple(rollout_seed(seed, request.prompt.id, version) for seed in request.seeds)
