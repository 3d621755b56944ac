"""Parts of a vLLM engine whose core runs in this process: the groups under way, its drafts, the memory of its cache.

Requests go in, and whole groups come out as they finish.

vLLM looks the draft length up at every step, by the number of rollouts in it, for the draft that the next step verifies
(`Scheduler.dynamic_sd_lookup`). At length 0 the draft's first pass still runs, which keeps its KV cache whole: its cost
remains, and a later longer draft starts from what it would have started from anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config import require
from slipstream.engine.acceptance import AcceptanceCounters, read_counters
from slipstream.engine.protocol import RunningTime, Trace
from slipstream.engine.requests import GroupRequest
from slipstream.records.steps import ScheduleEntry
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup, VersionSpan

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
        """Return True if all groups are done, and have come out."""
        return not self._rollouts and not self._finished

    def has_room(self, num_rollouts: int) -> bool:
        """Return True if so many more would run at once: a full KV cache has rollouts wait inside vLLM."""
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


def group_of(request: GroupRequest, drawn: Sequence[Drawn]) -> RolloutGroup:
    """The rollouts of a request."""
    return RolloutGroup(prompt=request.prompt, rollouts=tuple(_rollout(each, request.prompt) for each in drawn))


def trace_of(prompt: Prompt, drawn: Drawn) -> Trace:
    """A rollout, and which of its tokens came together."""
    return Trace(
        prompt_token_ids=prompt.token_ids,
        token_ids=tuple(drawn.output.outputs[0].token_ids),
        window_lengths=drawn.window_lengths,
        policy_version=drawn.versions[0].policy_version,
        draft_version=drawn.versions[0].draft_version,
        versions=_if_several(drawn.versions),
    )


def _rollout(drawn: Drawn, prompt: Prompt) -> Rollout:
    completion = drawn.output.outputs[0]
    logprobs = tuple(completion.logprobs.logprobs)
    assert len(logprobs) == len(completion.token_ids), "one logprob a token: the sampled one's"
    return Rollout(
        prompt_id=prompt.id,
        token_ids=tuple(completion.token_ids),
        rollout_logprobs=logprobs,
        finish_reason=FinishReason(completion.finish_reason),
        policy_version=drawn.versions[0].policy_version,
        draft_version=drawn.versions[0].draft_version,
        versions=_if_several(drawn.versions),
    )


def _if_several(versions: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    return versions if len(versions) > 1 else ()


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
        self.is_asleep = False

    def sleep(self) -> None:
        """Free the memory until `wake`, which precedes every generation; nothing if it is free already.

        Nothing may be under way.

        Raises:
            RuntimeError: vLLM cannot on this device, or was started without its sleep mode.
        """
        if self.is_asleep:
            return
        self._drain()
        self.is_asleep = True  # from here on nothing is scheduled, whatever becomes of the memory
        self._llm.sleep(level=0)
        self._llm.release_kv_cache_memory()

    def wake(self) -> None:
        """Have the cache again, if it sleeps, with nothing in it.

        Raises:
            RuntimeError: the device has no room for it.
        """
        if not self.is_asleep:
            return
        if not self._llm.wake_up():
            raise RuntimeError("vLLM did not take its key-value cache again")
        self.is_asleep = False

    def _drain(self) -> None:
        """Take the steps that nobody waited for.

        vLLM lets go of what has finished in the step after it, and with asynchronous scheduling a step that was begun
        too early is still under way: it releases no memory until both are done.
        """
        engine = self._llm.llm_engine
        core = engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            engine.step()


class Drafting:
    """The drafts of an engine whose core runs in this process.

    It is one of vLLM's stat loggers, for vLLM counts how many drafts had a token at each position but exports no such
    metric. Drafts differ in length under a table.

    Args:
        llm: vLLM's `LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._drafted: list[int] = [0] * llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens
        llm.llm_engine.logger_manager.stat_loggers.append(self)

    def counters(self) -> AcceptanceCounters:
        """Since the engine's start."""
        return read_counters(self._llm.get_metrics(), drafted_by_position=self._drafted)

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Replace the table; nothing may be under way.

        Raises:
            ConfigError: vLLM was started without a table, and may have captured graphs for one length alone; or the new
                one asks for longer drafts than it has room for.
        """
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        require(
            scheduler.dynamic_sd_lookup is not None,
            "draft.length",
            "can be changed only in an engine that started with a table",
            None,
            "start it with a schedule",
        )
        longest = max(entry.num_speculative_tokens for entry in schedule)
        require(longest <= len(self._drafted), "draft.length", f"must be at most {len(self._drafted)}", longest)
        scheduler.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
            [(entry.batch_from, entry.batch_to, entry.num_speculative_tokens) for entry in schedule],
            vllm_max_batch_size=scheduler.scheduler_config.max_num_seqs,
            vllm_num_speculative_tokens=len(self._drafted),
        )

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Count one step's drafts; vLLM calls each of its stat loggers (`AggregateStatLoggerBase`)."""
        del iteration_stats
        stats = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._drafted = [a + b for a, b in zip(self._drafted, stats.num_draft_tokens_per_pos, strict=True)]

    def log(self, *_: Any, **__: Any) -> None:
        """Log nothing; vLLM calls each of its stat loggers by these names."""

    log_engine_initialized = record_sleep_state = log
