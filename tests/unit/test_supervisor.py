"""A command gets three seconds to end after an interrupt; then, or when it ends, nothing that came from it is left."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# A command whose own child left its session and its parent, as Ray's processes do, and ignores SIGTERM.
COMMAND = """
import os, signal, subprocess, sys, time
pids = open(sys.argv[1], "w")
orphan = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
command = f"[sys.executable, '-c', {orphan!r}], start_new_session=True, stdout=subprocess.DEVNULL"
middle = f"import subprocess, sys; print(subprocess.Popen({command}).pid)"
pid = subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True).stdout.strip()
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] == "deaf_once":
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
print(pid, os.getpid(), file=pids, flush=True)
if sys.argv[2] != "done":
    time.sleep(60)
sys.exit(3)
"""
SUPERVISOR = """
import os, sys
from pathlib import Path
from slipstream.supervisor import supervise
outcome = supervise([sys.executable, "-c", *sys.argv[1:]], cwd=Path.cwd(), environment=os.environ)
print(outcome.status, outcome.interrupted)
"""
SUPERVISOR_OF_A_CALL = """
import os, sys
from slipstream.supervisor import supervise_call
outcome = supervise_call(lambda: os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]]))
print(outcome.status, outcome.interrupted)
"""
EITHER = pytest.mark.parametrize("code", [SUPERVISOR, SUPERVISOR_OF_A_CALL], ids=["command", "call"])


def start(tmp_path: Path, mode: str, code: str = SUPERVISOR) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A supervisor, and the processes below it once they run: the orphan and the command."""
    pids = tmp_path / "pids"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, COMMAND, str(pids), mode], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (pids.is_file() and pids.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return supervisor, [psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]


def ended_s(supervisor: subprocess.Popen[str], processes: list[psutil.Process], says: str) -> float:
    """When the supervisor ended, which says so and leaves no process."""
    out, _ = supervisor.communicate(timeout=30)
    found_s = time.monotonic()
    assert out == says
    assert [process.pid for process in processes if process.is_running()] == []
    return found_s


def took(tmp_path: Path, mode: str, *signals: signal.Signals, code: str = SUPERVISOR) -> float:
    """Seconds in which a supervisor ends that gets these signals, 0.3 s apart."""
    supervisor, processes = start(tmp_path, mode, code)
    assert len(processes) == 2
    interrupted_s = time.monotonic()
    for number in signals:
        time.sleep(0.3 * (number is not signals[0]))
        supervisor.send_signal(number)
    return ended_s(supervisor, processes, f"{128 + signals[0]} True\n") - interrupted_s


@pytest.mark.parametrize(("mode", "number"), [("willing", signal.SIGINT), ("stubborn", signal.SIGTERM)])
def test_after_an_interrupt_nothing_is_left_within_five_seconds(
    tmp_path: Path, mode: str, number: signal.Signals
) -> None:
    assert took(tmp_path, mode, number) < 5.0


@EITHER
def test_a_second_signal_ends_the_grace_at_once(tmp_path: Path, code: str) -> None:
    assert took(tmp_path, "stubborn", signal.SIGINT, signal.SIGTERM, code=code) < 2.5  # of a grace of three seconds


def test_a_command_is_asked_again_for_its_first_handlers_exception_may_get_lost(tmp_path: Path) -> None:
    assert 0.5 < took(tmp_path, "deaf_once", signal.SIGINT) < 2.5


@EITHER
def test_a_command_that_ends_by_itself_leaves_no_orphan(tmp_path: Path, code: str) -> None:
    ended_s(*start(tmp_path, "done", code), "3 False\n")


@EITHER
def test_a_command_ends_when_its_supervisor_is_killed(tmp_path: Path, code: str) -> None:
    supervisor, (orphan, command) = start(tmp_path, "willing", code)
    try:
        supervisor.kill()
        supervisor.communicate(timeout=30)
        command.wait(timeout=5)
    finally:
        orphan.kill()  # deaf to SIGTERM: Ray's own processes die with their driver
