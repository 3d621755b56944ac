"""The connection to Ray: a cluster's where there is one, else a local instance."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 200 << 20
# Ray would give way to every other process: timed work must not.
_LOCAL_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
_PASSED_ON = ("HF_HUB_OFFLINE", "DO_NOT_TRACK", "PYTHONPATH")


def connect() -> None:
    """Connect this process to Ray, once: to the cluster that `RAY_ADDRESS` names, else to a local instance.

    A local instance takes seconds to start, so the stages of one process share it; it ends with the process.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    address = os.environ.get("RAY_ADDRESS")
    if address:  # Ray refuses the arguments of a local instance on a cluster that runs already
        logger.info("connecting to Ray at %s", address)
        ray.init(address=address, **quiet)
        return
    logger.info("starting Ray")
    for name, value in _LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    ray.init(include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, _node_ip_address="127.0.0.1", **quiet)


def actor_environment(own: dict[str, str]) -> dict[str, str]:
    """Environment variables of an actor: what this process hands on, and the actor's `own`."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, **own}


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """On that node and on no other."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def own_node() -> str:
    """Ray's id of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id()
