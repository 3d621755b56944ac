"""The learner's stages, and generation that overlaps them, worked by hand and beside a loop that is played."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.simulator import Array
from slipstream.simulator.rollout import Lengths, RolloutShape, Slots, Trace, longest_of, slowest_engine, stratified
from slipstream.simulator.settings import load_setting
from slipstream.simulator.step_cost import Bound, Learner, overlap, relative_efficiency
from slipstream.types import LoopMode, StageTimes
from tests.unit.simulator.played_loop import step_starts

MEASURED = StageTimes.in_sequence(data_s=1.0, prepare_s=2.0, generation_s=50.0, logprob_s=4.0, train_s=16.0)

MEAN = 5000.0


def test_a_learner_takes_as_long_as_measured_where_it_was_and_twice_as_long_on_half_the_gpus() -> None:
    setting = load_setting("paper-8b")
    learner = Learner(measured=MEASURED, setting=setting, mean_tokens=MEAN)
    half = learner.stages(setting, num_gpus=setting.num_gpus // 2, mean_tokens=MEAN)
    assert (half.data_s, half.prepare_s, half.generation_s) == (1.0, 2.0, 0.0)
    assert (round(half.logprob_s, 9), round(half.train_s, 9)) == (8.0, 32.0)
    learner = Learner(measured=replace(MEASURED, logprob_s=0.0), setting=setting, mean_tokens=MEAN)
    assert learner.stages(setting, num_gpus=setting.num_gpus, mean_tokens=MEAN).logprob_s == 0.0
    assert relative_efficiency(replace(setting, num_gpus=8), setting) == (1.0, 0.0)
    learner = Learner(measured=MEASURED, setting=setting, mean_tokens=MEAN)
    same = learner.stages(setting, num_gpus=32, mean_tokens=MEAN, deviation=2.0)
    assert same.train_s == pytest.approx(MEASURED.train_s)


def test_experts_leave_three_tenths_of_the_efficiency_and_other_hardware_its_own() -> None:
    dense, sparse = load_setting("paper-8b"), load_setting("paper-235b")
    assert relative_efficiency(sparse, dense) == (pytest.approx(0.3), pytest.approx(0.5))
    assert relative_efficiency(dense, sparse) == (pytest.approx(1 / 0.3), pytest.approx(0.5))
    h100 = replace(dense, hardware="h100")
    assert relative_efficiency(h100, dense) == (pytest.approx(0.38 / 0.32), pytest.approx((0.2**2 + 0.2**2) ** 0.5))
    # One standard deviation more efficient takes that much less time.
    learner = Learner(measured=MEASURED, setting=dense, mean_tokens=MEAN)
    middle, above = (learner.stages(sparse, num_gpus=512, mean_tokens=MEAN, deviation=each) for each in (0.0, 1.0))
    assert middle.train_s / above.train_s == pytest.approx(2.718281828**0.5)
    assert middle.data_s == above.data_s == MEASURED.data_s


def test_a_packed_batch_of_half_the_tokens_takes_half_the_time_and_a_padded_one_all_of_it() -> None:
    packed = replace(load_setting("paper-8b"), packed=True)
    learner = Learner(measured=MEASURED, setting=packed, mean_tokens=4200.0)
    half = learner.stages(packed, num_gpus=32, mean_tokens=2000.0)  # 2200 of 4400
    assert half.train_s == pytest.approx(8.0)
    padded = replace(packed, packed=False)
    learner = Learner(measured=MEASURED, setting=padded, mean_tokens=4200.0)
    assert learner.stages(padded, num_gpus=32, mean_tokens=2000.0).train_s == pytest.approx(16.0)


TRAINER = StageTimes.in_sequence(data_s=1.0, prepare_s=2.0, generation_s=0.0, logprob_s=3.0, train_s=4.0)
SHAPE = RolloutShape(num_rollouts=8, num_engines=2, prompt_tokens=10.0)


def batch_times_ten(trace: Trace) -> np.ndarray:
    """A token takes 1 s and a tenth for each running sequence."""
    return trace.tokens_S * (1.0 + 0.1 * trace.batch_S)


def test_a_lag_of_0_waits_for_the_whole_batch() -> None:
    lengths = Lengths(median=50.0, log_sd=0.8, max_tokens=300.0)
    found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=0, seconds=batch_times_ten)
    synchronous_s = float(batch_times_ten(slowest_engine(lengths, SHAPE)).sum())
    assert found.step.generation_s == synchronous_s
    assert found.step.step_s == pytest.approx(10.0 + synchronous_s)


@given(st.integers(1, 4), st.floats(0.1, 1.5), st.floats(0.0, 500.0), st.sampled_from(Slots))
def test_a_longer_lag_is_never_slower(lag: int, log_sd: float, train_s: float, slots: Slots) -> None:
    lengths = Lengths(median=50.0, log_sd=log_sd, max_tokens=300.0)
    shape = replace(SHAPE, slots=slots, group_size=4)
    trainer = replace(TRAINER, data_s=0.0, prepare_s=0.0, logprob_s=0.0, train_s=train_s)
    nearer, farther = (
        overlap(trainer, lengths=lengths, shape=shape, lag=each, seconds=batch_times_ten) for each in (lag - 1, lag)
    )
    assert farther.step.step_s <= nearer.step.step_s * (1 + 1e-3)
    # The longest response must end in time, even on an engine that runs it alone at 1.1 s a token.
    window_s = (1 + lag) * farther.step.step_s - train_s
    assert window_s >= 1.1 * longest_of(lengths, SHAPE.num_rollouts) - 1e-9


def test_responses_are_bound_by_the_lag_and_by_memory_for_two_of_them() -> None:
    # Four an engine of 100 tokens, lag 1, no trainer: 8 run, a token takes 1.8 s, 180 s over two steps.
    lengths = Lengths(median=100.0, log_sd=0.0, max_tokens=100.0)
    found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=1, seconds=batch_times_ten)
    assert found.period_s == pytest.approx(90.0)
    # Beside a trainer of 8 s: 400 (1 + r / 10) / r = (100 (1 + r / 10) + 8) / 2 at r = 7.653, where it takes 92.27 s.
    assert found.step.generation_s == pytest.approx(92.27 - 8.0, abs=0.02)
    assert found.step.step_s == pytest.approx(92.27 + 2.0, abs=0.02)  # nothing hides the refit
    assert found.bound is Bound.LAG
    # Mean context of equal responses: 10 of the prompt and 50. Two run: 400 tokens at 1.2 s, two at a time.
    shape = replace(SHAPE, cache_tokens=120.0)
    found = overlap(TRAINER, lengths=lengths, shape=shape, lag=1, seconds=batch_times_ten)
    assert found.bound is Bound.MEMORY
    assert found.period_s == pytest.approx(240.0)


def test_a_drained_batch_ahead_is_hidden_behind_the_trainer_but_not_the_refit() -> None:
    # Four of 100 tokens at 1.4 s: 140 s, beside 8 s of trainer and 2 s of refit.
    lengths = Lengths(median=100.0, log_sd=0.0, max_tokens=100.0)
    mode = LoopMode.ONE_STEP_OFF
    for lag in (1, 3):
        found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=lag, seconds=batch_times_ten, mode=mode)
        assert (found.step.step_s, found.step.generation_s) == (pytest.approx(142.0), pytest.approx(132.0))
        assert found.bound is Bound.DRAINED
    slow = replace(TRAINER, train_s=200.0)
    hidden = overlap(slow, lengths=lengths, shape=SHAPE, lag=1, seconds=batch_times_ten, mode=mode)
    assert (hidden.step.generation_s, hidden.bound) == (0.0, Bound.LEARNER)
    assert hidden.step.step_s == slow.other_s


NUM_STEPS = 30
_CYCLE = 12  # steps: with a lag of n the loop repeats itself every n + 1 steps, a long one after n short ones


def batch_times_twentieth(trace: Trace) -> Array:
    """A token takes 1 s and a twentieth for each running sequence."""
    return trace.tokens_S * (1.0 + 0.05 * trace.batch_S)


def drawn(lengths: Lengths, shape: RolloutShape, num_batches: int) -> list[Array]:
    """Typical responses of one engine in groups, in another order each step."""
    random = np.random.default_rng(0)
    tokens_B = stratified(lengths, shape.per_engine, longest_of_count=shape.num_rollouts)
    return [random.permutation(tokens_B).reshape(-1, shape.group_size) for _ in range(num_batches)]


def period_s(starts: Array) -> float:
    """Mean of the last steps, of whole cycles."""
    return float((starts[-1] - starts[-1 - _CYCLE]) / _CYCLE)


@pytest.mark.parametrize(
    ("lag", "slots", "bound"),
    [
        *((lag, Slots.RESPONSE, Bound.LAG) for lag in (1, 2, 3)),
        *((1, Slots.GROUP, Bound.GROUPS), (2, Slots.GROUP, Bound.LAG)),
    ],
)
@pytest.mark.parametrize("busy_s", [0.0, 50.0, 150.0])
def test_the_closed_form_is_at_most_a_tenth_faster_than_the_loop_played_through(
    lag: int, slots: Slots, bound: Bound, busy_s: float
) -> None:
    # Batches that start together end together: the loop bunches its steps, which the closed form does not know.
    lengths = Lengths(median=60.0, log_sd=0.8, max_tokens=300.0)
    shape = RolloutShape(num_rollouts=64, num_engines=1, prompt_tokens=0.0, group_size=8, slots=slots)
    trainer = StageTimes.in_sequence(data_s=0.0, prepare_s=0.0, generation_s=0.0, logprob_s=0.0, train_s=busy_s)
    closed = overlap(trainer, lengths=lengths, shape=shape, lag=lag, seconds=batch_times_twentieth)
    batches = drawn(lengths, shape, NUM_STEPS)
    played_s = period_s(step_starts(batches, batch_times_twentieth, lag=lag, busy_s=busy_s, slots=slots))
    assert closed.bound is bound
    assert 0.89 * played_s <= closed.step.step_s <= 1.02 * played_s
