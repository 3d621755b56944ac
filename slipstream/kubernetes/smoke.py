"""Smoke test of a Flyte: a few small executions of registered plans, watched to their end, and a table of what held.

The profile must have no GPUs. Nothing here was run on a Flyte: its client is tested against recorded answers, and
launching, outputs and the deleted pod against a fake.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.config import ConfigError
from slipstream.kubernetes.flyte_admin import FlyteAdmin, FlyteError, State, optional_number, texts

logger = logging.getLogger(__name__)

_EVERY_S = 5.0
_SHORT = {"num_steps": optional_number(3), "overrides": texts("tracking.drift.fail=false")}
_WRONG = {"overrides": texts("grpo.group_sise=4")}
_HANDLER = "fn0"  # Flyte's name of the failure node


@dataclass(frozen=True, kw_only=True)
class Case:
    """An execution and what must hold of it."""

    what: str
    plan: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "SUCCEEDED"
    output: str = ""  # output that it must have
    says: str = ""  # text of its error
    deck: tuple[str, str] | None = None  # nested workflow and node that must show a deck
    lost: str = ""  # node whose pod is deleted while it runs


CASES = (
    Case(what="a pod without GPUs", plan="projection", output="projection"),
    Case(what="what the cluster lacks", plan="preflight", output="findings"),
    Case(what="a wrong override", plan="tiny-smoke", inputs=_WRONG, phase="FAILED", says="grpo.group_size"),
    Case(
        what="the whole chain, and a deleted pod",
        plan="tiny-smoke",
        inputs=_SHORT,
        output="report",
        deck=("measure", "report"),
        lost="train",
    ),
)


def smoke(
    flyte: FlyteAdmin,
    version: str,
    *,
    delete_pod: Callable[[str, str], bool] | None = None,
    tracked: Callable[[str], str] | None = None,
    timeout_s: float = 7200.0,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[tuple[bool, str, str]]:
    """Launch every case one after the other; return whether it held, its name, and what was seen.

    While an execution runs, an answer that does not come is asked for again; at its end that is what was seen.

    Args:
        delete_pod: deletes the pod of an execution's node, and returns False while there is none; None deletes none.
        tracked: returns the status of an execution's MLflow run; None leaves it unchecked.
        timeout_s: time for each execution; one that takes longer is terminated.
    """
    rows = []
    for case in CASES:
        name = flyte.launch(case.plan, version, case.inputs)
        logger.info("smoke: %s: %s is execution %s", case.what, case.plan, name)
        lost, due_s, state = False, now_s() + timeout_s, None
        while now_s() <= due_s:
            try:
                if (state := flyte.execution(name)) is not None and state.has_ended:
                    break
                if case.lost and not lost and delete_pod is not None:
                    runs = any(each.name == case.lost and each.phase == "RUNNING" for each in flyte.nodes(name))
                    lost = runs and delete_pod(name, case.lost)
            except FlyteError as error:
                logger.warning("smoke: %s", error)
            sleep(_EVERY_S)
        try:
            if state is None or not state.has_ended:
                flyte.terminate(name, f"smoke test: no end after {timeout_s:g} s")
            found = _faults(flyte, case, name, state, lost=lost, deletes=delete_pod is not None)
            if case.deck and state is not None and state.phase == case.phase:
                parent, node = case.deck
                has_deck = any(each.deck for each in flyte.nodes(name, parent=parent) if each.name.endswith(node))
                found += [] if has_deck else [f"no deck of {node}"]
                status = tracked(name) if tracked is not None else "FINISHED"
                found += [] if status == "FINISHED" else [f"its MLflow run is {status}"]
        except (RuntimeError, ConfigError) as error:  # of Flyte and MLflow
            found = [str(error)]
        rows.append((not found, case.what, "; ".join([f"{case.plan} {name}", *found])))
    return rows


def _faults(flyte: FlyteAdmin, case: Case, name: str, state: State | None, *, lost: bool, deletes: bool) -> list[str]:
    """Say what did not hold of an execution that ended."""
    faults = []
    phase, message = (state.phase, state.message) if state is not None else ("unknown", "")
    if phase != case.phase:
        faults.append(f"{phase}, not {case.phase}: {message.strip()[-300:]}")
    if case.says and case.says not in message:
        faults.append(f"its error does not say {case.says!r}")
    if case.phase == "FAILED":
        handlers = [each.phase for each in flyte.nodes(name) if each.name == _HANDLER]
        faults += [] if handlers == ["SUCCEEDED"] else [f"the failure handler: {', '.join(handlers) or 'not run'}"]
    if case.output and phase == "SUCCEEDED" and case.output not in flyte.outputs(name):
        faults.append(f"no output {case.output}")
    if case.lost and deletes:
        attempts = len(flyte.attempts(name, case.lost))
        faults += [] if lost else [f"no pod of {case.lost} was deleted"]
        faults += [f"{attempts} attempt of {case.lost}, not 2"] if lost and attempts < 2 else []
    return faults
