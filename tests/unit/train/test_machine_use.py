"""A step's use of its machine, worked by hand from files like Linux's, and from an NVML that notes what it is asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.records.steps import MachineUse
from slipstream.train.machine_use import Counters, read_counters, use_between
from slipstream.workers.forked_workers import DIRECTORY

NOTHING = MachineUse(
    load=None, other_cpu_fraction=None, steal_fraction=None, memory_pressure_fraction=None, cpu_mhz=None
)
HERE = os.getpid()
CORE = min(os.sched_getaffinity(0))


class NvmlError(Exception):
    """NVML's own."""


def fake_nvml(*gpus: tuple[int, int], has_clocks: bool = True) -> Any:
    """GPUs by their reasons and SM clocks; it notes which clocks it is asked for."""
    asked: list[tuple[int, int]] = []

    def clock(gpu: int, kind: int) -> int:
        if not has_clocks:
            raise NvmlError("not supported")
        asked.append((gpu, kind))
        return gpus[gpu][1]

    return SimpleNamespace(
        asked=asked,
        NVML_CLOCK_SM=1,
        NVMLError=NvmlError,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: gpus[gpu][0],
        nvmlDeviceGetClockInfo=clock,
    )


def process(parent: int, *ticks: int, name: str = "python", start: int = 7) -> str:
    """A line of /proc/<pid>/stat without its id: own user and system ticks, and those of children that have ended."""
    fields = ["S", parent, *"0" * 9, *(ticks + (0,) * 4)[:4], *"0" * 4, start, 0]
    return " ".join([f"({name})", *map(str, fields)])


def machine(tmp_path: Path, cores: Mapping[int, str], processes: Mapping[int, str], waited_us: int = 0) -> Path:
    """A directory like /proc; `cores` in ticks: user, nice, system, idle, iowait, irq, softirq, steal, guests."""
    proc = tmp_path / "proc"
    (proc / "pressure").mkdir(parents=True, exist_ok=True)
    lines = [f"cpu{core} {ticks}" for core, ticks in cores.items()]
    (proc / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 1 2 3", ""]))
    (proc / "loadavg").write_text("1.50 1.25 1.00 2/300 4711\n")
    (proc / "cpuinfo").write_text("processor : 0\ncpu MHz\t\t: 2000.5\nprocessor : 1\ncpu MHz\t\t: 3000.5\n")
    full = "full avg10=0.00 avg60=0.00 avg300=0.00 total=5\n"
    some = f"some avg10=9.00 avg60=9.00 avg300=9.00 total={waited_us}\n"
    (proc / "pressure" / "memory").write_text(some + full)
    for old in proc.glob("[0-9]*/stat"):
        old.unlink()
    for pid, line in processes.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        (proc / str(pid) / "stat").write_text(f"{pid} {line}")
    return proc


def counters(tmp_path: Path, *args: Any, at_s: float = 0.0, **changes: Any) -> Counters:
    return replace(read_counters(machine(tmp_path, *args, **changes)), at_s=at_s)


def use(tmp_path: Path, before: Counters, after: Counters) -> MachineUse:
    return use_between(before, after, proc=tmp_path / "proc", cpus=tmp_path / "cpus")


def test_other_processes_are_what_keeps_the_cores_busy_beside_the_processes_of_the_run(tmp_path: Path) -> None:
    """Of 200 ticks 100 pass idle or wait for disks, 10 are stolen; 90 are busy, 60 of them in the run's processes."""
    tree = {HERE: process(1, 40, 10), 60: process(HERE, 5, 5), 61: process(60, 1), 70: process(1, 3, 3)}
    before = counters(tmp_path, {CORE: "100 0 50 800 20 0 0 0 30 0"}, tree)
    tree = {HERE: process(1, 60, 20), 60: process(HERE, 10, 10), 61: process(60, 11, 10), 70: process(1, 33, 3)}
    after = counters(tmp_path, {CORE: "150 10 70 880 40 6 4 10 70 0"}, tree, waited_us=500_000, at_s=2.0)
    assert use(tmp_path, before, after) == MachineUse(
        load=1.5, other_cpu_fraction=0.15, steal_fraction=0.05, memory_pressure_fraction=0.25, cpu_mhz=2500.5
    )


def used(tmp_path: Path, before: Mapping[int, str], after: Mapping[int, str]) -> float | None:
    """The share of others where the cores were busy for 100 ticks of 200."""
    then = counters(tmp_path, {CORE: "0 0 0 0 0 0 0 0 0 0"}, before)
    now = counters(tmp_path, {CORE: "100 0 0 100 0 0 0 0 0 0"}, after, at_s=2.0)
    return use(tmp_path, then, now).other_cpu_fraction


OWN, OURS = {HERE: process(1)}, {50: process(HERE, name="raylet")}
ENDED = {HERE: process(1, 10), 60: process(HERE, 1000)}
THEIRS = {80: process(1, name="raylet"), 81: process(80, name="ray::A (x) b")}
WORKED = {**THEIRS, 81: process(80, 60, name="ray::A (x) b")}


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        # children that come and end within a step, 70 of the 100, and one that was started in it and goes on
        ({HERE: process(1, 10, 0, 5, 5)}, {HERE: process(1, 20, 0, 55, 15)}, 0.15),
        (OWN, {**OWN, 60: process(HERE, 30, 10)}, 0.3),
        # others are never blamed for one that has ended: it counts with its parent, in full, with 1,000 earlier ticks
        (ENDED, {HERE: process(1, 10, 0, 1040)}, 0.0),
        (ENDED, {HERE: process(1, 50)}, 0.3),  # one that nobody awaits is gone
        # an id that another process got counts from its start
        ({**OWN, 60: process(HERE, 90)}, {**OWN, 60: process(HERE, 40, start=8)}, 0.3),
        # workers of a Ray that was there before are the run's own, and those of another beside its own are not
        (OWN | THEIRS, OWN | WORKED, 0.2),
        (OWN | OURS | THEIRS, OWN | OURS | WORKED, 0.5),
    ],
)
def test_a_runs_own_work_is_that_of_its_processes_children_and_ray(
    tmp_path: Path, before: dict[int, str], after: dict[int, str], share: float
) -> None:
    assert used(tmp_path, before, after) == share


def test_forked_workers_are_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer and the server that forked a worker are children of the process that has workers forked."""
    (tmp_path / "pid").write_text("40")
    run = {40: process(1), HERE: process(40), 41: process(40)}
    worker, worked = {42: process(41)}, {42: process(41, 60)}
    monkeypatch.delenv(DIRECTORY, raising=False)
    assert used(tmp_path, run | worker, run | worked) == 0.5
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    assert used(tmp_path, run | worker, run | worked) == 0.2


def test_cores_that_the_run_may_not_use_are_not_counted(tmp_path: Path) -> None:
    before = counters(tmp_path, {CORE: "0 0 0 0 0 0 0 0", CORE + 1: "0 0 0 0 0 0 0 0"}, OWN)
    after = counters(tmp_path, {CORE: "10 0 0 90 0 0 0 0", CORE + 1: "999 0 0 0 0 0 0 0"}, OWN, at_s=1.0)
    assert use(tmp_path, before, after).other_cpu_fraction == 0.1


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may run on one core, as far as anybody asks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {CORE})


def test_the_driver_of_a_cores_clock_is_asked_first(tmp_path: Path) -> None:
    scaling = tmp_path / "cpus" / f"cpu{CORE}" / "cpufreq"
    scaling.mkdir(parents=True)
    (scaling / "scaling_cur_freq").write_text("1200500\n")
    nothing = counters(tmp_path, {}, {})
    assert use(tmp_path, nothing, nothing).cpu_mhz == 1200.5


def test_what_cannot_be_read_is_none_and_stops_nothing(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    nothing = read_counters(proc)
    assert use(tmp_path, nothing, nothing) == NOTHING
    broken = {"stat": "cpu0 what\n", "loadavg": "", f"{HERE}/stat": "1 (py", "pressure/memory": "total\n"}
    for name, text in broken.items():
        (proc / name).parent.mkdir(parents=True, exist_ok=True)
        (proc / name).write_text(text)
    unread = read_counters(proc)
    assert use(tmp_path, unread, unread) == NOTHING


def test_a_container_that_hides_its_processes_shows_the_steal_alone(tmp_path: Path) -> None:
    before = counters(tmp_path, {CORE: "0 0 0 0 0 0 0 0"}, {})
    found = use(tmp_path, before, counters(tmp_path, {CORE: "10 0 0 80 0 0 0 10"}, {}, at_s=1.0))
    assert (found.other_cpu_fraction, found.steal_fraction) == (None, 0.1)


def test_gpus_that_work_tell_their_clock_and_what_holds_it_down(tmp_path: Path) -> None:
    """An idle GPU's low clock says nothing; a clock that its own settings ask for (0x2) is no throttling."""
    nvml = fake_nvml((0x44, 1200), (0x1, 345), (0x2, 1800))
    found = use(tmp_path, read_counters(tmp_path), read_counters(tmp_path, nvml=nvml))
    assert (found.sm_clock_mhz, found.throttle_reasons) == (1500.0, ("power cap", "hardware thermal slowdown"))
    assert nvml.asked == [(0, nvml.NVML_CLOCK_SM), (2, nvml.NVML_CLOCK_SM)]


@pytest.mark.parametrize("nvml", [fake_nvml((0x1, 345)), fake_nvml((0x0, 1200), has_clocks=False), fake_nvml()])
def test_gpus_that_are_idle_or_refuse_to_tell_are_not_recorded(nvml: Any, tmp_path: Path) -> None:
    assert use(tmp_path, read_counters(tmp_path), read_counters(tmp_path, nvml=nvml)) == NOTHING


def test_this_machine_counts_the_work_of_a_child_as_the_runs_own() -> None:
    before = read_counters()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    time.sleep(0.02)
    after = read_counters()
    assert before.own_ticks is not None and after.own_ticks is not None
    own = [ticks - before.own_ticks.get(each, 0) for each, ticks in after.own_ticks.items()]
    assert sum(own) / os.sysconf("SC_CLK_TCK") >= 0.25
    fraction = use_between(before, after).other_cpu_fraction
    assert fraction is not None and 0.0 <= fraction <= 1.0
