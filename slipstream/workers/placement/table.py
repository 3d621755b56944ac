"""A plan and its memory as text tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from slipstream.workers.placement.assessment import Assessment
from slipstream.workers.placement.plan import Plan, Slot

_NOTHING = "-"


def plan_text(plan: Plan) -> str:
    """One row a node, one column a GPU; `L5` is rank 5 of the learner, `E2.1` worker 1 of engine 2."""
    where, layout = plan.layout.parallel, plan.layout
    sequence = " with SP" if where.sequence_parallel else ""
    workers = f"TP {layout.engine_tensor}"
    per_node = layout.placement.gpus_per_node
    kind = "logical GPUs (processes may compute on CPUs)" if layout.placement.logical_gpus else "GPUs"
    head = [
        f"{len(plan.nodes)} x {per_node} {kind}, {layout.placement.mode.value}",
        f"learner: {len(plan.learner)} ranks, TP {where.tensor}{sequence} x PP {where.pipeline} x DP {where.data}",
        f"engines: {layout.num_engines} of {workers}, executor {executor_words(plan)}",
    ]
    held: dict[Slot, list[str]] = {slot: [] for slot in plan.slots}
    for rank, slot in enumerate(plan.learner):
        held[slot].append(f"L{rank}")
    for engine, slots in enumerate(plan.engines):
        for worker, slot in enumerate(slots):
            held[slot].append(f"E{engine}" if layout.engine_tensor == 1 else f"E{engine}.{worker}")
    rows = [["node", "NVLink domain", *(f"GPU {gpu}" for gpu in range(per_node))]]
    for index, node in enumerate(plan.nodes):
        cells = [" ".join(held[Slot(index, gpu)]) + _numa(node.numa, gpu) for gpu in range(per_node)]
        rows.append([node.name, node.nvlink_domain or _NOTHING, *cells])
    return "\n".join([*head, "", table(rows)])


def executor_words(plan: Plan) -> str:
    """How vLLM runs an engine's workers."""
    if plan.layout.engine_tensor == 1:
        return "uni (in one process)"
    is_inside = all(len({slot.node for slot in slots}) == 1 for slots in plan.engines)
    return "mp (processes of one node)" if is_inside else "ray (over several nodes)"


def memory_text(found: Assessment, plan: Plan) -> str:
    """Memory by part, in GB a GPU, and what follows from it."""
    learner = {name: getattr(found.learner, name) for name in (field.name for field in fields(found.learner))}
    engine = {
        "engine weights": found.engine.weights,
        "draft": found.engine.draft,
        "engine activations": found.engine.activations,
        "KV cache": found.engine.kv_cache,
    }
    if not learner["reference"]:
        del learner["reference"]
    total = found.hardware.memory_bytes
    kinds = _kinds(found, learner, engine)
    parts = list({**learner, **engine})
    rows = [["part", *(f"{kind}, GB" for kind in kinds)]]
    rows += [[part, *(_gb(held.get(part)) for held in kinds.values())] for part in parts]
    rows.append(["runtime (assumed)", *(_gb(found.runtime) for _ in kinds)])
    rows.append(["together", *(_gb(sum(held.values()) + found.runtime) for held in kinds.values())])
    rows.append([f"{found.hardware.name} has", *(_gb(total) for _ in kinds)])
    return "\n".join([table(rows), "", *_consequences(found, plan)])


def _kinds(found: Assessment, learner: dict[str, float], engine: dict[str, float]) -> dict[str, dict[str, float]]:
    """What a GPU holds, by part, by its role or by whose turn it is."""
    if not found.is_colocated:
        return {"training GPU": learner, "generation GPU": engine}
    if not found.takes_turns:
        return {"GPU": {**learner, **engine}}
    kept = {part: size for part, size in learner.items() if part in ("weights", "reference")}
    resting = {part: size for part, size in engine.items() if part != "KV cache"}
    return {"generating": {**kept, **engine}, "training": {**learner, **resting}}


def _consequences(found: Assessment, plan: Plan) -> list[str]:
    layout = plan.layout
    moved = found.refit_bytes * layout.num_engines
    hosted = found.learner.hosted
    waiting = (
        f"while engines generate, {_gb(hosted)} GB of each GPU's optimizer wait in host memory: "
        f"{_gb(hosted * layout.placement.gpus_per_node)} GB a node"
    )
    return [
        f"longest micro-batch that fits: {found.max_microbatch_tokens:,} tokens",
        f"an engine's cache holds {found.engine.kv_tokens:,} tokens of context, "
        f"{found.num_longest_sequences} of the longest sequences",
        f"a refit moves {_gb(found.refit_bytes)} GB into each of {layout.num_engines} engines, {_gb(moved)} GB in "
        f"all, by {found.channel.value}",
        *([waiting] if found.takes_turns else []),
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _numa(numa: Sequence[int], gpu: int) -> str:
    return f" (NUMA {numa[gpu]})" if numa else ""


def _gb(size: float | None) -> str:
    return _NOTHING if size is None else f"{size / 1e9:.1f}"
