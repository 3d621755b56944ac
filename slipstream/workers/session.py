"""Connection to Ray, a cluster's or a local instance; Ray's nodes, and the machine of this process."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # the public API sums over all nodes
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slipstream.config import require
from slipstream.workers.placement.plan import Node

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 200 << 20
# Ray lowers the priority of its workers by default, which would distort timings.
_LOCAL_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
_LOCAL = "local"  # Ray's address of an instance of its own
_NUM_STARTS = 3
_START_TIMED_OUT = "timed out during startup"  # text of Ray's error, which has no class of its own
_PASSED_ON = ("HF_HUB_OFFLINE", "DO_NOT_TRACK", "PYTHONPATH")

NVLINK_LABEL = "ray.io/gpu-domain"
"""Ray's label for nodes that share an NVLink domain; Ray's topology strategies read the label too."""

NUMA_LABEL = "slipstream.io/numa"
"""Label with the NUMA node of each GPU in order, as in `0-0-1-1`; set with `ray start --labels`."""

_TYPE_LABEL = "ray.io/accelerator-type"  # set by Ray on nodes with accelerators


def connect() -> None:
    """Connect this process to Ray, once: to the cluster at `RAY_ADDRESS`, else to a local instance of its own.

    A local instance takes seconds to start, so the stages of one process share the instance, which ends with the
    process. Another Ray on this machine, alive or dead, is ignored unless `RAY_ADDRESS` is `auto`.

    Raises:
        TimeoutError: no local instance started in several attempts.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address not in ("", _LOCAL):  # Ray refuses the arguments of a local instance on a cluster that runs already
        logger.info("connecting to Ray at %s", address)
        ray.init(address=address, **quiet)
        return
    logger.info("starting Ray")
    for name, value in _LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    # Without an address Ray looks for a cluster that runs here, and refuses the arguments of a local instance.
    local: dict[str, Any] = {"address": _LOCAL, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    start_patiently(lambda: ray.init(object_store_memory=_OBJECT_STORE_BYTES, **local, **quiet))


def share() -> None:
    """Connect as `connect` does, and have the processes that this one starts later connect to the same Ray."""
    connect()
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


def disconnect() -> None:
    """End the connection, and a local instance with it."""
    ray.shutdown()


def start_patiently(start: Callable[[], object]) -> None:
    """Start a local Ray, and retry if its processes do not answer within Ray's 30 s."""
    for attempt in range(1, _NUM_STARTS + 1):
        try:
            start()
        except Exception as error:
            if _START_TIMED_OUT not in str(error):
                raise
            logger.warning("Ray did not start within its 30 s, attempt %d of %d", attempt, _NUM_STARTS)
        else:
            return
    raise TimeoutError(f"Ray must start within 30 s, and in {_NUM_STARTS} attempts it did not: see what else runs here")


def actor_environment(own: dict[str, str]) -> dict[str, str]:
    """Environment variables of an actor: those inherited from this process, and the actor's `own`."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, **own}


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Ray's scheduling strategy that allows this node alone."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def own_node() -> str:
    """Ray's id for the node of this process."""
    return ray.get_runtime_context().get_node_id()


def machine() -> str:
    """Describe this machine's processor, system and GPUs, with the processor flags that decide matrix speed.

    The GPUs are read from the driver's files, as a call to CUDA would initialize CUDA in a process from which vLLM
    forks.
    """
    from slipstream.learner.numerics import processor_flags

    flags = " ".join(processor_flags())
    gpus = counted(_gpu_models(Path("/proc/driver/nvidia/gpus")))
    processor = f"{platform.machine()}, {os.cpu_count()} cores{f' ({flags})' if flags else ''}, {platform.system()}"
    return f"{processor}, {gpus}" if gpus else processor


def counted(names: Iterable[str]) -> str:
    """Join names with their counts, as in `4 x NVIDIA GB200`."""
    found = sorted(Counter(names).items())
    return "; ".join(f"{count} x {name}" if count > 1 else name for name, count in found)


def _gpu_models(directory: Path) -> list[str]:
    """Read the models of all GPUs of the host from NVIDIA's driver."""
    lines = [line for path in directory.glob("*/information") for line in path.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def node_address() -> str:
    """Address of this host in the Ray cluster."""
    return ray.util.get_node_ip_address()


def require_here(*paths: Path | None) -> None:
    """Refuse files and directories that this host does not see, and broken links in a policy of the hub."""
    rule = "must be on storage that all hosts of the run share"
    fix = "give the run another --root, or HF_HOME, policy.model and draft.model other paths"
    for path in filter(None, paths):
        for each in (path, *path.rglob("*")):
            require(each.exists(), str(each), rule, f"nothing there on {platform.node()}", fix)


def ray_nodes() -> list[Node]:
    """Live nodes, sorted by address; `with_numa` reads their NUMA labels."""
    free = available_resources_per_node()
    nodes = [_node(values, free.get(values["NodeID"], {})) for values in ray.nodes() if values["Alive"]]
    return sorted(nodes, key=lambda node: (_numeric(node.address), node.name))


def accelerators() -> str:
    """Names of the cluster's accelerator types in Ray, as in `H200`; empty without any."""
    return " ".join(sorted({node.labels[_TYPE_LABEL] for node in ray_nodes() if _TYPE_LABEL in node.labels}))


def with_numa(node: Node) -> Node:
    """Read the node's NUMA label, which must name each GPU."""
    text = node.labels.get(NUMA_LABEL)
    if text is None:
        return node
    parts = text.split("-")
    rule = f"of node {node.address} must name the NUMA node of each of its {node.num_gpus} GPUs"
    is_whole = len(parts) == node.num_gpus and all(part.isdigit() for part in parts)
    require(is_whole, f"label {NUMA_LABEL}", rule, text, "as in 0-0-1-1")
    return replace(node, numa=tuple(map(int, parts)))


def _node(values: Mapping[str, Any], free: Mapping[str, float]) -> Node:
    resources = values["Resources"]
    return Node(
        name=values["NodeID"],
        num_gpus=int(resources.get("GPU", 0)),
        nvlink_domain=values["Labels"].get(NVLINK_LABEL),
        address=values["NodeManagerAddress"],
        num_cpus=resources.get("CPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        object_store_bytes=int(resources.get("object_store_memory", 0)),
        labels=dict(values["Labels"]),
    )


def _numeric(address: str) -> tuple[int, str]:
    """Sort key that orders 10.0.0.9 before 10.0.0.11, and host names last."""
    try:
        return int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 1 << 128, address
