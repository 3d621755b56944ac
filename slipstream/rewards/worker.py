"""Process that runs sympy, started by path, and killable.

Protocol: one JSON line `{"gold", "answer"}` on stdin, one byte back on stdout: `R` once when ready, then `1` or `0`.
A null `answer` asks if `gold` can be read. sympy may hang or exhaust memory in C code, beyond the reach of Python's
timeouts. So this process limits its memory, the parent enforces the deadline, and an alarm ends an orphan.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path

_UNSOLVED = (ArithmeticError, AttributeError, LookupError, RecursionError, NotImplementedError, TypeError, ValueError)
"""Exceptions of sympy for unsupported input; any other exception ends this process."""


def main(memory_bytes: int, alarm_s: float) -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    reply = os.dup(1)
    os.dup2(2, 1)  # output of a library must not look like a reply
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    # Replaces this file's directory, whose module names may shadow others.
    sys.path[0] = str(Path(__file__).parents[2])
    from slipstream.rewards import algebra
    from slipstream.rewards.expressions import install
    from slipstream.rewards.values import compare

    install(algebra)
    logging.disable(logging.CRITICAL)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # errors of the start were visible; from here a library may print gigabytes
        os.dup2(silence, stream)
    os.write(reply, b"R")
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        gold, answer = request["gold"], request["answer"]
        try:
            right = compare(gold, gold if answer is None else answer)
        except _UNSOLVED:
            right = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(reply, b"1" if right else b"0")


if __name__ == "__main__":
    main(memory_bytes=int(sys.argv[1]), alarm_s=float(sys.argv[2]))
