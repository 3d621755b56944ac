"""Nodes that a run's workers fit on, and whether enough of them share one NVLink domain."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kubernetes import client as k8s
from kubernetes.utils.quantity import parse_quantity

from slipstream.kubernetes.preflight.api import Api, Refusal
from slipstream.kubernetes.preflight.needs import Finding, GpuNodesNeed

_BLOCKING = ("NoSchedule", "NoExecute")


def check_nodes(api: Api, need: GpuNodesNeed) -> list[Finding]:
    """One row: usable nodes of the fullest clique, and why the others are not usable."""
    where = "in one clique" if need.clique_label else "in all"
    amounts = ", ".join(f"{name} {amount}" for name, amount in need.allocatable.items())
    needed = f"{need.nodes} {where}, each {amounts}"
    selector = ",".join(f"{name}={value}" for name, value in sorted(need.labels.items()))
    answer = api.ask(k8s.CoreV1Api(api.client).list_node, label_selector=selector)
    if isinstance(answer, Refusal):
        return [answer.finding("GPU nodes", needed=needed, right="list nodes", absent="")]
    usable: Counter[str] = Counter()
    unusable: Counter[str] = Counter()
    for node in answer.items:
        reason = _unusable(node, need)
        if reason:
            unusable[reason] += 1
        else:
            usable[_clique(node, need.clique_label)] += 1
    largest = max(usable.values(), default=0)
    return [
        Finding.of(
            "GPU nodes",
            found=_found(usable, unusable, need.clique_label) or f"none with {selector}",
            needed=needed,
            is_fine=largest >= need.nodes,
            fix=f"a cluster profile of at most {largest} nodes, or more nodes ready {where}"
            if largest
            else "are the labels of the profile those of the nodes? the GPU operator's feature discovery sets them",
        )
    ]


def _clique(node: Any, label: str | None) -> str:
    if label is None:
        return ""
    return (node.metadata.labels or {}).get(label, "no clique")


def _unusable(node: Any, need: GpuNodesNeed) -> str:
    """Why no worker can run here; empty if one can."""
    ready = {condition.type: condition.status for condition in node.status.conditions or ()}.get("Ready")
    if ready != "True":
        return "not ready"
    if node.spec.unschedulable:
        return "cordoned"
    if need.clique_label is not None and need.clique_label not in (node.metadata.labels or {}):
        return f"without label {need.clique_label}"
    for taint in node.spec.taints or ():
        if taint.effect in _BLOCKING and taint.key not in need.tolerated:
            return f"with taint {taint.key}, which the pods do not tolerate"
    for name, amount in need.allocatable.items():
        offered = (node.status.allocatable or {}).get(name, "0")
        if parse_quantity(offered) < parse_quantity(amount):
            return f"with {name} {offered}"
    return ""


def _found(usable: Counter[str], unusable: Counter[str], clique_label: str | None) -> str:
    cliques = [
        f"{count} usable{f' in clique {clique}' if clique_label else ''}" for clique, count in usable.most_common()
    ]
    return ", ".join([*cliques, *(f"{count} {reason}" for reason, count in unusable.most_common())])
