"""The process in which a reward is computed. It is started by path, and may be killed.

Protocol: one JSON line of arguments on stdin, one JSON line back on stdout, `{"value": …}` or `{"error": …}`; one such
line comes first, when the function is there. The function may hang or eat memory in C code, where no Python time-out
helps: memory is limited here, time by the parent, and by an alarm with its default action should the parent be gone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REPLY_BYTES = 4000  # a pipe takes so many at once or not at all


def main(function: str, memory_bytes: int, alarm_s: float) -> None:
    """Answer requests to `function`, which is `FILE:NAME` or one of `BUILT_IN`, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    requests, reply, own = os.fdopen(os.dup(0)), os.dup(1), os.getpid()
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        if function in BUILT_IN:  # in the place of this file's directory, whose modules may bear the names of others
            sys.path[0] = str(Path(__file__).parents[2])
        call = BUILT_IN[function]() if function in BUILT_IN else _own(function)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever a user's file raises is told
        os.write(reply, _line({"error": f"{type(error).__name__}: {error}"}))
        return
    logging.disable(logging.CRITICAL)
    for stream in (1, 2):  # up to here errors of the start show; from here on a library may print a gigabyte
        os.dup2(silence, stream)
    os.write(reply, _line({"value": "ready"}))
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        answer = _answer(call, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != own:
            os._exit(0)  # a child that the function left behind must not answer too
        os.write(reply, _line(answer))


def _answer(call: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        value = call(**arguments)
        return {"value": asyncio.run(value) if inspect.iscoroutine(value) else value}
    except (MemoryError, SystemError):
        raise  # what is left of this process is not to be trusted
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}


def _line(answer: dict[str, Any]) -> bytes:
    """Encode a reply. numpy's and torch's numbers become plain ones."""
    try:
        line = json.dumps(answer, default=float).encode()
    except (TypeError, ValueError) as error:
        line = json.dumps({"error": f"the value cannot be sent: {error}"[:_REPLY_BYTES]}).encode()
    if len(line) >= _REPLY_BYTES:
        what = answer.get("error") or "the value is longer than a reply may be"
        line = json.dumps({"error": f"{what[: _REPLY_BYTES // 8]} …"}).encode()
    return line + b"\n"


def _own(function: str) -> Callable[..., Any]:
    """Load a user's function and check that it takes the arguments of a reward."""
    path, _, name = function.rpartition(":")
    sys.path[0] = str(Path(path).parent)
    spec = importlib.util.spec_from_file_location("reward_function", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    call = getattr(module, name)
    inspect.signature(call).bind(data_source="", solution_str="", ground_truth="", extra_info={})
    return call


def _mathematics() -> Callable[..., Any]:
    """Compare two answers: the arguments are `gold` and `answer`, the value is a bool."""
    from slipstream.rewards import algebra
    from slipstream.rewards.expressions import install
    from slipstream.rewards.values import compare

    install(algebra)
    return lambda gold, answer: bool(compare(gold, answer))


def _reasoning_gym() -> Callable[..., Any]:
    """Score a response to a task of reasoning-gym by the task's own function."""
    from slipstream.data.reasoning_tasks import EXTRA, task_score
    from slipstream.rewards.answers import tagged_answer

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        is_cut_off = extra_info.get("finish_reason") == "length"
        return task_score(tagged_answer(solution_str, is_cut_off=is_cut_off), extra_info[EXTRA])

    return compute_score


BUILT_IN = {"mathematics": _mathematics, "reasoning_gym": _reasoning_gym}

if __name__ == "__main__":
    main(sys.argv[1], memory_bytes=int(sys.argv[2]), alarm_s=float(sys.argv[3]))
