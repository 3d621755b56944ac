"""Progress of long work: a bar on a terminal with log lines above it, or lines in a log, by a test's clock."""

import io
import logging
import os
import re

import pytest
from tqdm import tqdm

from slipstream import logs
from slipstream.logs import BarHandler, Progress, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Stream of the log, which is a terminal unless a test changes that."""
    stream = getattr(request, "param", Terminal)()
    monkeypatch.setattr(logging.getLogger("slipstream"), "handlers", [BarHandler(stream)])
    monkeypatch.setattr(logging.getLogger("slipstream"), "propagate", False)
    logging.getLogger("slipstream").setLevel(logging.INFO)
    return stream


def test_a_log_gets_the_first_step_at_once_then_one_line_in_ten_seconds_and_the_last() -> None:
    lines: list[str] = []
    now = [100.0]
    with tqdm(total=100, file=io.StringIO(), bar_format="{n_fmt}/{total_fmt}{postfix}") as bar:
        shown = Progress(bar, lines.append, now_s=lambda: now[0])
        for step in range(100):
            now[0] += 0.5
            shown.advance(text=f"loss {step}")
    assert [line.split(",")[0] for line in lines] == [f"{done}/100" for done in (1, 21, 41, 61, 81, 100)]
    assert lines[1] == "21/100, loss 20"


@pytest.mark.parametrize("stream", [io.StringIO], indirect=True)
def test_a_log_holds_rate_and_time_left_and_no_control_characters(stream: io.StringIO) -> None:
    with progress("train", total=12, unit="step", done=8) as bar:
        bar.advance(text="loss 0.5")
    rate = r"([0-9.]+step/s|[0-9.]+s/step)"
    assert re.fullmatch(rf"train: step 9/12, {rate}, 00:00 left, loss 0.5\n", stream.getvalue())


@pytest.mark.parametrize("stream", [io.StringIO], indirect=True)
def test_a_log_of_whoever_writes_lines_of_its_own_stays_empty(stream: io.StringIO) -> None:
    with progress("train", total=2, unit="step", in_log=False) as bar:
        assert bar.left() == ""  # nothing has a rate yet
        bar.advance()
        assert bar.left() == "00:00 left"
        bar.advance(5)  # more than the total counts as all of it
        assert bar.left() == ""
    assert stream.getvalue() == ""


def test_a_terminal_has_a_bar_below_the_log_lines_and_is_left_clean(stream: io.StringIO) -> None:
    with progress("train", total=2, unit="step") as bar:
        assert bar._bar.miniters == 1  # or slow steps after fast ones would show late
        bar.advance()
        logging.getLogger("slipstream").info("saved")
        bar.advance(text="loss 0.5")
    drawn = re.split(r"[\r\n]", stream.getvalue())
    assert drawn[1].startswith("train [........................] step 0/2")
    after = drawn[drawn.index("saved") + 1 :]  # on a line of its own, and the bar again below
    assert any("#" in each for each in after)
    assert any(each.startswith(f"train [{24 * '#'}] step 2/2") and each.endswith(", loss 0.5") for each in after)
    assert drawn[-1].strip() == ""


def test_a_terminal_without_a_size_has_80_columns(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "fileno", lambda: 2)
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((0, 0)))
    with progress("train", total=2, unit="step") as bar:
        bar.advance()
        assert bar.left() == "00:00 left"
    assert "train [" in stream.getvalue()


def test_sessions_that_flytekit_leaves_open_are_no_errors_in_a_pods_log() -> None:
    logs.configure()
    (said,) = (each for each in logging.getLogger("flytekit").filters if callable(each))
    record = logging.LogRecord("flytekit", logging.ERROR, "asyn.py", 1, "Taskrunner caught %s", ("x",), None)
    assert said(record)
    record.args = ("{'message': 'Unclosed client session'}",)
    assert not said(record)
