"""In flight: engines never stop. New weights enter between two of their iterations, and what is under way goes on.

Groups are submitted in the order of the prompts and come back in any. Of each is known which version it was submitted
under, and no token of it is older. A batch takes first the groups that the steps after it could not take any more, for
they would be older than the lag allows or too many at once (`age`), and waits for them; then others in the order in
which they came. So no group is left out for being long, and none is trained on that is too old.

Backpressure is the lag bound alone: while the engines hold version v, (v + lag + 1) batches of groups are submitted in
all.

Legend: `P` prompts a step; group `i` is prompt `i % P` of batch `i // P`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from slipstream.data.prompts import PromptStream
from slipstream.engine.acceptance import combine
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult, Portion
from slipstream.engine.requests import GroupRequest, group_requests, rollout_seed
from slipstream.grpo.loop_config import LoopConfig, TooOld
from slipstream.records.steps import AcceptanceStats, RefitCheck, StepRecord
from slipstream.refit.gate import Export
from slipstream.rewards.verifier import RewardResult
from slipstream.train.asynchronous import age
from slipstream.train.asynchronous.buffer import Buffer, Generated, Scored, score_all
from slipstream.train.asynchronous.meeting import Handover, Meeting
from slipstream.train.asynchronous.pending import Pending, Tally
from slipstream.train.asynchronous.timing import Stopwatch
from slipstream.train.metrics import StageClock
from slipstream.train.step import Trainer, Versions, engine_seed, recent
from slipstream.types import Arm, RolloutGroup

MAX_ADVANCE_S = 0.05
"""How long new weights may wait for engines that could take them."""


class FlyingEngines(Protocol):
    """Engines as `InFlightEngine` has them, which take new weights and outlive the loss of one."""

    def export(self, version: int, *, draft_version: int | None) -> Export:
        """See `RefitGate.export`; it may be called beside everything else."""
        ...

    def deliver(self, export: Export) -> RefitCheck:
        """See `RefitGate.deliver`."""
        ...

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        """See `InFlightEngine.submit`."""
        ...

    def advance(self, *, max_s: float) -> Portion:
        """See `InFlightEngine.advance`."""
        ...

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        """See `InFlightEngine.restart`."""
        ...

    def take_num_regenerated(self) -> int:
        """Rollouts that were started anew since the last call of this, for an engine was lost."""
        ...

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        """See `InFlightEngine.under_way`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Published:
    """They have them."""

    refit: RefitCheck
    num_restarted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Advanced:
    """What a call of `advance` did beside groups."""

    acceptance: AcceptanceStats | None
    num_regenerated: int


@dataclass(kw_only=True)
class _Shared:
    """What the loops hand to each other.

    Attributes:
        started: by group that was submitted and not trained on, the version that it was submitted under; read and
            changed under the meeting's lock.
    """

    orders: Handover[Export]
    published: Handover[_Published]
    generated: Handover[Generated]
    advanced: Handover[_Advanced]
    buffer: Buffer
    watch: Stopwatch
    started: dict[int, int]
    num_submitted: int  # of all attempts; `produce` alone reads and changes it


@dataclass(frozen=True, kw_only=True)
class InFlightLoop:
    """Training beside engines that never stop.

    Attributes:
        meeting: of this training alone.
        pending: what an earlier attempt generated and did not train on; what it had begun starts anew.
        on_step: gets each step's record before the next one starts, and what is pending if a checkpoint is due.
        tally: of all attempts; None counts nothing.
    """

    arm: Arm
    engine: FlyingEngines
    prompts: PromptStream
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    trainer: Trainer
    sampling: SamplingConfig
    loop: LoopConfig
    on_step: Callable[[StepRecord, Pending | None], None]
    start_clock: Callable[[], StageClock] = StageClock
    meeting: Meeting = field(default_factory=Meeting)
    pending: Pending = field(default_factory=Pending)
    tally: Tally | None = None
    max_advance_s: float = MAX_ADVANCE_S

    def run(self, start_step: int) -> None:
        """Train from `start_step` to the end.

        Raises:
            Exception: what any of the three loops raised.
        """
        meeting, scored = self.meeting, self.pending.scored
        num_kept = start_step * self._per_step + len(scored)
        num_lost = 0 if self.tally is None else max(0, self.tally.read() - num_kept)
        shared = _Shared(
            orders=Handover(meeting),
            published=Handover(meeting),
            generated=Handover(meeting),
            advanced=Handover(meeting),
            buffer=Buffer(meeting, max_groups=(self.loop.max_off_policy_steps + 1) * self._per_step, waiting=scored),
            watch=Stopwatch(num_regenerated=num_lost * self.trainer.config.group_size),
            started={each.index: _oldest(each) for each in scored},
            num_submitted=num_kept + len(self.pending.under_way),
        )
        meeting.run(
            {
                "produce": lambda: self._produce(shared),
                "score": lambda: score_all(shared.generated, shared.buffer, self.score, shared.watch.score),
                "train": lambda: self._train(start_step, shared),
            },
            finite="train",
        )

    def _produce(self, shared: _Shared) -> None:
        """The loop that owns the engines. Consumes prompts, as many as the lag allows, and the trainer's new weights.

        Waits for: the engines, for a moment at a time; and for new weights, when the lag allows no more groups and all
        that were submitted have come back. Unblocked by: the trainer, or the end of the training.
        """
        version = self._publish(shared, shared.orders.take())
        self._submit(shared, self.pending.under_way, version)
        while True:
            self._submit(shared, self._admitted(shared, version), version)
            order = shared.orders.poll() if self.engine.under_way else shared.orders.take()
            if order is not None:
                version = self._publish(shared, order)
                continue
            self._advance(shared)

    def _publish(self, shared: _Shared, export: Export) -> int:
        with shared.watch.delivery.busy():
            refit = self.engine.deliver(export)
        restarts = self.loop.too_old is TooOld.RESTART
        num_restarted = self._restart_old(shared, export.version) if restarts else 0
        shared.published.put(_Published(refit=refit, num_restarted=num_restarted))
        return export.version

    def _restart_old(self, shared: _Shared, version: int) -> int:
        """Start anew what this step would have to wait for; how many rollouts that were.

        A group of which nothing was complete is as young as the version then, and nobody waits for it. Of one that was
        partly complete the rest starts anew, and the step waits: its complete rollouts cannot get younger.
        """
        lag = self.loop.max_off_policy_steps
        due = self.meeting.change(lambda: age.due(shared.started, version, lag=lag))
        num_restarted = 0
        for index in [request.index for request in self.engine.under_way if request.index in due]:
            num = self.engine.restart([index], seeds=lambda request: _other_seeds(request, version))
            num_restarted += num
            if num == self.trainer.config.group_size:
                self.meeting.change(lambda index=index: shared.started.update({index: version}))
        return num_restarted

    def _admitted(self, shared: _Shared, version: int) -> range:
        """The groups that may be submitted now."""
        config = self.trainer.config
        num_batches = min(version + self.loop.max_off_policy_steps + 1, config.num_steps)
        return range(shared.num_submitted, max(shared.num_submitted, num_batches * self._per_step))

    def _submit(self, shared: _Shared, indices: Sequence[int], version: int) -> None:
        if not indices:
            return
        shared.num_submitted = max(shared.num_submitted, indices[-1] + 1)
        self.meeting.change(lambda: shared.started.update(dict.fromkeys(indices, version)))
        if self.tally is not None:
            self.tally.note(shared.num_submitted)
        self.engine.submit(self._requests(indices), sampling=self.sampling)

    def _advance(self, shared: _Shared) -> None:
        start_s = time.perf_counter()
        with shared.watch.engine.busy():
            portion = self.engine.advance(max_s=self.max_advance_s)
        ended_s = time.perf_counter()
        shared.watch.engine.rested(max(0.0, ended_s - start_s - (portion.ended_s - portion.started_s)))
        shared.advanced.put(
            _Advanced(acceptance=portion.acceptance, num_regenerated=self.engine.take_num_regenerated())
        )
        for index, group in portion.groups:
            result = GenerationResult(groups=(group,), acceptance=None, generation_s=0.0)
            shared.generated.put(Generated(index=index, result=result, ended_s=ended_s))

    def _train(self, start_step: int, shared: _Shared) -> None:
        """The finite loop. Consumes one batch of groups a step, and has its new weights published at the next.

        Waits for: the learner to write its new weights; a batch that leaves nothing behind that the next step could not
        take; and, at the end of the step, the engines to have taken the weights, which they do after the iteration that
        they are in. Where they need the learner for that, all of it comes first. Unblocked by: `produce` and `score`,
        or the end of the training.
        """
        trainer, watch = self.trainer, shared.watch
        versions: tuple[Versions, ...] = self.pending.published
        for step in range(start_step, trainer.config.num_steps):
            clock = self.start_clock()
            draft_version, published = trainer.draft.version, None
            with watch.exporting():
                export = self.engine.export(step, draft_version=draft_version)
                shared.orders.put(export)
                if not export.frees_learner:
                    published = shared.published.take()
            versions = (*recent(versions, step - 1, self.loop.max_off_policy_steps), (step, draft_version))
            watch.num_awaited += self.meeting.change(lambda step=step: self._num_awaited(shared, step))
            batch = watch.waited(
                clock, lambda step=step: shared.buffer.take(lambda waiting: self._batch(waiting, shared.started, step))
            )
            result = self._joined(batch, shared, watch)
            with watch.learner.busy():
                learned = trainer.learn(step, result, _all_rewards(batch), clock=clock, published=versions)
            if published is None:
                published = watch.delivered(clock, shared.published.take)
            watch.num_restarted += published.num_restarted
            record = trainer.record(step, clock.times(), published.refit, learned, overlap=watch.overlap())
            self.on_step(record, self._pending(shared, versions) if trainer.config.is_checkpoint_due(step) else None)

    def _batch(self, waiting: Sequence[Scored], started: dict[int, int], step: int) -> list[Scored] | None:
        """The batch of a step, once it is there; its groups are taken out of `started`."""
        batch = age.batch(waiting, started, step, lag=self.loop.max_off_policy_steps, per_step=self._per_step)
        for each in batch or ():
            del started[each.index]
        return batch

    def _num_awaited(self, shared: _Shared, step: int) -> int:
        """Rollouts of the groups that this step has to take and that are not there yet."""
        there = [each.index for each in shared.buffer.waiting]
        lag = self.loop.max_off_policy_steps
        missing = age.num_missing(there, shared.started, step, lag=lag, per_step=self._per_step)
        return missing * self.trainer.config.group_size

    def _joined(self, batch: Sequence[Scored], shared: _Shared, watch: Stopwatch) -> GenerationResult:
        """The batch as one result, with what the engines did since the step before."""
        advanced = shared.advanced.drain()
        drafted = [each.acceptance for each in advanced if each.acceptance is not None]
        acceptance = combine(drafted) if any(each.num_drafts for each in drafted) else None
        watch.num_regenerated += sum(each.num_regenerated for each in advanced)
        return GenerationResult(
            groups=tuple(group for each in batch for group in each.generated.result.groups),
            acceptance=acceptance,
            generation_s=watch.generated_s(),
        )

    def _pending(self, shared: _Shared, versions: tuple[Versions, ...]) -> Pending:
        def snapshot() -> Pending:
            scored = shared.buffer.waiting
            in_buffer = {each.index for each in scored}
            under_way = tuple(sorted(index for index in shared.started if index not in in_buffer))
            return Pending(scored=scored, under_way=under_way, published=versions)

        return self.meeting.change(snapshot)

    def _requests(self, indices: Sequence[int]) -> list[GroupRequest]:
        config = self.trainer.config
        by_step: dict[int, tuple[GroupRequest, ...]] = {}
        for step in {index // self._per_step for index in indices}:
            seed = engine_seed(config.seed, self.arm, step)
            by_step[step] = group_requests(self.prompts.batch(step), group_size=config.group_size, seed=seed)
        return [replace(by_step[index // self._per_step][index % self._per_step], index=index) for index in indices]

    @property
    def _per_step(self) -> int:
        return self.trainer.config.prompts_per_step


def _oldest(scored: Scored) -> int:
    """The version that no token of it is older than."""
    groups = scored.generated.result.groups
    return min(rollout.policy_version for group in groups for rollout in group.rollouts)


def _other_seeds(request: GroupRequest, version: int) -> tuple[int, ...]:
    """Of rollouts that start anew under this version: the old ones would repeat what was drawn."""
    return tuple(rollout_seed(seed, request.prompt.id, version) for seed in request.seeds)


def _all_rewards(batch: Sequence[Scored]) -> RewardResult:
    return RewardResult(
        rewards=tuple(reward for each in batch for reward in each.rewards.rewards),
        num_timeouts=sum(each.rewards.num_timeouts for each in batch),
        num_crashes=sum(each.rewards.num_crashes for each in batch),
    )
