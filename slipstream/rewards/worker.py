"""The process in which math-verify runs. It is started by path, imports nothing of Slipstream, and may be killed.

Protocol: one JSON line `{"gold", "answer"}` on stdin, one byte back on stdout: `R` once when ready, then `1` or `0`.
`answer` null asks whether `gold` can be parsed. sympy may hang or eat memory in C code, where no Python time-out
helps: memory is limited here, time by the parent, and by an alarm with its default action should the parent be gone.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

_RELATIVE_TOLERANCE = 1e-6  # as of `values`; this process imports nothing of Slipstream


def main(memory_bytes: int, alarm_s: float) -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    reply = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def parse_boxed(text: str) -> list[Any]:
        # Their own time-out raises in Python code only, and would disarm the alarm below; 0 switches it off.
        # Without their fallback, for text that cannot be parsed is equal to nothing but itself.
        return parse(f"\\boxed{{{text}}}", parsing_timeout=0, fallback_mode="no_fallback")

    def is_right(gold: str, answer: str) -> bool:
        pairs = [(g, a) for g in parse_boxed(gold) for a in parse_boxed(answer)]
        return any(verify(g, a, timeout_seconds=None) and not _are_apart(g, a) for g, a in pairs)

    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # up to here errors of the start show; from here on a library may print a gigabyte
        os.dup2(silence, stream)
    os.write(reply, b"R")
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        gold, answer = request["gold"], request["answer"]
        right = bool(parse_boxed(gold)) if answer is None else is_right(gold, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(reply, b"1" if right else b"0")


def _are_apart(gold: Any, answer: Any) -> bool:
    """Return True if two numbers differ by over a millionth: `verify` calls equal what rounds alike to 6 places."""
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    a, b = complex(gold.evalf(30)), complex(answer.evalf(30))
    return abs(a - b) > _RELATIVE_TOLERANCE * max(abs(a), abs(b))


if __name__ == "__main__":
    main(memory_bytes=int(sys.argv[1]), alarm_s=float(sys.argv[2]))
