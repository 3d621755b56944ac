"""Use of this machine over a step: cores, memory and clocks, by the run's own processes and by all others.

Linux counts the time of each core in /proc/stat, and of each process in a file of its own. The run's processes are this
process and its descendants, a local Ray and its workers among them. Where Ray was running before, they are its raylet
and the raylet's descendants too; where workers are forked, the process that has them forked and its descendants. On a
cluster this machine is the trainer's node, and no other node is read. Counters are read before a step and after it,
outside its time; both readings take 4 ms together where 120 processes run. A value that cannot be read is None.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from slipstream.records.steps import MachineUse
from slipstream.workers.forked_workers import forking_process

logger = logging.getLogger(__name__)

_PROC, _CPUS = Path("/proc"), Path("/sys/devices/system/cpu")
_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_IDLE, _IOWAIT, _STEAL, _NUM_STATES = 3, 4, 7, 8  # fields of a core in /proc/stat; the guests' two are in the first two
_PARENT, _CPU_TIMES, _START = 1, slice(11, 15), 19  # fields of /proc/<pid>/stat behind the name
_RAYLET = b"(raylet"
_MAX_CLOCKS = 16  # cores whose clock is read: the kernel may have to ask each of them
_KHZ = 1000.0
_GPU_IDLE = 0x1
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}  # bits of NVML's reasons that slow a GPU below what its work and its settings ask for

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """State of this machine at one time, with counters that only grow; None: not readable."""

    at_s: float
    cores: tuple[int, ...] | None  # ticks by state, over the cores that this process may run on
    own_ticks: Mapping[tuple[int, int], int] | None  # by process id and start, with those of ended children
    pressure_us: int | None
    gpus: tuple[float | None, tuple[str, ...]] = (None, ())  # SM clock and reasons to throttle at that time


def read_counters(proc: Path = _PROC, *, nvml: Any = None) -> Counters:
    """Read this machine's counters; `nvml` None takes the installed library, if it finds a GPU."""
    return Counters(
        gpus=_gpu_clocks(_nvml() if nvml is None else nvml),  # first: after a step GPUs soon idle
        at_s=time.perf_counter(),
        cores=_readable(lambda: _core_ticks((proc / "stat").read_text(), os.sched_getaffinity(0))),
        own_ticks=_readable(lambda: _own_ticks(proc)),
        pressure_us=_readable(lambda: _pressure_us((proc / "pressure" / "memory").read_text())),
    )


def use_between(before: Counters, after: Counters, *, proc: Path = _PROC, cpus: Path = _CPUS) -> MachineUse:
    """Use of this machine between two readings, with its present load and clock, and the GPUs of the second reading."""
    sm_clock_mhz, throttle_reasons = after.gpus
    other, steal = _core_fractions(before, after)
    pressure = None
    if before.pressure_us is not None and after.pressure_us is not None and after.at_s > before.at_s:
        pressure = min(1.0, (after.pressure_us - before.pressure_us) / 1e6 / (after.at_s - before.at_s))
    return MachineUse(
        load=_readable(lambda: float((proc / "loadavg").read_text().split()[0])),
        other_cpu_fraction=other,
        steal_fraction=steal,
        memory_pressure_fraction=pressure,
        cpu_mhz=_readable(lambda: _cpu_mhz(proc, cpus)),
        sm_clock_mhz=sm_clock_mhz,
        throttle_reasons=throttle_reasons,
    )


def _readable(read: Callable[[], T]) -> T | None:
    """Value, or None where this kernel or container does not show it."""
    with suppress(OSError, ValueError, LookupError):
        return read()
    return None


def _core_fractions(before: Counters, after: Counters) -> tuple[float | None, float | None]:
    """Shares of the cores' time that other processes used, and that the host gave to other machines."""
    if before.cores is None or after.cores is None:
        return None, None
    spent = [max(0, end - start) for start, end in zip(before.cores, after.cores, strict=True)]
    total = sum(spent)
    if not total:
        return None, None
    steal = spent[_STEAL] / total
    if before.own_ticks is None or after.own_ticks is None:
        return None, steal
    # The parent's counters include a child that ended, so its time is never attributed to other processes.
    own = sum(ticks - before.own_ticks.get(process, 0) for process, ticks in after.own_ticks.items())
    busy = total - spent[_IDLE] - spent[_IOWAIT] - spent[_STEAL]
    return max(0, busy - own) / total, steal


def _core_ticks(text: str, cores: Iterable[int]) -> tuple[int, ...]:
    """Ticks by state in the text of /proc/stat, summed over these cores."""
    lines = (line.split() for line in text.splitlines() if line.startswith("cpu"))
    of_core = {name: list(map(int, ticks)) for name, *ticks in lines}
    return tuple(map(sum, zip(*(of_core[f"cpu{core}"][:_NUM_STATES] for core in cores), strict=True)))


def _own_ticks(proc: Path) -> dict[tuple[int, int], int]:
    """CPU time of each process of this run."""
    stats: dict[int, tuple[bytes, bytes]] = {}  # by process: its name, and the fields behind it
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir(proc)):
        with suppress(OSError), open(f"{proc}/{entry}/stat", "rb", buffering=0) as file:  # it may have ended
            name, _, behind = file.read().rpartition(b") ")  # a name may hold anything
            stats[int(entry)] = name, behind
            children.setdefault(int(behind.split(None, 2)[_PARENT]), []).append(int(entry))
    own = _tree([os.getpid()], children)
    if (forking := forking_process()) in stats:
        own |= _tree([forking], children)
    if not any(stats[pid][0].endswith(_RAYLET) for pid in own):
        own |= _tree([pid for pid, (name, _) in stats.items() if name.endswith(_RAYLET)], children)
    fields = {pid: stats[pid][1].split() for pid in own}
    return {(pid, int(of[_START])): sum(map(int, of[_CPU_TIMES])) for pid, of in fields.items()}


def _tree(roots: Iterable[int], children: Mapping[int, list[int]]) -> set[int]:
    """These processes and all their descendants."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        found.add(pid := waiting.pop())
        waiting += children.get(pid, ())
    return found


def _pressure_us(text: str) -> int:
    """Microseconds in which some process waited, from the text of a file under /proc/pressure."""
    return int(text.partition("total=")[2].split()[0])  # of the first line, "some"


def _cpu_mhz(proc: Path, cpus: Path) -> float:
    """Mean clock of the first cores that this process may run on; without a scaling driver, of the machine's first."""
    cores = itertools.islice(sorted(os.sched_getaffinity(0)), _MAX_CLOCKS)
    with suppress(OSError):
        return fmean(int((cpus / f"cpu{core}/cpufreq/scaling_cur_freq").read_text()) / _KHZ for core in cores)
    with (proc / "cpuinfo").open() as lines:
        clocks = (float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz"))
        return fmean(itertools.islice(clocks, _MAX_CLOCKS))


@cache
def _nvml() -> Any:
    """NVIDIA's library, initialized; None without the library or a driver."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # it comes with the CUDA build of vLLM
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.info("the clocks of GPUs are not recorded: %s", error)
        return None
    return pynvml


def _gpu_clocks(nvml: Any) -> tuple[float | None, tuple[str, ...]]:
    """Mean SM clock of the GPUs that are not idle, and the driver's reasons to throttle any of them."""
    if nvml is None:
        return None, ()
    clocks: list[float] = []
    reasons = 0
    with suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            own = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            if not own & _GPU_IDLE:
                clocks.append(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
                reasons |= own
    named = tuple(name for bit, name in _THROTTLES.items() if reasons & bit)
    return (fmean(clocks) if clocks else None), named
