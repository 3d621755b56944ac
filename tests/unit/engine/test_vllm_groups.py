"""Groups under way in an engine that finishes what it is told to, its table of draft lengths, and its memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.config import ConfigError
from slipstream.engine.acceptance import acceptance_of
from slipstream.engine.protocol import GroupRequest
from slipstream.engine.vllm_groups import CacheMemory, FinishedRollout, GroupsUnderWay, StepCounts, group_of, trace_of
from slipstream.records.steps import ScheduleEntry
from slipstream.types import Prompt, VersionSpan


class Decoding:
    """vLLM's engine as far as it is used; a step says how many tokens each rollout has after it, None if it is out."""

    def __init__(self, *steps: tuple[int | None, ...], ends: int | tuple[int, ...] = 9) -> None:
        self.names: list[str] = []
        self.prompts: list[Any] = []
        self.seeds: list[Any] = []
        self.aborted: list[str] = []
        self.running: list[Any] = []
        self.counts: tuple[int, int] = (0, 0)  # running, waiting
        self.steps, self.ends = list(steps), ends
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.names.append(name)
        self.prompts.append(prompt)
        self.seeds.append(params)

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def step(self) -> list[Any]:
        lengths = list(zip(self.names, self.steps.pop(0), strict=False))
        ends = (self.ends,) * len(lengths) if isinstance(self.ends, int) else self.ends
        return [
            SimpleNamespace(request_id=name, finished=length == end, outputs=[SimpleNamespace(token_ids=[7] * length)])
            for (name, length), end in zip(lengths, ends, strict=True)
            if length
        ]


def request(index: int, *seeds: int) -> GroupRequest:
    prompt = Prompt(id=str(index), text="", token_ids=(2, index), answer="")
    return GroupRequest(index=index, prompt=prompt, seeds=seeds)


def under_way(engine: Any, *requests: GroupRequest) -> GroupsUnderWay:
    groups = GroupsUnderWay(engine, max_num_seqs=8)
    for each in requests:
        groups.start(each, lambda seed: seed)
    return groups


def test_each_rollout_is_asked_for_with_its_own_seed() -> None:
    engine = Decoding()
    GroupsUnderWay(engine, max_num_seqs=8).start(request(5, 11, 12), lambda seed: {"seed": seed})
    assert engine.prompts == [{"prompt_token_ids": [2, 5]}] * 2
    assert engine.seeds == [{"seed": 11}, {"seed": 12}]
    assert len(set(engine.names)) == 2


def test_a_group_comes_out_whole_in_the_order_of_its_seeds() -> None:
    engine = Decoding((1, 1, 2, 1), (1, 2, None, 2), (2,), ends=2)
    groups = under_way(engine, request(0, 1, 2), request(1, 1, 2))
    found = [[(done.index, [each.output.request_id for each in own]) for done, own in groups.step()] for _ in range(3)]
    assert found == [[], [(1, engine.names[2:])], [(0, engine.names[:2])]]
    assert groups.is_empty()


def test_there_is_room_while_all_would_run_and_none_waits() -> None:
    engine = Decoding()
    groups = under_way(engine)
    engine.counts = (6, 0)
    assert groups.has_room(2)
    assert not groups.has_room(3)
    engine.counts = (5, 1)
    assert not groups.has_room(2)


def test_drafts_that_were_proposed_before_are_forgotten() -> None:
    engine = Decoding()
    engine.running = [SimpleNamespace(spec_token_ids=[4, 5]), SimpleNamespace(spec_token_ids=[])]
    under_way(engine).forget_drafts()
    assert [running.spec_token_ids for running in engine.running] == [[], []]


def test_what_was_left_behind_is_aborted_once_and_names_are_not_used_again() -> None:
    engine = Decoding((1, 0), ends=1)
    groups = under_way(engine, request(0, 1, 2))
    groups.step()
    groups.drop()
    groups.drop()
    assert engine.aborted == [engine.names[1]]
    assert groups.is_empty()
    groups.start(request(1, 1, 2), lambda seed: seed)
    assert len(set(engine.names)) == 4


@pytest.mark.parametrize(
    ("steps", "counted"),
    [
        # the prompts' step is left out; then 2 + 1 and 1 + 2 tokens of two rollouts, and one of one
        (((1, 1), (3, 2), (4, 4), (5, None)), [(1, 1, 1), (2, 2, 6)]),
        # a step in which another rollout gets its first token is left out too
        (((1, 0), (2, 1), (3, 2)), [(2, 1, 2)]),
        (((0, 1), (1, 2), (2, 3)), [(2, 1, 2)]),
    ],
)
def test_steps_are_counted_by_how_many_rollouts_ran_in_them_but_those_of_a_prompt(
    steps: tuple[tuple[int | None, ...], ...], counted: list[tuple[int, int, int]]
) -> None:
    groups = under_way(Decoding(*steps, ends=5), request(0, 1, 2))
    for _ in steps:
        groups.step()
    running = groups.take_running()
    assert [(time.num_running, time.num_steps, time.num_tokens) for time in running] == counted
    assert all(0.0 < time.elapsed_s < 60.0 for time in running)
    assert groups.take_running() == ()


def spans(finished: FinishedRollout) -> list[tuple[int, int | None, int]]:
    return [(span.policy_version, span.draft_version, span.num_tokens) for span in finished.versions]


def test_tokens_carry_the_versions_that_drew_them_and_the_windows_that_they_came_in() -> None:
    engine = Decoding((1, 0), (3, 1), (4, 4), (None, 5), ends=(4, 5))
    groups = under_way(engine)
    groups.adopt((1, 11))
    groups.start(request(0, 1, 2), lambda seed: seed)
    groups.step()
    groups.adopt((2, 12))
    groups.step()
    groups.adopt((3, 13))
    groups.adopt((4, 14))  # none was sampled under 3
    groups.step()
    ((_, (first, second)),) = groups.step()
    assert spans(first) == [(1, 11, 1), (2, 12, 2), (4, 14, 1)]
    traced = trace_of(request(0).prompt, first)
    assert (traced.policy_versions, traced.window_lengths) == ((1, 2, 2, 4), (1, 2, 1))
    assert spans(second) == [(2, 12, 1), (4, 14, 4)]  # under version 1 it waited
    assert second.window_lengths == (1, 3, 1)


def test_a_step_that_gives_a_rollout_no_token_is_no_window_of_it() -> None:
    engine = Decoding((1, 1), (3, 2), (3, 4), (5, 5), ends=5)
    groups = under_way(engine, request(0, 1, 2))
    for _ in range(3):
        assert groups.step() == []
    ((_, (first, second)),) = groups.step()
    assert (first.window_lengths, second.window_lengths) == ((1, 2, 2), (1, 1, 2, 1))


def test_a_new_salt_keeps_what_starts_later_and_what_waits_from_old_blocks() -> None:
    engine = Decoding((1, 0), ends=9)
    groups = under_way(engine, request(0, 1, 2))
    groups.step()
    groups.leave_cached_prefixes()
    groups.start(request(1, 3), lambda seed: seed)
    groups.leave_cached_prefixes()
    salts = [prompt.get("cache_salt") for prompt in engine.prompts]
    # Two without; the second waited and starts anew, beside another group; then these two once more.
    assert salts == [None, None, "1", "1", "2", "2"]
    assert engine.aborted == [engine.names[1], engine.names[2], engine.names[3]]


def test_unfinished_rollouts_start_anew_with_the_seeds_of_their_places() -> None:
    engine = Decoding((4, 1, 1), ends=4)
    groups = under_way(engine, request(7, 1, 2), request(8, 5))
    groups.step()
    groups.adopt((1, None))
    assert groups.restart(7, (21, 22)) == 1
    assert engine.seeds == [1, 2, 5, 22]
    assert engine.aborted == [engine.names[1]]
    engine.steps = [(None, None, None, 4)]
    ((done, (first, second)),) = groups.step()
    assert done.index == 7
    assert (spans(first), spans(second)) == ([(0, None, 4)], [(1, None, 4)])


def test_steps_that_compute_a_cache_anew_are_no_decoding() -> None:
    engine = Decoding((1,), (2,), (3,), (4,), ends=9)
    groups = under_way(engine, request(0, 1))
    groups.step()
    groups.step()
    groups.expect_recomputation()
    groups.step()
    groups.step()
    assert [(time.num_steps, time.num_tokens) for time in groups.take_running()] == [(2, 2)]


def test_what_is_asked_beside_the_rollouts_costs_none_of_them() -> None:
    engine = Decoding((2, 1), (None, 2), ends=2)
    groups = under_way(engine, request(0, 1))
    (answer,) = groups.aside([{"prompt_token_ids": [2]}], {"max_tokens": 2})
    assert answer.request_id == engine.names[1]
    assert (engine.prompts[1], engine.seeds[1]) == ({"prompt_token_ids": [2]}, {"max_tokens": 2})
    assert not groups.is_empty()  # it was completed meanwhile
    ((done, _),) = groups.step()
    assert done.index == 0
    assert groups.is_empty()


def drafting_llm(k: int, lookup: list[int] | None = None) -> Any:
    """vLLM's `LLM` as far as it is used; up to 4 rollouts at once."""
    scheduler = SimpleNamespace(dynamic_sd_lookup=lookup, scheduler_config=SimpleNamespace(max_num_seqs=4))
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=k)),
        logger_manager=SimpleNamespace(stat_loggers=[]),
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)),
    )
    return SimpleNamespace(llm_engine=engine)


def entry(start: int, end: int, k: int) -> ScheduleEntry:
    return ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k)


def test_a_table_is_spread_over_all_running_batches_and_carried_on_beyond_its_end() -> None:
    llm = drafting_llm(5, [0, 5, 5, 5, 5])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    StepCounts(llm).draft_by([entry(1, 2, 5), entry(3, 3, 1)])
    assert scheduler.dynamic_sd_lookup == [0, 5, 5, 1, 1]  # the first is for no rollout at all
    StepCounts(llm).draft_by([entry(1, 1, 0)])
    assert scheduler.dynamic_sd_lookup == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("table", "k", "message"),
    [
        (None, 0, r"draft.length can be changed only in an engine that started with a table"),
        ([0, 5, 5, 5, 5], 7, r"draft.length must be at most 5, got 7"),
    ],
    ids=["no table", "no room"],
)
def test_a_length_for_which_an_engine_did_not_start_is_refused(table: list[int] | None, k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepCounts(drafting_llm(5, table)).draft_by([entry(1, 1, k)])


def test_preemptions_count_where_the_cache_was_full_and_not_where_a_refit_recomputes_all() -> None:
    llm = drafting_llm(2)
    preemptions = StepCounts(llm)
    (logger,) = llm.llm_engine.logger_manager.stat_loggers
    for num in (2, 0, 1):
        logger.record(None, SimpleNamespace(num_preempted_reqs=num), engine_idx=0)
    logger.record(None, None, engine_idx=0)  # a step without requests
    assert [preemptions.take_preemptions(), preemptions.take_preemptions()] == [3, 0]
    events = ["queued", "preempted"], ["preempted", "preempted"]  # those of the refit are the last
    preemptions.leave_out([SimpleNamespace(events=of_request) for of_request in events])
    assert events == (["queued"], ["preempted"])


def test_drafts_are_counted_by_position_over_the_steps_since_the_last_call() -> None:
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    llm = drafting_llm(2)
    counts = StepCounts(llm)
    (logger,) = llm.llm_engine.logger_manager.stat_loggers
    verified = SpecDecodingStats.new(2)
    for drafted, accepted in ((2, 2), (1, 0)):
        verified.observe_draft(num_draft_tokens=drafted, num_accepted_tokens=accepted)
    for stats in (verified, None, verified):  # the second step verified nothing
        logger.record(SimpleNamespace(spec_decoding_stats=stats), None, engine_idx=0)
    found = counts.take_acceptance()
    assert found is not None
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (4, 6, 4)
    assert (found.drafted_by_position, found.accepted_by_position) == ((4, 2), (2, 2))
    assert counts.take_acceptance() == acceptance_of([], num_positions=2)
    llm.llm_engine.vllm_config.speculative_config = None
    assert StepCounts(llm).take_acceptance() is None


class Llm:
    """vLLM with steps left over of a generation that has ended, which refuses as vLLM does."""

    def __init__(
        self, *, num_steps: int = 2, num_begun: int | None = 1, wakes: bool = True, refuses: bool = False
    ) -> None:
        self.calls: list[Any] = []
        self.wakes, self.refuses = wakes, refuses
        self._num_steps = num_steps
        self._begun = None if num_begun is None else [object()] * num_begun
        scheduler = SimpleNamespace(has_requests=lambda: self._num_steps > 0)
        core = SimpleNamespace(scheduler=scheduler, batch_queue=self._begun)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), step=self._step)

    def _step(self) -> list[Any]:
        self.calls.append("step")
        if self._num_steps:
            self._num_steps -= 1
        elif self._begun:
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
    memory.sleep()
    memory.sleep()
    assert memory.is_asleep
    assert llm.calls == ["step", "step", "step", ("sleep", 0), "release"]  # level 0 pauses, and frees nothing
    memory.wake()
    memory.wake()
    assert not memory.is_asleep
    assert llm.calls[5:] == ["wake"]


def test_an_engine_that_was_paused_in_vain_is_woken_before_it_generates() -> None:
    llm = Llm(num_steps=0, num_begun=None, refuses=True)  # it never schedules ahead, and has no queue
    memory = CacheMemory(llm)
    with pytest.raises(RuntimeError, match="not on this device"):
        memory.sleep()
    memory.wake()
    assert llm.calls == [("sleep", 0), "release", "wake"]


def test_an_engine_without_its_cache_does_not_generate() -> None:
    memory = CacheMemory(Llm(wakes=False))
    memory.sleep()
    with pytest.raises(RuntimeError, match="did not take its key-value cache again"):
        memory.wake()
    assert memory.is_asleep


def test_routes_are_those_of_vllms_own_output_one_row_a_computed_token() -> None:
    """The prompt has two tokens and the response three, of which the last is never computed."""
    from vllm.outputs import CompletionOutput

    routes = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # [tokens, layers, experts a token]
    flat = SimpleNamespace(logprobs=[-0.5, -0.25, -0.125])

    def finished(routed_experts: np.ndarray | None) -> FinishedRollout:
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=[7, 8, 3],
            cumulative_logprob=None,
            logprobs=flat,  # type: ignore[arg-type]  # as far as it is read
            routed_experts=routed_experts,
            finish_reason="stop",
        )
        spans = (VersionSpan(policy_version=0, draft_version=None, num_tokens=3),)
        return FinishedRollout(output=SimpleNamespace(outputs=[completion]), window_lengths=(3,), versions=spans)

    whole, none = group_of(request(5, 11, 12), [finished(routes), finished(None)]).rollouts
    assert whole.routes is routes
    assert none.routes is None
    with pytest.raises(RuntimeError, match="experts of each of 4 computed tokens, got 3"):
        group_of(request(5, 11), [finished(routes[1:])])
