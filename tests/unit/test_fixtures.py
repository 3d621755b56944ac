"""The tests' own fixtures."""

from __future__ import annotations

import logging
import threading

import pytest

logger = logging.getLogger(__name__)


@pytest.fixture
def earlier_thread() -> tuple[threading.Thread, threading.Event]:
    """A thread of an earlier test, and the event behind which it logs a message."""
    told = threading.Event()

    def run() -> None:
        told.wait()
        logger.warning("of another test")

    thread = threading.Thread(target=run, name="of an earlier test")
    thread.start()
    return thread, told


def test_a_log_holds_no_message_of_a_thread_that_an_earlier_test_left(
    earlier_thread: tuple[threading.Thread, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    earlier, told = earlier_thread
    own = threading.Thread(target=logger.warning, args=("of a thread of this test",))
    own.start()
    told.set()
    earlier.join()
    own.join()
    logger.warning("of this test")
    assert caplog.messages == ["of a thread of this test", "of this test"]
