"""What vLLM is started with that follows from the device and from the policy's own files."""

from __future__ import annotations

import glob
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.engine.config import EngineConfig, SamplingConfig


def device_arguments(config: EngineConfig, *, is_in_flight: bool, can_rest: bool = False) -> dict[str, Any]:
    """vLLM's arguments for the device.

    An engine that `can_rest` has its memory from an allocator that can give parts of it back; vLLM has one for GPUs.

    On a GPU vLLM schedules asynchronously by default: while one step's tokens come out the next step runs already, with
    the old weights where a refit comes in between. On a CPU it never does.
    """
    if config.kv_cache_gib is None:
        scheduling = {"async_scheduling": False} if is_in_flight else {}
        sleeping = {"enable_sleep_mode": True} if can_rest else {}
        return {"gpu_memory_utilization": config.gpu_memory_utilization, **scheduling, **sleeping}
    return {
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        # After each chunk but a prompt's last, vLLM 0.32 takes a seeded request's draw back by its generator's offset;
        # a CPU's generator has none, and the engine would end there.
        "enable_chunked_prefill": False,
    }


@contextmanager
def loadable(model: Path) -> Iterator[Path]:
    """The directory `model` by a name under which vLLM finds its weights: it searches them by a glob pattern."""
    if glob.escape(str(model)) == str(model):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-model-") as directory:
        link = Path(directory) / "model"
        link.symlink_to(model.absolute(), target_is_directory=True)
        yield link


def without_gpu() -> str:
    """Why vLLM would generate on the CPU in this process; empty if it would not.

    It is asked, not torch: its workers may be forked from this process, which must leave CUDA alone.
    """
    from vllm.platforms import current_platform

    return f"vLLM would generate on {current_platform.device_name!r}" if current_platform.is_cpu() else ""


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


def sampling_params(sampling: SamplingConfig, stop_tokens: Sequence[int]) -> Any:
    """vLLM's sampling parameters."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens,
        stop_token_ids=list(stop_tokens),
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
    )


def seeded(params: Any, seed: int) -> Any:
    """The same, of one rollout."""
    own = params.clone()
    own.seed = seed
    return own
