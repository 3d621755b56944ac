"""The connection to Ray: a cluster's where there is one, else a local instance."""

from __future__ import annotations

import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 200 << 20
# Ray would give way to every other process: timed work must not.
_LOCAL_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
_LOCAL = "local"  # in Ray's words
_NUM_STARTS = 3
_START_TIMED_OUT = "timed out during startup"  # of Ray's error, which has no class of its own
_PASSED_ON = ("HF_HUB_OFFLINE", "DO_NOT_TRACK", "PYTHONPATH")


def connect() -> None:
    """Connect this process to Ray, once: to the cluster that `RAY_ADDRESS` names, else to a local instance of its own.

    A local instance takes seconds to start, so the stages of one process share it; it ends with the process. Another
    Ray on this machine, or the address that a dead one left in /tmp/ray, changes nothing; `auto` asks for it.

    Raises:
        TimeoutError: no local instance started; see `start_patiently`.
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
    # Without an address Ray looks for a cluster that runs here, and refuses the arguments of an instance of our own.
    local: dict[str, Any] = {"address": _LOCAL, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    start_patiently(lambda: ray.init(object_store_memory=_OBJECT_STORE_BYTES, **local, **quiet))


def start_patiently(start: Callable[[], object]) -> None:
    """Start a local Ray, again where its processes do not answer within the 30 s that it grants them.

    Raises:
        TimeoutError: they did not in several attempts.
    """
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
    """Environment variables of an actor: what this process hands on, and the actor's `own`."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, **own}


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """On that node and on no other."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def own_node() -> str:
    """Ray's id of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


def machine() -> str:
    """This machine's processor, system and GPUs, with the flags that decide how fast it multiplies.

    GPUs are those that the driver lists: asking CUDA would set it up in this process, and vLLM forks from it.
    """
    from slipstream.learner.numerics import processor_flags

    flags = " ".join(processor_flags())
    gpus = counted(_gpu_models(Path("/proc/driver/nvidia/gpus")))
    processor = f"{platform.machine()}, {os.cpu_count()} cores{f' ({flags})' if flags else ''}, {platform.system()}"
    return f"{processor}, {gpus}" if gpus else processor


def counted(names: Iterable[str]) -> str:
    """`4 x NVIDIA GB200`: what there is, and how often where it is more than once."""
    found = sorted(Counter(names).items())
    return "; ".join(f"{count} x {name}" if count > 1 else name for name, count in found)


def _gpu_models(directory: Path) -> list[str]:
    """Of all GPUs of the host, as NVIDIA's driver names them."""
    lines = [line for path in directory.glob("*/information") for line in path.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
