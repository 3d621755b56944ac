"""Text tables, and the table of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.workers.placement.plan import Plan, Slot


def plan_text(plan: Plan) -> str:
    """Format a plan with a row a node and a column a GPU; `L5` is learner rank 5, `E2.1` is worker 1 of engine 2."""
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
        rows.append([node.name, node.nvlink_domain or "-", *cells])
    return "\n".join([*head, "", table(rows)])


def executor_words(plan: Plan) -> str:
    """Name vLLM's executor for the workers of an engine."""
    if plan.layout.engine_tensor == 1:
        return "uni (in one process)"
    is_inside = all(len({slot.node for slot in slots}) == 1 for slots in plan.engines)
    return "mp (processes of one node)" if is_inside else "ray (over several nodes)"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows into columns; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _numa(numa: Sequence[int], gpu: int) -> str:
    return f" (NUMA {numa[gpu]})" if numa else ""
