"""What vLLM is started with that follows from the device and from the policy's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.rollout.config import EngineConfig


def device_arguments(config: EngineConfig) -> dict[str, Any]:
    """vLLM's arguments for the device."""
    if config.kv_cache_gib is None:
        return {"gpu_memory_utilization": config.gpu_memory_utilization}
    return {
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        # After each chunk but a prompt's last, vLLM 0.32 takes a seeded request's draw back by its generator's offset;
        # a CPU's generator has none, and the engine would end there.
        "enable_chunked_prefill": False,
    }


def stop_token_ids(policy: Path) -> tuple[int, ...]:
    """End-of-sequence tokens of config.json and, where there is one, generation_config.json."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = policy / name
        if path.is_file():
            eos = json.loads(path.read_text()).get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    require(bool(ids), "policy.model", "must name an eos_token_id in its config.json", str(policy))
    return tuple(sorted(ids))
