"""The page's part on asynchronous arms, worked by hand from the small record.

Synchronous steps take 8, 8, 6.5, 10 and 8 s, and with speculation 5, of which 2 s are no generation: 0.1 data, 0.2
prepare, 0.5 logprob, 1.2 train. Asynchronous ones wait 2.0 s for rollouts, with speculation 0.5 s: they take 4 and
2.5 s.
"""

import re
from dataclasses import replace

import pytest

from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord
from slipstream.report.page import render_page
from slipstream.report.results import description, result_metrics, terminal_table
from slipstream.report.sentences import bound_text
from slipstream.report.summary import compare_loops, pooled_lags
from slipstream.report.tables import lag_table, loop_learning_table, loop_table
from slipstream.types import Arm
from tests.unit.report.handmade import ASYNCHRONOUS, ONE_ARM, RECORD, asynchronous_arm, page_text

COMPARED = compare_loops(ASYNCHRONOUS)


def with_waits(autoregressive_s: float) -> RunRecord:
    """The autoregressive arm alone, whose training waits so long."""
    arm = asynchronous_arm(Arm.AUTOREGRESSIVE, exposed_s=autoregressive_s, hidden_s=1.5)
    return replace(ASYNCHRONOUS, asynchronous=(arm,))


def test_an_arm_in_turn_and_one_whose_training_never_waits_are_compared_as_well() -> None:
    assert [arm.name for arm in COMPARED.asynchronous] == ["autoregressive_asynchronous", "speculative_asynchronous"]
    ratios = [[ratio and ratio.value for ratio in (arm.over_baseline, arm.over_synchronous)] for arm in COMPARED.arms]
    base_s = 33280**0.2  # of 8, 8, 6.5, 10 and 8 s
    expected = [[None, None], [base_s / 5, None], [base_s / 4, base_s / 4], [base_s / 2.5, 5 / 2.5]]
    assert ratios == [[value and pytest.approx(value) for value in each] for each in expected]
    assert COMPARED.speculation is not None and COMPARED.speculation.value == pytest.approx(4 / 2.5)
    hidden = compare_loops(with_waits(0.0)).asynchronous[0]
    assert (hidden.step_s, hidden.exposed_s, hidden.hidden_s) == pytest.approx((2.0, 0.0, 1.5))


def test_parts_of_a_step_are_means_and_add_up_to_it() -> None:
    base, _, overlapped, both = COMPARED.arms
    assert (base.step_s, base.exposed_s, base.hidden_s) == pytest.approx((8.1, 6.1, 0.0))
    assert (overlapped.step_s, overlapped.exposed_s, overlapped.hidden_s) == pytest.approx((4.0, 2.0, 1.5))
    for arm in COMPARED.arms:
        assert sum(arm.stages_s.values()) == pytest.approx(arm.step_s)
    # In turn: of 40.5 s the engines work 30.5 and the learner 5 x 1.7.
    assert (base.engine_idle_fraction, base.learner_idle_fraction) == pytest.approx((10 / 40.5, 1 - 8.5 / 40.5))
    assert (both.engine_idle_fraction, both.learner_idle_fraction) == pytest.approx((0.5 / 2.5, 0.8 / 2.5))
    assert base.exposed_joining_fraction is base.hidden_joining_fraction is None
    assert both.exposed_joining_fraction == pytest.approx(0.08 / 2.5)
    assert both.hidden_joining_fraction == pytest.approx(0.12 / 2.5)


def test_tokens_are_counted_by_their_lag_over_all_steps_and_weigh_the_ratios() -> None:
    _, _, overlapped, _ = COMPARED.arms
    young, old = overlapped.lags
    # The first step's 100 tokens lag by nothing, of the other five's 20 each.
    assert (young.lag, young.num_tokens, old.lag, old.num_tokens) == (0, 200, 1, 400)
    assert overlapped.mean_lag == pytest.approx(2 / 3)
    assert (old.ratio_mean, old.ratio_max, old.clipped_fraction) == pytest.approx((1.1, 7.0, 0.25))
    assert old.effective_sample_size == pytest.approx(0.8)
    assert young.ratio_max == 1.5
    assert [(lag.lag, lag.num_tokens) for lag in pooled_lags(RECORD.arms[0].steps)] == [(0, 600)]
    few, many = (
        replace(step, lags=(replace(step.lags[1], num_tokens=tokens, ratio_mean=mean),))
        for step, tokens, mean in zip(ASYNCHRONOUS.asynchronous[0].steps[1:3], (10, 30), (1.0, 2.0), strict=True)
    )
    (pooled,) = pooled_lags([few, many])
    assert (pooled.num_tokens, pooled.ratio_mean) == (40, 1.75)


_QUICKER = tuple(replace(step, times=replace(step.times, train_s=0.4)) for step in ASYNCHRONOUS.asynchronous[1].steps)
_MEASURED = (
    "Speculation: faster (1.60x, 95 % interval 1.60 to 1.60). Unpaired: the arms ran one after the other. "
    "No control: training overlaps generation."
)
_GENERATION = (
    "Generation bounds the asynchronous step: without speculation training waits for rollouts 2.00 s of a step of "
    "4.00 s (50 %). Speculation shortens that wait"
)


@pytest.mark.parametrize(
    ("arms", "text"),
    [
        (ASYNCHRONOUS.asynchronous, f"{_GENERATION} to 0.50 s: at most about 2.00x can be had of it. {_MEASURED}"),
        (
            (ASYNCHRONOUS.asynchronous[0], replace(ASYNCHRONOUS.asynchronous[1], steps=_QUICKER)),
            f"{_GENERATION} to 0.50 s: at most about 2.00x can be had of it. {_MEASURED} Training "
            "itself takes 0.40 s beside it instead of 1.20 s, which is no part of that bound: where engines and "
            "learner share a host's cores, engines that are done sooner leave theirs to it.",
        ),
        (
            tuple(replace(arm, num_speculative_tokens=0) for arm in ASYNCHRONOUS.asynchronous),
            f"{_GENERATION}: at most about 2.00x can be had of it; nothing was drafted here, so the ratio of both "
            "arms, 1.60x [1.60, 1.60], shows the machine's noise.",
        ),
        (
            with_waits(0.05).asynchronous,
            "The learner bounds the asynchronous step: without speculation training waits for rollouts 0.050 s of a "
            "step of 2.05 s (2.4 %). Speculation shortens generation that is hidden behind training already, so it "
            "gains nothing here but that wait: at most about 1.03x can be had of it.",
        ),
    ],
)
def test_the_text_says_what_bounds_the_step_and_the_gain(arms: tuple[ArmRecord, ...], text: str) -> None:
    assert bound_text(compare_loops(replace(ASYNCHRONOUS, asynchronous=arms))) == text
    assert bound_text(compare_loops(with_waits(0.2))).startswith("Generation bounds")  # from a twentieth of the step on


def test_a_run_without_both_loops_compares_none_and_one_without_its_overlap_is_an_error() -> None:
    assert compare_loops(RECORD).arms == ()
    assert compare_loops(replace(ASYNCHRONOUS, arms=ONE_ARM.arms)).arms == ()
    alone = with_waits(2.0)
    assert compare_loops(alone).speculation is None
    assert "speedup" in terminal_table(alone)
    assert 'id="asynchronous"' not in page_text(RECORD)
    arm: ArmRecord = ASYNCHRONOUS.asynchronous[0]
    bare = replace(arm, steps=tuple(replace(step, overlap=None) for step in arm.steps))
    with pytest.raises(ValueError, match="step 0 of an asynchronous arm must say what overlapped"):
        compare_loops(replace(ASYNCHRONOUS, asynchronous=(bare,)))


def test_the_tables_hold_the_four_arms() -> None:
    rows = {row.label: row.cells for row in loop_table(COMPARED).rows}
    assert rows["autoregressive"] == ("8.00", "7.10 to 9.20", "", "", "6.10", "", "25 %", "79 %", "", "")
    assert rows["autoregressive, asynchronous"] == (
        *("4.00", "4.00 to 4.00", "2.01x [1.64, 2.45]", "2.01x [1.64, 2.45]"),
        *("2.00", "1.50", "12 %", "57 %", "2.0 %", "3.0 %"),
    )
    lags = {row.label: row.cells for row in lag_table(COMPARED).rows}
    assert list(lags) == ["autoregressive, 0", "autoregressive, 1", "speculative, 0", "speculative, 1"]
    assert lags["speculative, 1"] == ("400", "67 %", "1.100", "7.00", "25 %", "80 %")
    learned = {row.label: row.cells for row in loop_learning_table(COMPARED).rows}
    assert learned["speculative"] == ("0.100", "0.500", "+0.400", "", "", "", "")
    assert learned["speculative, asynchronous"] == ("0.100", "0.400", "+0.300", "0.75", "2", "1", "0")


def test_the_page_has_the_section_and_needs_nothing_from_elsewhere() -> None:
    page = render_page(ASYNCHRONOUS)
    sections = re.findall(r'<section id="([a-z-]+)">', page)
    assert sections[:4] == ["step-time", "speedup", "asynchronous", "acceptance"]
    assert bound_text(COMPARED) in page
    assert "rollouts lag by at most\n1 version of the policy." in page
    assert page.count("<svg") == 9
    assert "step speedup over the baseline, speculative, asynchronous" in page
    assert "workflows/asynchronous_rl.py asynchronous_rl --recipe tiny" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_executions_metrics_keep_the_loops_apart() -> None:
    plain = result_metrics(RECORD, hours=1.0, gpu_hours=0.0)
    metrics = result_metrics(ASYNCHRONOUS, hours=1.0, gpu_hours=0.0)
    assert {name: metrics[name] for name in plain} == plain
    more = {name.removeprefix("result/"): value for name, value in metrics.items() if name not in plain}
    assert more["asynchronous_step_speedup_autoregressive"] == pytest.approx(33280**0.2 / 4)
    assert more["asynchronous_step_speedup_autoregressive_high"] == pytest.approx(2.44707, abs=1e-4)
    assert more["asynchronous_speculation_step_speedup"] == pytest.approx(1.6)
    assert more["exposed_generation_s_speculative_asynchronous"] == pytest.approx(0.5)
    assert more["mean_lag_speculative_asynchronous"] == pytest.approx(2 / 3)
    assert more["reward_autoregressive_asynchronous"] == 0.4
    assert more["validation_speculative_asynchronous"] == 0.29
    row = "| step speedup over the baseline, speculative, asynchronous | 3.21x | 2.63 to 3.92 |"
    assert row in description(ASYNCHRONOUS)
