"""One step off: batch t comes, whole, from version t - n of the policy, while earlier batches are trained on.

Which version makes a batch is fixed, so nothing depends on how fast anybody is. Step t begins when the learner has
version t, which it writes at once. Then it trains on batch t, as soon as that is there, while the engines take version
t, when they have made the batches that older versions are to make, and generate batch t + n. They generate nothing by a
version that has not passed the gate. With n = 0 there is no "while", and the steps are those of `SyncLoop`.

A step that is followed by a checkpoint ends when all that was ordered is there, so that none of it is made twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.data.prompts import PromptStream
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engine
from slipstream.records.steps import RefitCheck, StepRecord
from slipstream.refit.gate import Export
from slipstream.rewards.verifier import RewardResult
from slipstream.train.asynchronous.buffer import Buffer, Generated, Scored, score_all
from slipstream.train.asynchronous.meeting import Handover, Meeting
from slipstream.train.asynchronous.pending import Pending, Tally
from slipstream.train.asynchronous.timing import Stopwatch
from slipstream.train.metrics import StageClock
from slipstream.train.step import Trainer, Versions, engine_seed, recent
from slipstream.types import Arm, RolloutGroup


class Gate(Protocol):
    """The way of new weights into the engines, in two parts: see `RefitGate`."""

    def export(self, version: int, *, draft_version: int | None) -> Export:
        """The learner's part, which ends before this returns."""
        ...

    def deliver(self, export: Export) -> RefitCheck:
        """The engines' part: they hold these weights when it returns."""
        ...


_Order = Export | int  # weights to take; a number: generate the batch of that step


@dataclass(frozen=True, kw_only=True)
class OneStepOffLoop:
    """Training that runs `lag` batches behind generation.

    Attributes:
        meeting: of this training alone.
        pending: what an earlier attempt generated and did not train on.
        tally: of all attempts; None counts nothing.
        on_step: gets each step's record before the next one starts, and what is pending if a checkpoint is due.
    """

    arm: Arm
    engine: Engine
    gate: Gate
    prompts: PromptStream
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    trainer: Trainer
    sampling: SamplingConfig
    lag: int
    on_step: Callable[[StepRecord, Pending | None], None]
    start_clock: Callable[[], StageClock] = StageClock
    meeting: Meeting = field(default_factory=Meeting)
    pending: Pending = field(default_factory=Pending)
    tally: Tally | None = None

    def run(self, start_step: int) -> None:
        """Train from `start_step` to the end.

        Raises:
            Exception: what any of the three loops raised.
        """
        config, meeting = self.trainer.config, self.meeting
        orders: Handover[_Order] = Handover(meeting)
        published: Handover[RefitCheck] = Handover(meeting)
        generated: Handover[Generated] = Handover(meeting)
        buffer = Buffer(meeting, max_groups=(self.lag + 1) * config.prompts_per_step, waiting=self.pending.scored)
        watch = Stopwatch(num_regenerated=self._num_lost(start_step))
        meeting.run(
            {
                "produce": lambda: self._produce(orders, published, generated, watch),
                "score": lambda: score_all(generated, buffer, self.score, watch.score),
                "train": lambda: self._train(start_step, orders, published, buffer, watch),
            },
            finite="train",
        )

    def _produce(
        self,
        orders: Handover[_Order],
        published: Handover[RefitCheck],
        generated: Handover[Generated],
        watch: Stopwatch,
    ) -> None:
        """The loop that owns the engines. Consumes the trainer's orders: new weights to take, a batch to generate.

        Waits for: the next order. Unblocked by: the trainer, or the end of the training.
        """
        config = self.trainer.config
        while True:
            order = orders.take()
            if isinstance(order, Export):
                with watch.delivery.busy():
                    check = self.gate.deliver(order)
                published.put(check)
                continue
            if self.tally is not None:
                self.tally.note((order + 1) * config.prompts_per_step)
            with watch.engine.busy():
                result = self.engine.generate(
                    self.prompts.batch(order),
                    sampling=self.sampling,
                    group_size=config.group_size,
                    seed=engine_seed(config.seed, self.arm, order),
                )
            watch.engine.rested(result.engine_idle_fraction * result.generation_s)
            generated.put(Generated(index=order, result=result, ended_s=time.perf_counter()))

    def _train(
        self,
        start_step: int,
        orders: Handover[_Order],
        published: Handover[RefitCheck],
        buffer: Buffer,
        watch: Stopwatch,
    ) -> None:
        """The finite loop. Consumes one batch a step, and orders the one that the new weights are to generate.

        Waits for: the learner to write its new weights; its own batch; and, at the end of the step, the engines to have
        taken those weights. Where the engines need the learner for that, all of it comes first. Unblocked by: `produce`
        and `score`, or the end of the training.
        """
        config, trainer = self.trainer.config, self.trainer
        versions: tuple[Versions, ...] = self.pending.published
        num_ordered = start_step + len(self.pending.scored)
        for step in range(start_step, config.num_steps):
            clock = self.start_clock()
            draft_version, refit = trainer.draft.version, None
            with watch.exporting():
                export = self.gate.export(step, draft_version=draft_version)
                orders.put(export)
                if not export.frees_learner:
                    refit = published.take()
            versions = (*recent(versions, step - 1, self.lag), (step, draft_version))
            last = min(step + self.lag, config.num_steps - 1)
            for batch in range(num_ordered, last + 1):
                orders.put(batch)
            num_ordered = last + 1
            (own,) = watch.waited(clock, lambda step=step: buffer.take(lambda waiting: _of_batch(waiting, step)))
            watch.num_regenerated += own.generated.result.num_regenerated
            with watch.learner.busy():
                learned = trainer.learn(step, own.generated.result, own.rewards, clock=clock, published=versions)
            if refit is None:
                refit = watch.delivered(clock, published.take)
            pending = None
            if config.is_checkpoint_due(step):
                rest = watch.waited(clock, lambda last=last, step=step: buffer.wait_for(last - step))
                pending = Pending(scored=tuple(rest), published=recent(versions, step, self.lag))
            record = trainer.record(step, clock.times(), refit, learned, overlap=watch.overlap())
            self.on_step(record, pending)

    def _num_lost(self, start_step: int) -> int:
        """Rollouts that earlier attempts submitted, and that this one makes again."""
        if self.tally is None:
            return 0
        config = self.trainer.config
        num_kept = (start_step + len(self.pending.scored)) * config.prompts_per_step
        return max(0, self.tally.read() - num_kept) * config.group_size


def _of_batch(waiting: Sequence[Scored], step: int) -> list[Scored] | None:
    return [each for each in waiting if each.index == step] or None
