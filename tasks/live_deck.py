"""Deck of a long task while it runs: what its runs have logged so far, published once a minute.

Flyte shows a deck of a running task where the task declares one (`enable_deck`). Source: `Deck.publish` of flytekit
1.16, and flyteorg/flyte pull request 6053 for propeller.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flytekit import Deck, FlyteContextManager

from slipstream.stages.context import RunContext
from slipstream.stages.runs import live_page
from tasks.resources import CLUSTER, runs_locally

logger = logging.getLogger(__name__)

EVERY_S = 60.0
"""Time between two pages: each costs the driver some milliseconds, and the object store one file."""


class _Progress(Deck):
    """Deck whose page is made when flytekit asks for it: at each publication, and at the task's end."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._since_s = context, time.time()
        super().__init__("progress")

    @property
    def html(self) -> str:
        """Page of this moment; a page that cannot be made is no reason to end a task."""
        try:
            return live_page(self._context, CLUSTER, since_s=self._since_s)
        except Exception:
            logger.warning("the task's deck shows no progress", exc_info=True)
            return "<p>The task's log says why there is no progress here.</p>"


@contextmanager
def shown_while_it_runs(context: RunContext | None) -> Iterator[None]:
    """Publish the progress of a task that has a deck; without a run's context, or on one machine, do nothing."""
    params = FlyteContextManager.current_context().user_space_params
    if context is None or runs_locally() or params is None or not params.enable_deck:
        yield
        return
    _Progress(context)  # flytekit keeps the deck, and writes it at the end as well
    is_over = threading.Event()

    def publish() -> None:
        while not is_over.wait(EVERY_S):
            Deck.publish()

    # flytekit finds the task and its decks in a context variable, which a new thread has not.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(publish,), daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        Deck.publish()  # flytekit writes none where a task fails
        raise
    finally:
        is_over.set()
