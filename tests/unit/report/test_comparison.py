"""Answers and tables of `compare`, from metrics, parameters and tags of executions."""

from dataclasses import replace

import pytest

from slipstream.report.comparison import answer, cells, comparison_table, differences, render_comparison
from slipstream.report.results import result_metrics, verdict_tags
from slipstream.tracking.mlflow_store import Execution
from slipstream.types import Arm
from tests.unit.report.handmade import ASYNCHRONOUS, RECORD, alone

DONE = Execution(
    name="tiny-1",
    status="FINISHED",
    start_ms=1_700_000_000_000,  # 2023-11-14 22:13:20 UTC
    metrics={
        **result_metrics(RECORD, hours=1.25, gpu_hours=40.0),
        "result/reward_difference": 0.01,
        "result/reward_difference_low": -0.02,
        "result/reward_difference_high": 0.04,
    },
    params={"grpo.seed": "0", "draft.method": "eagle3"},
    tags={"git.commit": "abc", "flyte.execution_url": "https://flyte/console/x", **verdict_tags(RECORD)},
)
_OTHER = {"params": {**DONE.params, "grpo.seed": "1"}, "tags": {"git.commit": "abc"}}
RUNNING = replace(DONE, name="tiny-2", status="RUNNING", metrics={}, **_OTHER)


def test_a_row_holds_speedups_rewards_and_cost() -> None:
    speedups = ["2.00x [1.53, 2.61]", "1.60x [1.32, 1.96]", "1.00x [1.00, 1.00]", "-", "-"]
    rewards = ["0.500", "0.500", "+0.010 [-0.020, +0.040]", "0.300", "0.310"]
    assert cells(DONE) == [
        *("tiny-1", "2023-11-14 22:13", "finished", "2"),
        *(*speedups, *rewards, "2.20", "yes", "1.25", "40.0"),
    ]


def test_an_execution_with_both_loops_shows_what_the_asynchronous_one_did_and_one_arm_alone_has_no_speedup() -> None:
    both = replace(DONE, metrics=result_metrics(ASYNCHRONOUS, hours=1.0, gpu_hours=0.0))
    assert cells(both)[5:9:3] == ["1.60x [1.32, 1.96]", "2.00x [2.00, 2.00]"]
    assert cells(both)[6:8] == ["1.00x [1.00, 1.00]", "2.01x [1.64, 2.45]"]
    one = replace(DONE, metrics=result_metrics(alone(RECORD, Arm.SPECULATIVE), hours=1.0, gpu_hours=0.0))
    assert cells(one)[3:10] == ["2", "-", "-", "-", "-", "-", "-"]
    assert cells(replace(DONE, metrics={**DONE.metrics, "result/lossless": 0.0}))[15] == "NO"


@pytest.mark.parametrize("status", ["RUNNING", "FAILED"])
def test_an_execution_without_a_report_has_no_verdict(status: str) -> None:
    assert answer(replace(RUNNING, status=status)) == f"{status.lower()}, no verdict logged."
    assert cells(RUNNING)[4:] == ["-"] * 14


def test_what_is_not_the_same_is_listed_and_of_many_executions_by_name_in_the_terminal() -> None:
    found = differences([DONE, replace(RUNNING, tags={})])
    assert list(found.items()) == [("grpo.seed", ["0", "1"]), ("git.commit", ["abc", "-"])]
    assert differences([DONE]) == {}
    many = [replace(DONE, name=f"tiny-{seed}", params={**DONE.params, "grpo.seed": str(seed)}) for seed in range(7)]
    assert "\n\nnot the same in all: grpo.seed\n\n" in comparison_table(many)
    page = render_comparison(many, uri="sqlite:///x")
    assert "<tr><th>grpo.seed</th><td>0</td><td>1</td><td>2</td><td>3</td><td>4</td><td>5</td><td>6</td></tr>" in page


def test_table_and_page_hold_rows_differences_and_answers_and_no_link_that_is_no_web_address() -> None:
    text = comparison_table([DONE, RUNNING])
    assert text.splitlines()[2].startswith("tiny-1     2023-11-14 22:13  finished  2")
    assert "\ngrpo.seed     0       1" in text
    page = render_comparison([DONE, RUNNING], uri="sqlite:///x")
    assert f"<b>tiny-1</b>: {answer(DONE)}" in page
    assert "<td>2.00x [1.53, 2.61]</td>" in page
    assert '<a href="https://flyte/console/x">tiny-1</a>' in page
    assert "<tr><th>grpo.seed</th><td>0</td><td>1</td></tr>" in page
    hostile = replace(DONE, name="<b>", tags={"flyte.execution_url": "javascript:alert(1)"})
    page = render_comparison([hostile], uri="sqlite:///x")
    assert "javascript:" not in page
    assert "&lt;b&gt;" in page
