"""The groups that one vLLM engine works on: requests go in, whole groups come out as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.engine.protocol import RunningTime
from slipstream.engine.requests import GroupRequest
from slipstream.types import VersionSpan

Versions = tuple[int, int | None]  # of policy and draft


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One finished rollout."""

    output: Any  # vLLM's
    window_lengths: tuple[int, ...]  # tokens that each step gave
    versions: tuple[VersionSpan, ...]  # of all its tokens; one span at least


@dataclass
class _Group:
    request: GroupRequest
    params: Callable[[int], Any]
    drawn: dict[int, Drawn] = field(default_factory=dict)  # by sample

    @property
    def is_done(self) -> bool:
        return len(self.drawn) == len(self.request.seeds)


@dataclass
class _Rollout:
    """One unfinished rollout. `since` are the versions that it ran under, and how many tokens it had at their start."""

    group: _Group
    sample: int
    since: list[tuple[int, Versions]]
    window_lengths: list[int] = field(default_factory=list)
    length: int = 0
    is_computed: bool = False  # its prompt, and what it has drawn, stand in the KV cache

    def spans(self) -> tuple[VersionSpan, ...]:
        ends = [*(start for start, _ in self.since[1:]), self.length]
        found = [
            VersionSpan(policy_version=policy, draft_version=draft, num_tokens=end - start)
            for (start, (policy, draft)), end in zip(self.since, ends, strict=True)
        ]
        return tuple(span for span in found if span.num_tokens)


class GroupsUnderWay:
    """Requests of an engine whose core runs in this process.

    Args:
        engine: vLLM's `LLMEngine`, which has no step under way between two calls of its `step`.
        max_num_seqs: rollouts that it runs at once.
    """

    def __init__(self, engine: Any, *, max_num_seqs: int) -> None:
        self._engine = engine
        self._max_num_seqs = max_num_seqs
        self._num_started = 0
        self._versions: Versions = (0, None)
        self._num_salts = 0
        self._rollouts: dict[str, _Rollout] = {}  # unfinished ones by vLLM's name for them
        self._finished: list[_Group] = []  # completed while something else was asked for
        self._running: dict[int, RunningTime] = {}
        self.before_step: Callable[[], None] | None = None

    def start(self, request: GroupRequest, params: Callable[[int], Any]) -> None:
        """Add a group's rollouts.

        Args:
            params: sampling parameters for a seed.
        """
        group = _Group(request, params)
        for sample in range(len(request.seeds)):
            self._add(group, sample)

    def restart(self, index: int, seeds: Sequence[int]) -> int:
        """Start a group's unfinished rollouts anew, each with its place's seed; how many those were."""
        names = [name for name, rollout in self._rollouts.items() if rollout.group.request.index == index]
        for name in names:
            group = self._rollouts[name].group
            group.request = replace(group.request, seeds=tuple(seeds))
        self._start_anew(names)
        return len(names)

    def adopt(self, versions: Versions) -> None:
        """All tokens from now on are drawn by these versions of policy and draft."""
        self._versions = versions
        for rollout in self._rollouts.values():
            rollout.since.append((rollout.length, versions))

    def leave_cached_prefixes(self) -> None:
        """No rollout that starts from now on finds a block of the KV cache that was computed before.

        vLLM finds blocks by their tokens and the request's salt, so a new salt does it while old blocks are in use.
        What waits in vLLM without a token of its own is started anew, for it has the old salt.
        """
        self._num_salts += 1
        self._start_anew([name for name, rollout in self._rollouts.items() if not rollout.length])

    def forget_drafts(self) -> None:
        """The next step verifies no draft that was proposed before."""
        for request in self._engine.engine_core.engine_core.scheduler.running:
            request.spec_token_ids = []

    def expect_recomputation(self) -> None:
        """The KV cache of all that runs is gone: the steps that compute it anew are no decoding."""
        for rollout in self._rollouts.values():
            rollout.is_computed = False

    def step(self) -> list[tuple[GroupRequest, Sequence[Drawn]]]:
        """One step of the engine: the groups that it completed, each with its rollouts in the order of its seeds."""
        if not self._finished:
            self._step()
        done, self._finished = self._finished, []
        return [(group.request, [group.drawn[i] for i in range(len(group.request.seeds))]) for group in done]

    def aside(self, prompts: Sequence[Any], params: Any) -> list[Any]:
        """vLLM's outputs for these prompts, asked for beside the rollouts, which go on meanwhile."""
        names = [self._name("aside") for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, prompt, params)
        found: dict[str, Any] = {}
        while len(found) < len(names):
            found.update((output.request_id, output) for output in self._step() if output.finished)
        return [found[name] for name in names]

    def take_running(self) -> tuple[RunningTime, ...]:
        """The steps since the last call of this, by running batch."""
        taken = tuple(self._running[num] for num in sorted(self._running))
        self._running.clear()
        return taken

    def is_empty(self) -> bool:
        """Whether all groups are done, and have come out."""
        return not self._rollouts and not self._finished

    def has_room(self, num_rollouts: int) -> bool:
        """Whether so many more would run at once, and no rollout waits inside vLLM, for its KV cache is full."""
        running, waiting = self._engine.engine_core.engine_core.scheduler.get_request_counts()
        return waiting == 0 and running + num_rollouts <= self._max_num_seqs

    def drop(self) -> None:
        """Forget what is unfinished: what a call that failed left behind would come out of the next one."""
        if self._rollouts:
            self._engine.abort_request(list(self._rollouts))
            self._rollouts.clear()
        self._finished.clear()

    def _add(self, group: _Group, sample: int) -> None:
        name = self._name("rollout")
        prompt: dict[str, Any] = {"prompt_token_ids": list(group.request.prompt.token_ids)}
        if self._num_salts:
            prompt["cache_salt"] = str(self._num_salts)
        self._rollouts[name] = _Rollout(group, sample, since=[(0, self._versions)])
        self._engine.add_request(name, prompt, group.params(group.request.seeds[sample]))

    def _start_anew(self, names: Sequence[str]) -> None:
        if names:
            self._engine.abort_request(list(names))
        for rollout in [self._rollouts.pop(name) for name in names]:
            self._add(rollout.group, rollout.sample)

    def _name(self, kind: str) -> str:
        self._num_started += 1
        return f"{kind}-{self._num_started}"

    def _step(self) -> list[Any]:
        """One step; the outputs of what is no rollout."""
        if self.before_step is not None:
            self.before_step()
        started_s = time.perf_counter()
        outputs = self._engine.step()
        elapsed_s = time.perf_counter() - started_s
        own = [(output, self._rollouts[output.request_id]) for output in outputs if output.request_id in self._rollouts]
        self._note(own, elapsed_s, is_decoding=len(own) == len(outputs))
        for output, rollout in own:
            if not output.finished:
                continue
            del self._rollouts[output.request_id]
            rollout.group.drawn[rollout.sample] = Drawn(
                output=output, window_lengths=tuple(rollout.window_lengths), versions=rollout.spans()
            )
            if rollout.group.is_done:
                self._finished.append(rollout.group)
        return [output for output in outputs if not output.request_id.startswith("rollout-")]

    def _note(self, outputs: Sequence[tuple[Any, _Rollout]], elapsed_s: float, *, is_decoding: bool) -> None:
        """Count a step's tokens, and the step to its running batch unless something else was computed in it."""
        num_tokens = 0
        for output, rollout in outputs:
            length = len(output.outputs[0].token_ids)
            if length > rollout.length:
                rollout.window_lengths.append(length - rollout.length)
            num_tokens += length - rollout.length
            is_decoding &= rollout.is_computed
            rollout.length, rollout.is_computed = length, True
        if num_tokens and is_decoding:
            step = RunningTime(num_running=len(outputs), num_steps=1, num_tokens=num_tokens, elapsed_s=elapsed_s)
            known = self._running.get(step.num_running)
            self._running[step.num_running] = step if known is None else known.plus(step)
