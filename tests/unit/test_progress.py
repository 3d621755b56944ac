"""Rate, time left and how often they are told, by a clock that the test turns; log lines leave a status line whole."""

from __future__ import annotations

import io
import logging

import pytest

from slipstream import logs
from slipstream.logs import StatusHandler
from slipstream.progress import Pace, Progress, duration, progress


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    pace = Pace()
    pace.add(0.0, 0)
    assert pace.per_s() is None
    pace.add(20.0, 1)  # the first step pays for the start
    assert pace.per_s() == 1 / 20
    for second in range(21, 61):
        pace.add(float(second), 1 + 2 * (second - 20))
    assert pace.per_s() == 2.0  # from 30 s to 60 s: the slow start is forgotten


def test_a_step_longer_than_the_window_still_has_a_rate() -> None:
    pace = Pace()
    for number, second in enumerate((0.0, 100.0, 200.0)):
        pace.add(second, number)
    assert pace.per_s() == 0.01


def test_a_log_gets_the_first_step_at_once_then_one_line_in_ten_seconds_and_the_last(clock: Clock) -> None:
    lines: list[str] = []
    bar = Progress("train", total=100, unit="step", log=lines.append, now_s=clock)
    for step in range(100):
        clock.s += 0.5
        bar.advance(text=f"loss {step}")
    assert [line.split(",")[0] for line in lines] == [f"train: step {done}/100" for done in (1, 21, 41, 61, 81, 100)]
    assert lines[1] == "train: step 21/100, 2 steps/s, 0:40 left, loss 20"
    assert lines[-1] == "train: step 100/100, 2 steps/s, loss 99"


def test_a_terminal_is_redrawn_at_most_five_times_a_second_and_at_the_end(clock: Clock) -> None:
    shown: list[str] = []
    lines: list[str] = []
    bar = Progress("train", total=100, unit="step", show=shown.append, log=lines.append, now_s=clock)
    for _ in range(100):
        clock.s += 0.0625
        bar.advance()
    bar.close()
    assert lines == []
    assert shown[0] == "train [........................] step 0/100"
    assert shown[1] == "train [........................] step 1/100"
    assert shown[2] == "train [#.......................] step 5/100, 16 steps/s, 0:06 left"
    assert shown[-2:] == ["train [########################] step 100/100, 16 steps/s", ""]
    assert len(shown) == 1 + 25 + 1 + 1  # at the start, every fourth step, the last one, and the line set free


def test_resumed_work_counts_from_where_it_goes_on_and_its_rate_from_now(clock: Clock) -> None:
    bar = Progress("train", total=12, unit="step", done=8, now_s=clock)
    clock.s += 100.0  # the first step starts processes: no rate yet
    bar.advance()
    assert bar.line("") == "train: step 9/12"
    clock.s += 4.0
    bar.advance()
    assert bar.line("") == "train: step 10/12, 4 s/step, 0:08 left"
    assert bar.left() == "0:08 left"


def test_durations_read_as_a_clock() -> None:
    assert [duration(seconds) for seconds in (7, 750, 11_100)] == ["0:07", "12:30", "3:05:00"]


def test_a_log_line_stands_above_the_status_line_and_does_not_mix_with_it() -> None:
    terminal = Terminal()
    handler = StatusHandler(terminal)
    handler.show("train 1/2")
    handler.emit(logging.makeLogRecord({"msg": "saved"}))
    handler.show("")
    erase = "\r\x1b[2K"
    assert terminal.getvalue() == f"{erase}train 1/2{erase}saved\n{erase}train 1/2{erase}"


def test_without_a_status_line_a_log_holds_no_control_characters() -> None:
    stream = io.StringIO()
    StatusHandler(stream).emit(logging.makeLogRecord({"msg": "saved"}))
    assert stream.getvalue() == "saved\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_and_lines_are_logged_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(logging.getLogger("slipstream"), "handlers", [StatusHandler(stream)])
    logging.getLogger("slipstream").setLevel(logging.INFO)
    assert (logs.status_handler() is not None) == is_terminal
    with progress("train", total=2, unit="step") as bar:
        bar.advance()
    assert ("[............" in stream.getvalue()) == is_terminal
    assert stream.getvalue().startswith("train: step 1/2") == (not is_terminal)
