"""The memory of a vLLM engine's key-value cache, given back while the engine generates nothing."""

from __future__ import annotations

from typing import Any


class CacheMemory:
    """The key-value cache of an engine whose core runs in this process, on a GPU and with vLLM's sleep mode.

    Weights, draft and CUDA graphs stay where they are: an engine without its cache is refitted, and shows what it
    holds, like any other. What it had cached is gone; new weights would have made it stale anyway.

    Source: vLLM 0.32, `v1/engine/core.py release_kv_cache_memory` and `wake_up`, `device_allocator/cumem.py`.
    """

    def __init__(self, llm: Any) -> None:
        """Take an engine as it started, with its cache.

        Args:
            llm: vLLM's `LLM`.
        """
        self._llm = llm
        self.is_away = False

    def give_back(self) -> None:
        """Until `take`, which whoever generates calls first, the device has the memory; nothing if it has it already.

        Nothing may be under way.

        Raises:
            RuntimeError: vLLM cannot on this device, or was started without its sleep mode.
        """
        if self.is_away:
            return
        self._drain()
        self.is_away = True  # from here on nothing is scheduled, whatever becomes of the memory
        self._llm.sleep(level=0)
        self._llm.release_kv_cache_memory()

    def take(self) -> None:
        """Have the cache again, if it was given back, with nothing in it.

        Raises:
            RuntimeError: the device has no room for it.
        """
        if not self.is_away:
            return
        if not self._llm.wake_up():
            raise RuntimeError("vLLM did not take its key-value cache again")
        self.is_away = False

    def _drain(self) -> None:
        """Take the steps that nobody waited for.

        vLLM lets go of what has finished in the step after it, and with asynchronous scheduling a step that was begun
        too early is still under way: it releases no memory until both are done.
        """
        engine = self._llm.llm_engine
        core = engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            engine.step()
