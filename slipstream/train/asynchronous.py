"""Asynchronous GRPO: generation, scoring and training at the same time, each in a thread of its own.

- `produce` owns the engines: it generates, and refits them to the weights that the trainer has exported.
- `score` computes the rewards of what was generated.
- `train` learns from scored rollouts and exports the next weights. It alone is finite.

The lag alone bounds how far generation runs ahead: while the engines hold version v, (v + lag + 1) batches have been
requested in all.

`one_step_off`: version t - lag of the policy samples the whole batch t, so no result depends on timing; with a lag of
0 the steps are those of `SyncLoop`. A step that is followed by a checkpoint waits until every requested batch is there,
so that none is generated twice.

`in_flight`: the engines never stop. New weights enter between two engine iterations, and unfinished rollouts continue.
Groups are submitted in the order of the prompts and return in any order. Each group carries the version it was
submitted under; no token of the group is older. A batch first takes the groups that later steps could not take, and
waits for them, then others in the order in which they returned. So no group is dropped, and none exceeds the lag.

The last step that can take a group submitted under version v is v + lag. A step takes `P` groups, so at most
`P * (v + lag - t + 1)` groups of version v or older may be left when step t begins, for every v: a step that takes
young groups, only because they are there, may leave more old groups than a later batch holds. The bound can always be
kept: while the newest version is t, (t + lag + 1) batches were submitted in all, so one step has to take at most one.

Legend: `P` prompts a step; group `i` is prompt `i % P` of batch `i // P`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.data.prompts import PromptStream
from slipstream.engine.protocol import GenerationResult, GroupRequest, Portion, group_requests, rollout_seed
from slipstream.grpo.config import LoopConfig, TooOld
from slipstream.records.steps import RefitCheck, StepRecord
from slipstream.refit.gate import Export
from slipstream.rewards.reward import RewardResult, joined
from slipstream.train.batch import Pending, Scored, Submitted, Versions
from slipstream.train.loop import Trainer, engine_seed, recent
from slipstream.train.metrics import StageClock, Stopwatch
from slipstream.train.queues import Queue, ThreadGroup
from slipstream.train.recovery import FaultTolerantEngines
from slipstream.train.turns import ALONE, Turn
from slipstream.types import Arm, LoopMode, RolloutGroup
from slipstream.workers.scheduler import together

_MAX_ADVANCE_S = 0.05  # longest time for which one call of `advance` delays new weights


@dataclass(kw_only=True)
class AsyncLoop:
    """Loop in which generation runs beside training; an instance runs once.

    Attributes:
        on_step: receives each step's record before the next step starts, and pending rollouts if a checkpoint is due.
    """

    arm: Arm
    engines: FaultTolerantEngines
    prompts: PromptStream
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    trainer: Trainer
    loop: LoopConfig
    on_step: Callable[[StepRecord, Pending | None], None]
    start_clock: Callable[[], StageClock] = StageClock
    turn: Turn = ALONE  # all requested batches are there when it ends
    threads: ThreadGroup = field(default_factory=ThreadGroup)
    pending: Pending = field(default_factory=Pending)  # of an earlier attempt, whose unfinished groups are restarted
    submitted: Submitted | None = None  # counter over all attempts; None: nothing is counted

    def run(self, start_step: int) -> None:
        """Train from `start_step` to the end, or raise the error of the thread that failed first."""
        threads, scored, config = self.threads, self.pending.scored, self.trainer.config
        self._is_whole = self.loop.mode is not LoopMode.IN_FLIGHT  # each batch is generated whole, by one version
        self._lag, self._per_step = self.loop.max_off_policy_steps, config.prompts_per_step
        self._exports: Queue[Export] = Queue(threads)
        self._published: Queue[tuple[RefitCheck, int]] = Queue(threads)  # with the number of restarted rollouts
        self._generated: Queue[tuple[int, GenerationResult, float]] = Queue(threads)  # index, result, its end
        self._advanced: Queue[tuple[Portion, float]] = Queue(threads)  # with the seconds that the call took
        self._scored: Queue[Scored] = Queue(threads, scored)
        # In flight: the version under which each group was submitted, until the group is trained on.
        # The threads' lock guards it.
        self._started = {each.index: _oldest(each) for each in scored}
        num_kept = start_step * self._per_step + sum(len(each.result.groups) for each in scored)
        self._num_submitted = num_kept + len(self.pending.under_way)  # over all attempts; `produce` alone changes it
        self._watch = Stopwatch(num_regenerated=self._num_lost(num_kept) * config.group_size)
        threads.run(
            {"produce": self._produce, "score": self._score, "train": lambda: self._train(start_step)}, finite="train"
        )

    def _num_lost(self, num_kept: int) -> int:
        """Count the groups that were submitted and neither kept by the checkpoint nor counted as lost before it."""
        if self.submitted is None:
            return 0
        total, known = self.submitted.read(), self.pending.num_submitted
        return max(0, total - num_kept if known is None else total - known + len(self.pending.under_way))

    def _produce(self) -> None:
        """Run the engines: consume as many prompts as the lag allows, and the weights that the trainer exports.

        This thread waits for new weights once the lag allows no further group and all requested groups have returned;
        the trainer or the end of the training unblocks it.
        """
        version = self._publish(self._exports.take())
        self._submit(self.pending.under_way, version)
        while True:
            num_batches = min(version + self._lag + 1, self.trainer.config.num_steps)
            admitted = range(self._num_submitted, max(self._num_submitted, num_batches * self._per_step))
            if self._is_whole:
                for batch in range(admitted.start // self._per_step, admitted.stop // self._per_step):
                    self._generate(batch)
            else:
                self._submit(admitted, version)
            export = self._exports.poll() if self.engines.under_way else self._exports.take()
            if export is not None:
                version = self._publish(export)
            else:
                self._advance()

    def _publish(self, export: Export) -> int:
        with self._watch.delivery.busy():
            refit = self.engines.deliver(export)
        restarts = self.loop.too_old is TooOld.RESTART
        self._published.put((refit, self._restart_overdue(export.version) if restarts else 0))
        return export.version

    def _restart_overdue(self, version: int) -> int:
        """Restart the rollouts that this step would have to wait for; return their number.

        A group without a complete rollout is restarted whole and counts as submitted under `version`, so no step waits
        for it. A group with complete rollouts keeps its age, and the step waits for the rest of it.
        """
        due = self.threads.update(lambda: overdue(self._started, version, lag=self._lag))
        num_restarted = 0
        for index in [request.index for request in self.engines.under_way if request.index in due]:
            num = self.engines.restart([index], seeds=lambda request: _other_seeds(request, version))
            num_restarted += num
            if num == self.trainer.config.group_size:
                self.threads.update(lambda index=index: self._started.update({index: version}))
        return num_restarted

    def _count_submitted(self, indices: Sequence[int]) -> None:
        self._num_submitted = max(self._num_submitted, indices[-1] + 1)
        if self.submitted is not None:
            self.submitted.add(len(indices))

    def _generate(self, batch: int) -> None:
        config = self.trainer.config
        self._count_submitted(range(batch * self._per_step, (batch + 1) * self._per_step))
        with self._watch.engine.busy():
            result = self.engines.generate(
                self.prompts.batch(batch),
                sampling=self.trainer.sampling,
                group_size=config.group_size,
                seed=engine_seed(config.seed, self.arm, batch),
            )
        self._watch.engine.rested(result.engine_idle_fraction * result.generation_s)
        self._generated.put((batch, result, time.perf_counter()))

    def _submit(self, indices: Sequence[int], version: int) -> None:
        if not indices:
            return

        def begin() -> None:  # in one, as a checkpoint takes both
            self._started.update(dict.fromkeys(indices, version))
            self._count_submitted(indices)

        self.threads.update(begin)
        config = self.trainer.config
        by_step: dict[int, tuple[GroupRequest, ...]] = {}
        for step in {index // self._per_step for index in indices}:
            seed = engine_seed(config.seed, self.arm, step)
            by_step[step] = group_requests(self.prompts.batch(step), group_size=config.group_size, seed=seed)
        self.engines.submit(
            [replace(by_step[index // self._per_step][index % self._per_step], index=index) for index in indices]
        )

    def _advance(self) -> None:
        start_s = time.perf_counter()
        with self._watch.engine.busy():
            portion = self.engines.advance(max_s=_MAX_ADVANCE_S)
        ended_s = time.perf_counter()
        self._watch.engine.rested(max(0.0, ended_s - start_s - (portion.ended_s - portion.started_s)))
        self._advanced.put((replace(portion, groups=()), ended_s - start_s))
        for index, group in portion.groups:
            result = GenerationResult(groups=(group,), acceptance=None, generation_s=0.0)
            self._generated.put((index, result, ended_s))

    def _score(self) -> None:
        """Score what `produce` generated, for which this thread waits, and queue it with its rewards for training."""
        max_groups = (self._lag + 1) * self._per_step
        while True:
            index, result, generated_s = self._generated.take()
            with self._watch.score.busy():
                rewards = self.score(result.groups)
            self._scored.put(Scored(index=index, result=result, rewards=rewards, generated_s=generated_s))
            num_groups = sum(len(each.result.groups) for each in self._scored.items)
            assert num_groups <= max_groups, f"{num_groups} groups wait for training, of at most {max_groups}"

    def _train(self, start_step: int) -> None:
        """Train the remaining steps: take one batch a step, and export the new weights at the start of the next step.

        This thread waits for the learner's export; for its batch, in flight one that leaves nothing overdue to the next
        step; and at the end of the step for the engines' refit. A refit that needs the learner comes first as a whole.
        `produce`, `score` or the end of the training unblocks it.
        """
        trainer, watch = self.trainer, self._watch
        versions: tuple[Versions, ...] = self.pending.published
        for step in range(start_step, trainer.config.num_steps):
            clock = self.start_clock()
            if self.turn.begins_with(step) or (step == start_step and self.turn is not ALONE):
                watch.restart()
            draft_version, published = trainer.draft.version, None
            with watch.exporting():
                export = self.engines.export(step, draft_version=draft_version)
                self._exports.put(export)
                if not export.frees_learner:
                    published = self._published.take()
            versions = (*recent(versions, step - 1, self._lag), (step, draft_version))
            batch = self._take_batch(step, clock)
            result, rewards = self._joined(batch)
            with watch.learner.busy():
                learned = trainer.learn(step, result, rewards, clock=clock, published=versions)
            if published is None:
                published = watch.delivered(clock, self._published.take)
            refit, num_restarted = published
            watch.num_restarted += num_restarted
            is_drained = self.turn.begins_with(step + 1) or trainer.config.is_checkpoint_due(step)
            pending = self._pending(step, versions, clock) if is_drained else None
            times, overlap = clock.times(), watch.overlap()
            record = trainer.record(step, times, refit, learned, overlap=overlap, machine=clock.machine_use())
            self.on_step(record, pending)

    def _take_batch(self, step: int, clock: StageClock) -> Sequence[Scored]:
        """Wait for the batch of a step; in flight, remove its groups from `_started`."""

        def chosen(waiting: Sequence[Scored]) -> list[Scored] | None:
            if self._is_whole:
                return [each for each in waiting if each.index == step] or None
            groups = choose_batch(waiting, self._started, step, lag=self._lag, per_step=self._per_step)
            for each in groups or ():
                del self._started[each.index]
            return groups

        def num_awaited() -> int:
            there = [each.index for each in self._scored.items]
            missing = num_missing(there, self._started, step, lag=self._lag, per_step=self._per_step)
            return missing * self.trainer.config.group_size

        if not self._is_whole:
            self._watch.num_awaited += self.threads.update(num_awaited)
        return self._watch.waited(clock, lambda: self._scored.pick(chosen))

    def _joined(self, batch: Sequence[Scored]) -> tuple[GenerationResult, RewardResult]:
        """Merge a batch into one result; in flight, with the engines' counters since the step before."""
        watch = self._watch
        if self._is_whole:
            (own,) = batch
            watch.num_regenerated += own.result.num_regenerated
            return own.result, own.rewards
        calls = self._advanced.drain()
        advanced, generation_s = together([portion for portion, _ in calls], num_engines=1), sum(s for _, s in calls)
        drafted = advanced.acceptance
        watch.num_regenerated += advanced.num_regenerated
        result = GenerationResult(
            groups=tuple(group for each in batch for group in each.result.groups),
            acceptance=drafted if drafted is not None and drafted.num_drafts else None,
            generation_s=generation_s,
            engine_idle_fraction=max(0.0, 1.0 - advanced.ended_s / generation_s) if generation_s else 0.0,
            num_preemptions=advanced.num_preemptions,
            num_engine_restarts=advanced.num_engine_restarts,
        )
        return result, joined([each.rewards for each in batch])

    def _pending(self, step: int, versions: tuple[Versions, ...], clock: StageClock) -> Pending:
        """Rollouts for a checkpoint after this step; of whole batches, all requested ones are awaited first."""

        def pending(scored: Sequence[Scored], **more: Any) -> Pending:
            num_submitted = None if self.submitted is None else self.submitted.read()
            return Pending(scored=tuple(scored), num_submitted=num_submitted, **more)

        if self._is_whole:
            num_ahead = min(self._lag, self.trainer.config.num_steps - 1 - step)
            rest = self._watch.waited(clock, lambda: self._scored.wait_for(num_ahead))
            return pending(rest, published=recent(versions, step, self._lag))

        def snapshot() -> Pending:
            scored = self._scored.items
            in_queue = {each.index for each in scored}
            under_way = tuple(sorted(index for index in self._started if index not in in_queue))
            return pending(scored, under_way=under_way, published=versions)

        return self.threads.update(snapshot)


def overdue(started: Mapping[int, int], step: int, *, lag: int) -> set[int]:
    """Groups that would exceed the lag in the step after this one; `started` has versions of groups by index."""
    return {index for index, version in started.items() if version <= step - lag}


def num_missing(there: Sequence[int], started: Mapping[int, int], step: int, *, lag: int, per_step: int) -> int:
    """Number of groups that this step has to take and that are not among `there` yet."""
    required = _required(started, step, lag=lag, per_step=per_step)
    return max([0, *(num - sum(started[index] <= version for index in there) for version, num in required)])


def choose_batch(
    waiting: Sequence[Scored], started: Mapping[int, int], step: int, *, lag: int, per_step: int
) -> list[Scored] | None:
    """Choose `per_step` groups, or None while too few are there: those that have to be taken, then the first ones."""
    there = [each.index for each in waiting]
    if len(there) < per_step or num_missing(there, started, step, lag=lag, per_step=per_step):
        return None
    chosen: list[int] = []
    for version, num_required in _required(started, step, lag=lag, per_step=per_step):
        others = [index for index in there if started[index] <= version and index not in chosen]
        chosen += others[: max(0, num_required - len(chosen))]
    chosen += [index for index in there if index not in chosen][: per_step - len(chosen)]
    by_index = {each.index: each for each in waiting}
    return [by_index[index] for index in chosen]


def _required(started: Mapping[int, int], step: int, *, lag: int, per_step: int) -> list[tuple[int, int]]:
    """Number of groups of each version or older that this step has to take, the oldest version first."""
    required: list[tuple[int, int]] = []
    for num_later, version in enumerate(range(step - lag, step)):
        num = max(0, sum(each <= version for each in started.values()) - num_later * per_step)
        assert num <= per_step, f"{num} groups of version {version} or before have to be taken in step {step}"
        required.append((version, num))
    return required


def _oldest(scored: Scored) -> int:
    """Version of the oldest token."""
    return min(rollout.policy_version for group in scored.result.groups for rollout in group.rollouts)


def _other_seeds(request: GroupRequest, version: int) -> tuple[int, ...]:
    """New seeds for rollouts that are restarted under this version: the old seeds would sample the same tokens."""
    return tuple(rollout_seed(seed, request.prompt.id, version) for seed in request.seeds)
