"""What vLLM is asked when its cache's memory goes and comes; vLLM itself refuses on a CPU (`tests/integration`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.config import EngineConfig
from slipstream.engine.vllm_engine import device_arguments
from slipstream.engine.vllm_groups import CacheMemory


class Llm:
    """vLLM with steps left over of a generation that has ended, which refuses as vLLM does."""

    def __init__(self, *, num_steps: int = 2, num_begun: int = 1, wakes: bool = True, refuses: bool = False) -> None:
        self.calls: list[Any] = []
        self.wakes, self.refuses = wakes, refuses
        self._num_steps = num_steps
        self._begun = [object()] * num_begun
        scheduler = SimpleNamespace(has_requests=lambda: self._num_steps > 0)
        core = SimpleNamespace(scheduler=scheduler, batch_queue=self._begun)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), step=self._step)

    def _step(self) -> list[Any]:
        self.calls.append("step")
        if self._num_steps:
            self._num_steps -= 1
        else:
            self._begun.pop()
        return []

    def sleep(self, *, level: int) -> None:
        self.calls.append(("sleep", level))

    def release_kv_cache_memory(self) -> None:
        if self._num_steps or self._begun:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        self.calls.append("release")
        if self.refuses:
            raise RuntimeError("not on this device")

    def wake_up(self) -> bool:
        self.calls.append("wake")
        return self.wakes


def test_memory_is_given_back_when_no_step_is_left_of_what_has_finished() -> None:
    llm = Llm()
    memory = CacheMemory(llm)
    memory.give_back()
    memory.give_back()
    assert memory.is_away
    assert llm.calls == ["step", "step", "step", ("sleep", 0), "release"]  # level 0 pauses, and frees nothing
    memory.take()
    memory.take()
    assert not memory.is_away
    assert llm.calls[5:] == ["wake"]


def test_an_engine_that_never_schedules_ahead_has_no_queue() -> None:
    llm = Llm(num_steps=0)
    llm.llm_engine.engine_core.engine_core.batch_queue = None
    llm._begun.clear()
    CacheMemory(llm).give_back()
    assert llm.calls == [("sleep", 0), "release"]


def test_an_engine_that_was_paused_in_vain_is_woken_before_it_generates() -> None:
    llm = Llm(num_steps=0, num_begun=0, refuses=True)
    memory = CacheMemory(llm)
    with pytest.raises(RuntimeError, match="not on this device"):
        memory.give_back()
    memory.take()
    assert llm.calls == [("sleep", 0), "release", "wake"]


def test_an_engine_without_its_cache_does_not_generate() -> None:
    memory = CacheMemory(Llm(wakes=False))
    memory.give_back()
    with pytest.raises(RuntimeError, match="did not take its key-value cache again"):
        memory.take()
    assert memory.is_away


def test_only_an_engine_that_can_rest_has_vllms_sleep_mode_and_only_on_a_gpu() -> None:
    gpu = EngineConfig(max_model_len=8, max_num_seqs=1)
    assert device_arguments(gpu, is_in_flight=False) == {"gpu_memory_utilization": 0.6}
    assert device_arguments(gpu, is_in_flight=False, can_rest=True) == {
        "gpu_memory_utilization": 0.6,
        "enable_sleep_mode": True,
    }
    cpu = EngineConfig(max_model_len=8, max_num_seqs=1, kv_cache_gib=1.0)
    assert "enable_sleep_mode" not in device_arguments(cpu, is_in_flight=False, can_rest=True)
