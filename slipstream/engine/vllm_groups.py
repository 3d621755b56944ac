"""Parts of a vLLM engine whose core runs in this process: groups in flight, draft lengths, memory of the KV cache.

At every step vLLM looks up the draft length for the next step by the number of rollouts
(`Scheduler.dynamic_sd_lookup`). At length 0 the draft's first pass still runs, which keeps its KV cache complete. The
cost of that pass remains, and a later longer draft finds the same cache as without the pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config import require
from slipstream.engine.acceptance import acceptance_of
from slipstream.engine.protocol import GroupRequest, RunningTime, Trace, summed
from slipstream.records.steps import AcceptanceStats, ScheduleEntry
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup, VersionSpan

Versions = tuple[int, int | None]  # of policy and draft


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """A finished rollout."""

    output: Any  # vLLM's `RequestOutput`
    window_lengths: tuple[int, ...]  # tokens from each step
    versions: tuple[VersionSpan, ...]  # versions of all tokens, in at least one span


@dataclass
class _Group:
    request: GroupRequest
    params: Callable[[int], Any]
    finished: dict[int, FinishedRollout] = field(default_factory=dict)  # by sample


@dataclass
class _Rollout:
    """An unfinished rollout; `since` holds each version pair with the number of tokens at its start."""

    group: _Group
    sample: int
    since: list[tuple[int, Versions]]
    window_lengths: list[int] = field(default_factory=list)
    length: int = 0
    is_computed: bool = False  # True if its prompt and tokens are in the KV cache

    def spans(self) -> tuple[VersionSpan, ...]:
        ends = [*(start for start, _ in self.since[1:]), self.length]
        found = [
            VersionSpan(policy_version=policy, draft_version=draft, num_tokens=end - start)
            for (start, (policy, draft)), end in zip(self.since, ends, strict=True)
        ]
        return tuple(span for span in found if span.num_tokens)


class GroupsUnderWay:
    """Groups in flight on an engine whose core runs in this process.

    Args:
        engine: vLLM's `LLMEngine`, which runs no step between two calls of `step`.
        max_num_seqs: rollouts that the engine runs at once.
    """

    def __init__(self, engine: Any, *, max_num_seqs: int) -> None:
        self._engine = engine
        self._max_num_seqs = max_num_seqs
        self._num_started = 0
        self._versions: Versions = (0, None)
        self._num_salts = 0
        self._rollouts: dict[str, _Rollout] = {}  # unfinished rollouts by vLLM's request id
        self._finished: list[_Group] = []  # complete groups that `step` has not returned
        self._running: list[RunningTime] = []

    def start(self, request: GroupRequest, params: Callable[[int], Any]) -> None:
        """Add a group's rollouts; `params` makes the sampling parameters of each from its seed."""
        group = _Group(request, params)
        for sample in range(len(request.seeds)):
            self._add(group, sample)

    def restart(self, index: int, seeds: Sequence[int]) -> int:
        """Restart a group's unfinished rollouts, each with the seed of its place; returns the number of restarts."""
        names = [name for name, rollout in self._rollouts.items() if rollout.group.request.index == index]
        for name in names:
            group = self._rollouts[name].group
            group.request = replace(group.request, seeds=tuple(seeds))
        self._start_anew(names)
        return len(names)

    def adopt(self, versions: Versions) -> None:
        """Set the versions of policy and draft for all tokens from now on."""
        self._versions = versions
        for rollout in self._rollouts.values():
            rollout.since.append((rollout.length, versions))

    def leave_cached_prefixes(self) -> None:
        """Hide the present blocks of the KV cache from all rollouts that start from now on.

        vLLM finds cached blocks by tokens and the request's salt, so a new salt hides blocks that are still in use.
        Rollouts that wait in vLLM without a token have the old salt and are restarted.
        """
        self._num_salts += 1
        self._start_anew([name for name, rollout in self._rollouts.items() if not rollout.length])

    def forget_drafts(self) -> None:
        """Drop the drafts that the next step would verify."""
        for request in self._engine.engine_core.engine_core.scheduler.running:
            request.spec_token_ids = []

    def expect_recomputation(self) -> None:
        """Note that the KV cache of all rollouts is lost, so that steps which recompute it do not count as decoding."""
        for rollout in self._rollouts.values():
            rollout.is_computed = False

    def step(self) -> list[tuple[GroupRequest, Sequence[FinishedRollout]]]:
        """Run one step of the engine; returns the complete groups, with rollouts in the order of the seeds."""
        if not self._finished:
            self._step()
        done, self._finished = self._finished, []
        return [(group.request, [group.finished[i] for i in range(len(group.request.seeds))]) for group in done]

    def aside(self, prompts: Sequence[Any], params: Any) -> list[Any]:
        """Run these prompts beside the rollouts in flight; returns vLLM's outputs."""
        names = [self._name("aside") for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, prompt, params)
        found: dict[str, Any] = {}
        while len(found) < len(names):
            found.update((output.request_id, output) for output in self._step() if output.finished)
        return [found[name] for name in names]

    def take_running(self) -> tuple[RunningTime, ...]:
        """Return the decoding steps since the last call, by running batch."""
        taken, self._running = summed(self._running), []
        return taken

    def is_empty(self) -> bool:
        """Return True if no group is in flight, and none waits to be returned."""
        return not self._rollouts and not self._finished

    def has_room(self, num_rollouts: int) -> bool:
        """Return True if this many more rollouts would run at once; a full KV cache makes rollouts wait in vLLM."""
        running, waiting = self._engine.engine_core.engine_core.scheduler.get_request_counts()
        return waiting == 0 and running + num_rollouts <= self._max_num_seqs

    def drop(self) -> None:
        """Drop all groups, as the next call would return the groups of a failed call."""
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
        """Run one step; returns the outputs of other requests than rollouts."""
        started_s = time.perf_counter()
        outputs = self._engine.step()
        elapsed_s = time.perf_counter() - started_s
        own = [(output, self._rollouts[output.request_id]) for output in outputs if output.request_id in self._rollouts]
        self._note(own, elapsed_s, is_decoding=len(own) == len(outputs))
        for output, rollout in own:
            if not output.finished:
                continue
            del self._rollouts[output.request_id]
            rollout.group.finished[rollout.sample] = FinishedRollout(
                output=output, window_lengths=tuple(rollout.window_lengths), versions=rollout.spans()
            )
            if len(rollout.group.finished) == len(rollout.group.request.seeds):
                self._finished.append(rollout.group)
        return [output for output in outputs if not output.request_id.startswith("rollout-")]

    def _note(self, outputs: Sequence[tuple[Any, _Rollout]], elapsed_s: float, *, is_decoding: bool) -> None:
        """Count the tokens of a step, and count the step for its running batch if it decoded and computed no prompt."""
        num_tokens = 0
        for output, rollout in outputs:
            length = len(output.outputs[0].token_ids)
            if length > rollout.length:
                rollout.window_lengths.append(length - rollout.length)
            num_tokens += length - rollout.length
            is_decoding &= rollout.is_computed
            rollout.length, rollout.is_computed = length, True
        if num_tokens and is_decoding:
            self._running.append(
                RunningTime(num_running=len(outputs), num_steps=1, num_tokens=num_tokens, elapsed_s=elapsed_s)
            )


def group_of(request: GroupRequest, finished: Sequence[FinishedRollout]) -> RolloutGroup:
    """Make the rollout group of a request."""
    return RolloutGroup(prompt=request.prompt, rollouts=tuple(_rollout(each, request.prompt) for each in finished))


def trace_of(prompt: Prompt, finished: FinishedRollout) -> Trace:
    """Make the trace of a rollout."""
    return Trace(
        prompt_token_ids=prompt.token_ids,
        token_ids=tuple(finished.output.outputs[0].token_ids),
        window_lengths=finished.window_lengths,
        policy_versions=tuple(span.policy_version for span in finished.versions for _ in range(span.num_tokens)),
    )


def _rollout(finished: FinishedRollout, prompt: Prompt) -> Rollout:
    completion, first = finished.output.outputs[0], finished.versions[0]
    logprobs = tuple(completion.logprobs.logprobs)
    assert len(logprobs) == len(completion.token_ids), "one logprob a token: the sampled one's"
    routes, num_inputs = completion.routed_experts, len(prompt.token_ids) + len(completion.token_ids) - 1
    if routes is not None and len(routes) != num_inputs:  # None from an engine that returns none
        raise RuntimeError(f"vLLM must return the experts of each of {num_inputs} computed tokens, got {len(routes)}")
    return Rollout(
        prompt_id=prompt.id,
        token_ids=tuple(completion.token_ids),
        rollout_logprobs=logprobs,
        finish_reason=FinishReason(completion.finish_reason),
        policy_version=first.policy_version,
        draft_version=first.draft_version,
        versions=finished.versions if len(finished.versions) > 1 else (),
        routes=routes,
    )


class CacheMemory:
    """KV cache of an engine whose core runs in this process, on a GPU and with vLLM's sleep mode.

    Weights, draft and CUDA graphs stay, so a sleeping engine can be refitted and fingerprinted. The cached prefixes are
    lost; new weights would have made them stale.

    Source: vLLM 0.32, `v1/engine/core.py release_kv_cache_memory` and `wake_up`, `device_allocator/cumem.py`.
    """

    def __init__(self, llm: Any) -> None:
        """Take vLLM's `LLM`, awake."""
        self._llm = llm
        self.is_asleep = False

    def sleep(self) -> None:
        """Free the memory of the cache until `wake`; no rollout may be in flight."""
        if self.is_asleep:
            return
        engine = self._llm.llm_engine
        core = engine.engine_core.engine_core
        # vLLM frees no memory before it has removed finished requests, in the step after their end, and before it has
        # completed the step that asynchronous scheduling may have begun too many.
        while core.scheduler.has_requests() or core.batch_queue:
            engine.step()
        self.is_asleep = True  # set first, as a failure below leaves the cache unusable
        self._llm.sleep(level=0)
        self._llm.release_kv_cache_memory()

    def wake(self) -> None:
        """Allocate an empty cache if the engine sleeps."""
        if not self.is_asleep:
            return
        if not self._llm.wake_up():
            raise RuntimeError("vLLM did not take its key-value cache again")
        self.is_asleep = False


class StepCounts:
    """Drafts and preemptions of an engine whose core runs in this process, and the lengths of its drafts.

    The class is one of vLLM's stat loggers, because vLLM counts drafts by position but exports no such metric, and as
    its metrics take milliseconds to read. Under a schedule drafts differ in length. A rollout is preempted where the KV
    cache is full, and its cache is recomputed later. A refit in flight that recomputes all caches preempts what runs,
    and does not count.
    """

    def __init__(self, llm: Any) -> None:
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        told = llm.llm_engine.vllm_config.speculative_config
        self._longest = None if told is None else told.num_speculative_tokens  # draft
        self._verified: list[Any] = []  # counts of the steps since the last call of `take_acceptance`
        self._num_preemptions = 0
        llm.llm_engine.logger_manager.stat_loggers.append(self)

    def take_acceptance(self) -> AcceptanceStats | None:
        """Return the acceptance since the last call; None of an engine that does not speculate."""
        verified, self._verified = self._verified, []
        return None if self._longest is None else acceptance_of(verified, num_positions=self._longest)

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Replace the schedule; no rollout may be in flight.

        It is refused where vLLM was started without a schedule, and may have captured graphs for one length alone.
        """
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        require(self._longest is not None, "draft.length", "needs an engine that speculates", None)
        assert self._longest is not None
        rule = "can be changed only in an engine that started with a table"
        has_table = self._scheduler.dynamic_sd_lookup is not None
        require(has_table, "draft.length", rule, None, "start it with a schedule")
        longest = max(entry.num_speculative_tokens for entry in schedule)
        require(longest <= self._longest, "draft.length", f"must be at most {self._longest}", longest)
        self._scheduler.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
            [(entry.batch_from, entry.batch_to, entry.num_speculative_tokens) for entry in schedule],
            vllm_max_batch_size=self._scheduler.scheduler_config.max_num_seqs,
            vllm_num_speculative_tokens=self._longest,
        )

    def leave_out(self, preempted: Sequence[Any]) -> None:
        """Remove the last event of these requests, their preemption, which vLLM reports if they ever go on."""
        for request in preempted:
            request.events.pop()

    def take_preemptions(self) -> int:
        """Return the number of preemptions since the last call."""
        num, self._num_preemptions = self._num_preemptions, 0
        return num

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Count one step; vLLM calls each of its stat loggers (`AggregateStatLoggerBase`)."""
        self._num_preemptions += 0 if iteration_stats is None else iteration_stats.num_preempted_reqs
        stats = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._verified.append(stats)

    def log(self, *_: Any, **__: Any) -> None:
        """Log nothing; vLLM calls these methods of each stat logger."""

    log_engine_initialized = record_sleep_state = log
