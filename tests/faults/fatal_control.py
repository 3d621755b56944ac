"""A control of the engines of a refit, in the learner's rank 0, in whose third transfer a process dies."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from slipstream.workers.calls import RayEngineControl

_STOPPED_S = 0.5  # the transfer waits meanwhile


class FatalControl:
    """A `RayEngineControl` whose third transfer never ends: a process stops, and is killed; once in a test."""

    def __init__(self, control: RayEngineControl, *, victim: int | None, mark: Path) -> None:
        """Kill the process `victim`, None for the one that sends; `mark` remembers that it is done."""
        self._control = control
        self._victim = victim
        self._mark = mark
        self._num_left = 3

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._control, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._control, self._victim, self._mark)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Update as the real control does, and kill the victim in the third transfer."""
        self._num_left -= 1
        if self._num_left == 0 and not self._mark.exists():
            self._mark.touch()
            victim = os.getpid() if self._victim is None else self._victim
            if self._victim is not None:
                os.kill(victim, signal.SIGSTOP)
                threading.Timer(_STOPPED_S, os.kill, [victim, signal.SIGKILL]).start()
            else:
                os.kill(victim, signal.SIGKILL)
        self._control.update_weights(update_info)


def _made(control: RayEngineControl, victim: int | None, mark: Path) -> FatalControl:
    return FatalControl(control, victim=victim, mark=mark)
