"""Draw docs/images/workflow_<name>.svg: the graph of each compiled workflow, and of the workflows that it nests.

`PYTHONPATH=. .venv/bin/python scripts/draw_workflows.py` writes the files. Nodes stand in the order in which they may
start; an arrow beside them is a wait for a node that is not the one above. Colours follow the reader's mode.
"""

from __future__ import annotations

import importlib
from html import escape
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
NAMES = ("speculative_rl", "asynchronous_rl", "bake_off", "ablation", "certify", "projection", "preflight")
_MODULES = {"certify": "losslessness"}
_WIDTH, _HEIGHT, _GAP, _MARGIN = 196, 44, 26, 56  # of a node, between nodes, and beside a column for arcs
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2430 }
.title { font-weight: 700 } .id { fill: #4a5263; font-size: 12px }
.node { fill: #eef0f4; stroke: #7b8496 } .gpu { fill: #fbe9dc; stroke: #c2662a }
.nested { fill: #e3e9fb; stroke: #4a63c8 }
.edge { stroke: #4a5263; fill: none; stroke-width: 1.3 } .head { fill: #4a5263 }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebf2 } .id { fill: #b9c1d2 } .node { fill: #2b303d; stroke: #98a2b6 }
  .gpu { fill: #4a2b17; stroke: #eda06c } .nested { fill: #26315c; stroke: #8ea2f2 }
  .edge { stroke: #b9c1d2 } .head { fill: #b9c1d2 }
}
""".strip()


def workflow(name: str) -> Any:
    """Compile a workflow by its name."""
    found = vars(importlib.import_module(f"workflows.{_MODULES.get(name, name)}"))[name]
    found.compile()
    return found


def picture(name: str, with_gpus: frozenset[str]) -> str:
    """Draw a workflow, with a column for each workflow that it nests.

    Args:
        with_gpus: names of the tasks that take all GPU nodes.
    """
    whole = workflow(name)
    nested = [node for node in whole.nodes if hasattr(node.flyte_entity, "output_bindings")]
    columns = [(name, whole)] + [(node.id, node.flyte_entity) for node in nested]
    height = max(len(each.nodes) for _, each in columns) * (_HEIGHT + _GAP) + 40
    width = len(columns) * (_WIDTH + _MARGIN) + 12
    parts = [part for at, column in enumerate(columns) for part in _column(*column, at, with_gpus)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    arrow = '<marker id="h" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="7" markerHeight="7" orient="auto">'
    defs = f'<defs>{arrow}<path class="head" d="M0 0L6 3L0 6z"/></marker></defs>'
    return (
        "\n".join([head, f"<title>Workflow {name}</title>", f"<style>{_STYLE}</style>", defs, *parts, "</svg>"]) + "\n"
    )


def _column(title: str, of: Any, at: int, with_gpus: frozenset[str]) -> list[str]:
    left = 12 + at * (_WIDTH + _MARGIN)
    places = {node.id: 36 + row * (_HEIGHT + _GAP) for row, node in enumerate(of.nodes)}
    parts = [f'<text class="title" x="{left}" y="20">{escape(title)}</text>']
    for row, node in enumerate(of.nodes):
        top, task = places[node.id], node.flyte_entity.name.rpartition(".")[2]
        is_nested = hasattr(node.flyte_entity, "output_bindings")
        inner = getattr(node.flyte_entity, "_run_task", None)  # of an array
        task = inner.name.rpartition(".")[2] if inner is not None else task
        kind = "nested" if is_nested else "gpu" if task in with_gpus else "node"
        parts.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>')
        parts.append(f'<text x="{left + 10}" y="{top + 18}">{escape(node.metadata.name)}</text>')
        parts.append(f'<text class="id" x="{left + 10}" y="{top + 35}">{escape(node.id)}</text>')
        for source in sorted({each.id for each in node.upstream_nodes} & places.keys(), key=places.__getitem__):
            start, right = places[source] + _HEIGHT, left + _WIDTH
            if source == of.nodes[row - 1].id:
                parts.append(_edge(f"M{left + 98} {start}V{top - 2}"))
            else:
                bend = 10 + 7 * (row - [each.id for each in of.nodes].index(source))
                parts.append(
                    _edge(f"M{right} {start - 12}C{right + bend} {start} {right + bend} {top} {right + 1} {top + 14}")
                )
    return parts


def _edge(path: str) -> str:
    return f'<path class="edge" d="{path}" marker-end="url(#h)"/>'


def tasks_with_gpus() -> frozenset[str]:
    """Return the names of the tasks that take all GPU nodes of a profile, as their modules declare them."""
    found = set()
    for path in (Path(__file__).resolve().parents[1] / "tasks").glob("*.py"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("@task(**on_gpus("):
                found.add(next(each for each in lines[number:] if each.startswith("def ")).split()[1].partition("(")[0])
    return frozenset(found)


def main() -> None:
    """Write all pictures."""
    for name in NAMES:
        (IMAGES / f"workflow_{name}.svg").write_text(picture(name, tasks_with_gpus()))


if __name__ == "__main__":
    main()
