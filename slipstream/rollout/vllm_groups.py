"""The groups that one vLLM engine works on: requests go in, whole groups come out as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.rollout.engine import RunningTime
from slipstream.rollout.requests import GroupRequest


@dataclass
class _Group:
    request: GroupRequest
    outputs: dict[int, Any] = field(default_factory=dict)  # vLLM's, by sample

    @property
    def is_done(self) -> bool:
        return len(self.outputs) == len(self.request.seeds)


class GroupsUnderWay:
    """Requests of an engine whose core runs in this process.

    Args:
        engine: vLLM's `LLMEngine`.
        max_num_seqs: rollouts that it runs at once.
    """

    def __init__(self, engine: Any, *, max_num_seqs: int) -> None:
        self._engine = engine
        self._max_num_seqs = max_num_seqs
        self._num_started = 0
        self._places: dict[str, tuple[_Group, int]] = {}  # unfinished rollouts by vLLM's name for them
        self._lengths: dict[str, int] = {}  # their tokens so far
        self._running: dict[int, RunningTime] = {}
        self.before_step: Callable[[], None] | None = None

    def start(self, request: GroupRequest, params: Callable[[int], Any]) -> None:
        """Add a group's rollouts.

        Args:
            params: sampling parameters for a seed.
        """
        group = _Group(request)
        prompt = {"prompt_token_ids": list(request.prompt.token_ids)}
        for sample, seed in enumerate(request.seeds):
            name = f"rollout-{self._num_started}"
            self._num_started += 1
            self._places[name] = (group, sample)
            self._lengths[name] = 0
            self._engine.add_request(name, prompt, params(seed))

    def step(self) -> list[tuple[GroupRequest, Sequence[Any]]]:
        """One step of the engine: the groups that it completed, each with vLLM's outputs in the order of its seeds."""
        if self.before_step is not None:
            self.before_step()
        started_s = time.perf_counter()
        outputs = self._engine.step()
        self._note(outputs, time.perf_counter() - started_s)
        done = []
        for output in outputs:
            if not output.finished:
                continue
            del self._lengths[output.request_id]
            group, sample = self._places.pop(output.request_id)
            group.outputs[sample] = output
            if group.is_done:
                done.append((group.request, [group.outputs[i] for i in range(len(group.request.seeds))]))
        return done

    def take_running(self) -> tuple[RunningTime, ...]:
        """The steps since the last call of this, by running batch."""
        taken = tuple(self._running[num] for num in sorted(self._running))
        self._running.clear()
        return taken

    def _note(self, outputs: Sequence[Any], elapsed_s: float) -> None:
        """Count a step to its running batch, unless a rollout got its first tokens in it."""
        num_tokens, is_prefill = 0, False
        for output in outputs:
            before, length = self._lengths[output.request_id], len(output.outputs[0].token_ids)
            num_tokens += length - before
            is_prefill |= before == 0
            self._lengths[output.request_id] = length
        if num_tokens and not is_prefill:
            step = RunningTime(num_running=len(outputs), num_steps=1, num_tokens=num_tokens, elapsed_s=elapsed_s)
            known = self._running.get(step.num_running)
            self._running[step.num_running] = step if known is None else known.plus(step)

    def is_empty(self) -> bool:
        """Whether all groups are done."""
        return not self._places

    def has_room(self, num_rollouts: int) -> bool:
        """Whether so many more would run at once, and no rollout waits inside vLLM, for its KV cache is full."""
        running, waiting = self._engine.engine_core.engine_core.scheduler.get_request_counts()
        return waiting == 0 and running + num_rollouts <= self._max_num_seqs

    def drop(self) -> None:
        """Forget what is unfinished: what a call that failed left behind would come out of the next one."""
        if self._places:
            self._engine.abort_request(list(self._places))
            self._places.clear()
            self._lengths.clear()
