"""One arm of GRPO training from start, or from its last checkpoint, to end: builds the loop and all that it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slipstream import evaluation
from slipstream.data.prompts import PromptStream
from slipstream.drafts.config import DraftOnline
from slipstream.engine.protocol import Engines
from slipstream.logs import progress
from slipstream.recipe import Recipe
from slipstream.records.steps import ArmRecord, EvaluationRecord, ScheduleEntry, StepRecord
from slipstream.refit.channel import open_channel
from slipstream.refit.gate import RefitGate
from slipstream.rewards.verifier import RewardResult, Verifier
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.asynchronous import AsyncLoop
from slipstream.train.checkpoints import Checkpoints
from slipstream.train.loop import Draft, SyncLoop, TrainedDraft, Trainer
from slipstream.train.metrics import StageClock, metrics_of, step_line
from slipstream.train.pending import Pending, Submitted
from slipstream.train.queues import ThreadGroup
from slipstream.train.recovery import Autopilot, FaultTolerantEngines, WeightsLostError
from slipstream.train.turns import Turn
from slipstream.types import Arm, FinishReason, LoopMode, Prompt, RolloutGroup
from slipstream.workers.calls import LostWorkerError, machines
from slipstream.workers.cores import shared_cores
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.learners import RemoteLearner, start_learner
from slipstream.workers.session import own_node

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int], Sequence[int]], str]
"""Text of a response by the tokens of its prompt and its own; `<think>` comes first if the prompt opens a thought."""

LogMetrics = Callable[[Mapping[str, float], int], None]
_NUM_PROBES = 16  # prompts that an engine is compared on if its tensors cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmPlan:
    """What sets one arm apart from the other: its engines and the seeds of its rollouts; and what both may share.

    Attributes:
        validation: problems that its policy is evaluated on while it trains, as the recipe says; empty: it is not.
    """

    arm: Arm
    num_speculative_tokens: int
    draft: Path | None  # directory of the draft that the engines start with
    draft_length: float | None = None  # mean acceptance length that it is known to reach; None: not known
    start_engine: Callable[[], AbstractContextManager[RemoteEngine]]
    schedule: tuple[ScheduleEntry, ...] = ()  # k by running batch; empty: one k throughout
    label: str = ""  # what its progress is called; empty: the arm's name
    validation: tuple[Prompt, ...] = ()

    @property
    def title(self) -> str:
        """Its name in progress and in the log."""
        return f"train_grpo {self.label or self.arm.value}"


def train(
    recipe: Recipe,
    plan: ArmPlan,
    *,
    policy: Path,
    prompts: Sequence[Prompt],
    decode: Decode,
    directory: Path,
    log: LogMetrics,
    turn: Turn | None = None,
) -> ArmRecord:
    """Train and write the final policy to `directory/policy`, and to `directory/draft` a draft that learned beside it.

    Args:
        decode: for scoring.
        log: gets the metrics of each step.
        turn: a step begins in it; None: no other arm is trained meanwhile.
    """
    with plan.start_engine() as engines, Verifier(recipe.reward) as verifier:
        run = Run(
            recipe=recipe,
            plan=plan,
            policy=policy,
            prompts=tuple(prompts),
            score=partial(score, verifier=verifier, decode=decode),
            directory=directory,
            log=log,
            turn=turn,
            evaluate=partial(
                evaluation.evaluate,
                prompts=plan.validation,
                verifier=verifier,
                decode=decode,
                config=recipe.evaluation,
                policy=plan.arm.value,
                seed=recipe.grpo.seed,
            )
            if plan.validation
            else None,
        )
        steps = run.with_restarts(engines)
        machine = machines(engines.workers)
    return ArmRecord(
        arm=plan.arm,
        num_speculative_tokens=plan.num_speculative_tokens,
        steps=tuple(steps),
        schedule=plan.schedule,
        machine=machine,
        loop=recipe.loop.mode.value,
        max_off_policy_steps=recipe.loop.max_off_policy_steps,
        steps_a_turn=0 if turn is None else turn.num_steps,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The training of an arm, in as many attempts as it takes."""

    recipe: Recipe
    plan: ArmPlan
    policy: Path
    prompts: tuple[Prompt, ...]
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    directory: Path
    log: LogMetrics
    turn: Turn | None = None
    evaluate: Callable[[Engines], EvaluationRecord] | None = None

    def with_restarts(self, engines: RemoteEngine) -> list[StepRecord]:
        """Train; an attempt that lost a rank of the learner, or weights, is followed by one from the last checkpoint.

        Returns all steps.
        """
        num_learners = num_engines = 0  # restarts for the one and for the other
        config = self.recipe
        checkpoints = Checkpoints(directory=self.directory / "checkpoints", recipe=config.fingerprint())
        while True:
            threads = ThreadGroup()
            try:
                with start_learner(config.learner, layout=config.layout) as learner:
                    return self._attempt(engines, learner, checkpoints, threads)
            except LostWorkerError as error:
                num_learners += 1
                is_engine = {worker.name for worker in error.workers} & {worker.name for worker in engines.workers}
                if is_engine or num_learners > config.learner.max_restarts:
                    raise
                logger.error(
                    "%s; the learner starts anew from its last checkpoint, restart %d of at most %d in this run",
                    error,
                    num_learners,
                    config.learner.max_restarts,
                )
            except WeightsLostError as error:
                num_engines += 1
                if num_engines > config.engine.max_restarts:
                    raise
                logger.error("%s; training goes on from its last checkpoint", error)
            threads.join()  # the engines are the next attempt's

    def _attempt(
        self, engines: RemoteEngine, learner: RemoteLearner, checkpoints: Checkpoints, threads: ThreadGroup
    ) -> list[StepRecord]:
        """Train from the last checkpoint to the end, and write the final policy; returns all steps."""
        recipe, draft, title = self.recipe, self.plan.draft, self.plan.title
        if recipe.placement.takes_turns:
            engines.sleep()  # they have just started, or an attempt before this one failed in their turn
        learner.load(self.policy, recipe.grpo.optimizer, with_reference=recipe.grpo.loss.kl_coefficient > 0)
        if draft is not None and self._trains_draft:
            learner.continue_draft(draft, self.policy, recipe.draft, recipe.engine.dtype)
        restored = checkpoints.restore(learner)
        history = restored.steps
        pending = Pending() if restored.pending is None else Pending.from_bytes(restored.pending)
        with (
            checkpoints.finished(learner),
            open_channel(recipe.refit, learner, engines) as channel,
            shared_cores(own_node(), engines, learner) if recipe.loop.max_off_policy_steps else nullcontext(),
            progress(title, total=recipe.grpo.num_steps, unit="step", done=len(history), in_log=False) as bar,
        ):
            gate = RefitGate(
                engines,
                learner,
                channel=channel,
                draft=draft,
                trains_draft=self._trains_draft,
                config=recipe.refit,
                probes=[prompt.token_ids for prompt in self.prompts[:_NUM_PROBES]],
            )

            def on_step(record: StepRecord, waiting: Pending | None = None) -> None:
                record = self._evaluated(record, tolerant)
                history.append(record)
                self.log(metrics_of(record), record.step)
                bar.advance(text=f"reward {record.reward_mean:.3f}")
                words = filter(None, (step_line(record, recipe.grpo.num_steps), bar.left()))
                logger.info("%s: %s", title, ", ".join(words))
                if recipe.grpo.is_checkpoint_due(record.step):
                    checkpoints.save(learner, history, None if waiting is None else waiting.to_bytes())
                    if self.turn is not None:
                        learner.finish_checkpoint()  # it would be written beside another arm's step

            trainer = Trainer(
                learner=learner,
                config=recipe.grpo,
                temperature=recipe.sampling.temperature,
                draft=self._draft(history),
                guard=AcceptanceGuard(record.acceptance for record in history if record.acceptance is not None),
                max_lag=recipe.loop.max_off_policy_steps,
            )
            tolerant = self.fault_tolerant(engines, gate, learner, history, pending)
            start_clock = partial(self._start_clock, history)
            self.loop(tolerant, trainer, on_step, pending, threads, start_clock).run(start_step=len(history))
            if self.turn is not None:
                self.turn.begin(len(history))
            learner.save_hf(self.directory / "policy", self.policy)
            if self._trains_draft:
                learner.save_draft(self.directory / "draft")
        return history

    def loop(
        self,
        engines: FaultTolerantEngines,
        trainer: Trainer,
        on_step: Callable[..., None],
        pending: Pending,
        threads: ThreadGroup,
        start_clock: Callable[[], StageClock] = StageClock,
    ) -> SyncLoop | AsyncLoop:
        """The loop that the recipe trains with."""
        recipe = self.recipe
        grpo = recipe.grpo
        prompts = PromptStream(prompts=self.prompts, batch_size=grpo.prompts_per_step, seed=grpo.seed)
        if recipe.loop.is_synchronous:
            return SyncLoop(
                arm=self.plan.arm,
                engine=engines,
                learner=trainer.learner,
                gate=engines,
                prompts=prompts,
                score=self.score,
                config=grpo,
                sampling=recipe.sampling,
                on_step=on_step,
                draft=trainer.draft,
                guard=trainer.guard,
                start_clock=start_clock,
            )
        return AsyncLoop(
            arm=self.plan.arm,
            engines=engines,
            prompts=prompts,
            score=self.score,
            trainer=trainer,
            sampling=recipe.sampling,
            loop=recipe.loop,
            on_step=on_step,
            start_clock=start_clock,
            turn=self.turn,
            threads=threads,
            pending=pending,
            submitted=Submitted(self.directory / "submitted"),
        )

    def _start_clock(self, history: Sequence[StepRecord]) -> StageClock:
        """The clock of the step that follows these, in the arm's turn."""
        if self.turn is not None:
            self.turn.begin(len(history))
        return StageClock()

    def fault_tolerant(
        self,
        engines: RemoteEngine,
        gate: RefitGate,
        learner: RemoteLearner,
        history: Sequence[StepRecord],
        pending: Pending,
    ) -> FaultTolerantEngines:
        """The engines and the gate as the loop sees them."""
        recipe, k = self.recipe, self.plan.num_speculative_tokens
        steps = [record.autopilot for record in history] + [each.result.autopilot for each in pending.scored]
        in_flight = recipe.loop.mode is LoopMode.IN_FLIGHT
        if in_flight:
            engines.run_in_flight(recipe.loop.kv_cache)  # and forget what an earlier attempt left under way
        watches = k > 0 and recipe.draft.autopilot.enabled and not in_flight
        return FaultTolerantEngines(
            engines,
            gate,
            sampling=recipe.sampling,
            max_restarts=recipe.engine.max_restarts,
            is_beside_training=not recipe.loop.is_synchronous,
            memory_sharer=learner if recipe.placement.takes_turns else None,
            autopilot=Autopilot(recipe.draft.autopilot, self.plan.schedule, steps) if watches else None,
        )

    def _evaluated(self, record: StepRecord, engines: FaultTolerantEngines) -> StepRecord:
        """The step's record, with the accuracy of the policy that sampled its rollouts where an evaluation is due.

        In a synchronous loop the engines still hold that policy; in any other they are at work.
        """
        recipe, step = self.recipe, record.step
        if self.evaluate is None or not recipe.loop.is_synchronous or not recipe.evaluation.is_due(step):
            return record
        try:
            with engines.between_steps():
                return replace(record, evaluation=self.evaluate(engines))
        except WeightsLostError as error:
            logger.error(
                "%s: the policy after step %d is not evaluated, training goes on: %s", self.plan.title, step, error
            )
            return record

    @property
    def _trains_draft(self) -> bool:
        return self.plan.draft is not None and self.recipe.draft.online is not DraftOnline.OFF

    def _draft(self, history: Sequence[StepRecord]) -> Draft:
        if self._trains_draft:
            return TrainedDraft(self.recipe.draft, reference=self.plan.draft_length, history=history)
        return Draft(version=None if self.plan.draft is None else 0)


def score(groups: Sequence[RolloutGroup], verifier: Verifier, decode: Decode) -> RewardResult:
    """One reward a rollout, group by group."""
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    return verifier.score(
        [decode(prompt.token_ids, rollout.token_ids) for prompt, rollout in pairs],
        [prompt.answer for prompt, _ in pairs],
        cut_off=[rollout.finish_reason is FinishReason.LENGTH for _, rollout in pairs],
    )
