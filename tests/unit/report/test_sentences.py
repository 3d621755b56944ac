"""Figures of machines are worked by hand; the first step of each arm says what would move every one of them."""

from dataclasses import replace

import pytest

from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord, MachineUse
from slipstream.report.page import report_json
from slipstream.report.results import terminal_table
from slipstream.report.sentences import findings, machine_json, pooled_use, warmup_text
from tests.unit.report.handmade import ASYNCHRONOUS, BARE, ONE_STEP, RECORD, page_text

QUIET = MachineUse(load=1.0, other_cpu_fraction=0.0, steal_fraction=0.0, memory_pressure_fraction=0.0, cpu_mhz=2000.0)
_READ = ("load", "other_cpu_fraction", "steal_fraction", "memory_pressure_fraction", "cpu_mhz")
UNKNOWN = MachineUse(**dict.fromkeys(_READ))
WARMUP = replace(QUIET, other_cpu_fraction=1.0, cpu_mhz=100.0, throttle_reasons=("power brake",))


def on(arm: ArmRecord, *uses: MachineUse | None) -> ArmRecord:
    """The arm with these machines at its steps after the first; the last one lasts."""
    rest = [uses[min(index, len(uses) - 1)] for index in range(len(arm.steps) - 1)]
    machines = zip(arm.steps, (WARMUP, *rest), strict=True)
    return replace(arm, steps=tuple(replace(step, machine=use) for step, use in machines))


def ran(base: MachineUse, spec: MachineUse = QUIET) -> RunRecord:
    return replace(RECORD, arms=(on(RECORD.arms[0], base), on(RECORD.arms[1], spec)))


def test_an_arms_machine_is_the_mean_over_its_timed_steps_by_their_times() -> None:
    """Steps of 8, 8 and then 24.5 s: (8 * 0.54 + 24.5 * 0.27) / 40.5 is 0.27; the second step could read no clock."""
    arm = on(
        RECORD.arms[0],
        replace(QUIET, other_cpu_fraction=0.54, throttle_reasons=("power cap",)),
        replace(QUIET, cpu_mhz=None),
        replace(QUIET, other_cpu_fraction=0.27, cpu_mhz=3900.0, throttle_reasons=("power cap", "power brake")),
    )
    use = pooled_use(arm)
    assert use is not None
    assert (use.other_cpu_fraction, use.cpu_mhz) == pytest.approx((0.27, (8 * 2000.0 + 24.5 * 3900.0) / 32.5))
    assert (use.load, use.sm_clock_mhz, use.throttle_reasons) == (1.0, None, ("power cap", "power brake"))
    assert pooled_use(RECORD.arms[0]) is None
    assert machine_json(RECORD) == {"arms": {}, "findings": []}


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ({"other_cpu_fraction": 0.34}, "other processes used 34 % of the cores"),
        ({"other_cpu_fraction": 0.101}, "other processes used 10 % of the cores"),
        ({"steal_fraction": 0.0501}, "the host gave 5.0 % of the cores' time to other machines"),
        ({"memory_pressure_fraction": 0.0501}, "processes waited for memory in 5.0 % of the time"),
        ({"throttle_reasons": ("power cap", "power brake")}, "the driver slowed GPUs down (power cap, power brake)"),
    ],
)
def test_what_may_have_moved_an_arms_times_is_said_of_that_arm(use: dict[str, object], said: str) -> None:
    assert findings(ran(replace(QUIET, **use))) == [f"While autoregressive ran, {said}"]
    assert findings(ran(QUIET, replace(QUIET, **use))) == [f"While speculative ran, {said}"]


def test_clocks_that_differ_between_arms_by_more_than_a_tenth_are_said_and_quiet_or_unread_machines_are_not() -> None:
    assert findings(ran(replace(QUIET, cpu_mhz=2201.0))) == [
        "The cores ran at 2201 MHz in autoregressive and at 2000 MHz in speculative"
    ]
    fast, slow = (replace(QUIET, sm_clock_mhz=mhz) for mhz in (1980.0, 1200.0))
    assert findings(ran(slow, fast)) == ["The GPUs ran at 1980 MHz in speculative and at 1200 MHz in autoregressive"]
    little = replace(
        QUIET, other_cpu_fraction=0.099, steal_fraction=0.049, memory_pressure_fraction=0.049, cpu_mhz=2200.0
    )
    assert findings(ran(little)) == []
    assert findings(ran(UNKNOWN)) == []


def test_findings_stand_on_the_page_in_the_terminal_and_in_the_json_with_the_asynchronous_arms_name() -> None:
    record = ran(replace(QUIET, other_cpu_fraction=0.34))
    said = "While autoregressive ran, other processes used 34 % of the cores"
    assert said in page_text(record)
    assert said in terminal_table(record).splitlines()
    machine = report_json(record)["machine"]
    assert machine["findings"] == [said]
    assert machine["arms"]["autoregressive"]["other_cpu_fraction"] == pytest.approx(0.34)
    assert machine["arms"]["speculative"]["throttle_reasons"] == ()
    loud = on(ASYNCHRONOUS.asynchronous[0], replace(QUIET, other_cpu_fraction=0.5))
    record = replace(ASYNCHRONOUS, asynchronous=(loud, ASYNCHRONOUS.asynchronous[1]))
    assert findings(record) == ["While autoregressive, asynchronous ran, other processes used 50 % of the cores"]
    assert list(machine_json(record)["arms"]) == ["autoregressive_asynchronous"]


def test_the_page_and_the_json_say_how_many_first_steps_are_left_out() -> None:
    two = replace(RECORD, arms=tuple(replace(arm, num_warmup_steps=2) for arm in RECORD.arms))
    assert "The first 2 steps of each arm are left out of medians and intervals: warm-up." in page_text(two)
    assert "The first step of each arm is left out of medians and intervals: warm-up." in page_text(RECORD)
    assert warmup_text(ONE_STEP) == "One step ran: its times include the warm-up."
    assert warmup_text(BARE) == ""
    assert [report_json(each)["num_warmup_steps"] for each in (two, RECORD, ONE_STEP, BARE)] == [2, 1, 0, 0]
