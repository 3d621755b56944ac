"""Projections on the page, in columns apart from measured values."""

from dataclasses import replace

import pytest

from slipstream.report import tables
from slipstream.report.figures import measured_against_simulated
from slipstream.report.page import predicted, render_page, split_table
from slipstream.report.sentences import split_text
from slipstream.report.summary import compare_loops
from slipstream.simulator.projection import project_speedup
from slipstream.simulator.step_cost import Bound
from slipstream.types import Arm
from tests.unit.report.handmade import ASYNCHRONOUS, DEMO_TUNING, ON_CORES, RECORD, demo_arms, demo_run, page_text

COMPARED = compare_loops(ASYNCHRONOUS)
_layout, _predicted = ON_CORES.layout, predicted(ON_CORES)
assert _layout is not None and _predicted is not None
LAYOUT, PREDICTED = _layout, _predicted


def test_the_page_keeps_measured_and_projected_apart() -> None:
    record = project_speedup(demo_arms(), DEMO_TUNING, layout=demo_run().layout, execution="demo")
    assert record.run_check is not None and record.run_calibration is not None
    assert "measured, s" in measured_against_simulated(record.run_calibration)
    check = tables.check_table(record.run_check)
    assert [*check.groups] == ["measured", "projected"]
    table = tables.lengths_table(record.from_run, "")
    assert [*table.groups] == ["assumed", "projected, p10 to p90"]
    assert len(table.rows) == len(record.from_run) > 0
    assert "was calibrated on this run" in render_page(RECORD, record)


def test_what_is_predicted_stands_beside_what_was_measured_in_columns_of_its_own() -> None:
    assert [arm.synchronous_step_s for arm in PREDICTED.arms] == pytest.approx([9.0, 5.0])
    table = tables.prediction_table(PREDICTED, COMPARED)
    assert [(heading, len(columns)) for heading, columns in table.groups.items()] == [("measured", 3), ("projected", 5)]
    arm, row = PREDICTED.arms[1], table.rows[1]
    assert row.label == "speculative, asynchronous"
    assert row.cells[:4] == ("2.50", "0.50", "1.50", f"{arm.step_s:.2f}")
    assert row.cells[7] == f"{arm.step_s / 2.5 - 1:+.0%}"
    assert "as the simulator predicts them" in page_text(ON_CORES)
    assert "under Asynchronous." in page_text(ON_CORES)


def test_two_cores_have_one_split_and_the_page_says_what_is_expected_to_bind_it() -> None:
    bound, other = (replace(PREDICTED.arms[0], arm=arm, bound=bound) for arm, bound in zip(Arm, Bound, strict=False))
    assert split_text(replace(PREDICTED, arms=(bound, other))) == (
        "Two cores have one split, one core for generation and one for training. On it the simulator expects the "
        f"autoregressive step to be bound by its {bound.bound.value} and the speculative step to be bound by its "
        f"{other.bound.value}."
    )
    assert split_text(PREDICTED) in page_text(ON_CORES)
    assert "Two cores have one split" not in page_text(ASYNCHRONOUS)


def test_nothing_is_predicted_without_a_lag_or_on_other_hardware_than_cores() -> None:
    assert predicted(ASYNCHRONOUS) is None
    assert predicted(replace(ASYNCHRONOUS, layout=replace(LAYOUT, hardware="gb200"))) is None
    arms = tuple(replace(arm, max_off_policy_steps=0) for arm in ASYNCHRONOUS.asynchronous)
    in_turn = replace(ON_CORES, asynchronous=arms)
    assert predicted(in_turn) is None
    assert "as the simulator predicts them" not in page_text(in_turn)


def test_on_gpus_every_split_in_whole_engines_is_projected_and_the_fastest_is_marked() -> None:
    layout = replace(LAYOUT, model="qwen3-8b", hardware="gb200", num_gpus=4)
    on_gpus = replace(ASYNCHRONOUS, layout=replace(layout, precision="bfloat16", learner_precision="bfloat16"))
    table = split_table(on_gpus)
    assert table is not None
    assert [row.label for row in table.rows] == ["1 + 3", "2 + 2", "3 + 1"]
    assert [*table.groups] == ["autoregressive, projected", "speculative, projected"]
    for column in (2, 5):
        assert sum(row.cells[column].endswith(", fastest") for row in table.rows) == 1
    assert "3 + 1" in page_text(on_gpus)
    assert split_table(ON_CORES) is None
    alone = replace(on_gpus, layout=replace(layout, num_gpus=1))
    assert split_table(alone) is None
