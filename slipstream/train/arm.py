"""One arm of GRPO training from start, or from its last checkpoint, to end: what stands around the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from slipstream.drafts.config import DraftOnline
from slipstream.progress import progress
from slipstream.recipe import Recipe
from slipstream.records.steps import ArmRecord, ScheduleEntry, StepRecord
from slipstream.refit.channel import open_channel
from slipstream.refit.gate import RefitGate
from slipstream.rewards.verifier import RewardResult, Verifier
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.asynchronous.meeting import Meeting
from slipstream.train.asynchronous.pending import Pending, Tally
from slipstream.train.attempt import Attempt
from slipstream.train.checkpoints import Checkpoints
from slipstream.train.draft import FixedDraft, TrainedDraft
from slipstream.train.metrics import StageClock, metrics_of, step_line
from slipstream.train.recovery import WeightsLostError
from slipstream.train.turns import Alone, Turn
from slipstream.types import Arm, FinishReason, Prompt, RolloutGroup
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
    """What sets one arm apart from the other: its engine and the seeds of its rollouts, nothing else."""

    arm: Arm
    num_speculative_tokens: int
    draft: Path | None  # directory of the draft that the engines start with
    draft_length: float | None = None  # mean acceptance length that it is known to reach; None: not known
    start_engine: Callable[[], AbstractContextManager[RemoteEngine]]
    schedule: tuple[ScheduleEntry, ...] = ()  # k by running batch; empty: one k throughout
    label: str = ""  # what its progress is called; empty: the arm's name

    @property
    def title(self) -> str:
        """In progress and in the log."""
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
        turn: a step begins when it has come; None: no other arm is trained meanwhile.
    """
    checkpoints = Checkpoints(directory=directory / "checkpoints", recipe=recipe.fingerprint())
    with plan.start_engine() as engine, Verifier(recipe.reward) as verifier:
        run = _Run(
            recipe=recipe,
            plan=plan,
            policy=policy,
            prompts=tuple(prompts),
            score=lambda groups: score(groups, verifier, decode),
            directory=directory,
            checkpoints=checkpoints,
            log=log,
            turn=turn or Alone(),
        )
        history = _with_restarts(run, engine)
        machine = machines(engine.engines)
    return ArmRecord(
        arm=plan.arm,
        num_speculative_tokens=plan.num_speculative_tokens,
        steps=tuple(history),
        schedule=plan.schedule,
        machine=machine,
        loop=recipe.loop.mode.value,
        max_off_policy_steps=recipe.loop.max_off_policy_steps,
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What every attempt at an arm starts from."""

    recipe: Recipe
    plan: ArmPlan
    policy: Path
    prompts: tuple[Prompt, ...]
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    directory: Path
    checkpoints: Checkpoints
    log: LogMetrics
    turn: Turn


def _with_restarts(run: _Run, engine: RemoteEngine) -> list[StepRecord]:
    """Train; an attempt that lost a rank of the learner, or weights, is followed by one from the last checkpoint."""
    num_learners = num_engines = 0  # restarts for the one and for the other
    config = run.recipe
    while True:
        meeting = Meeting()
        try:
            with start_learner(config.learner, layout=config.layout) as learner:
                return _train(run, engine, learner, meeting)
        except LostWorkerError as error:
            num_learners += 1
            is_engine = {worker.name for worker in error.workers} & {worker.name for worker in engine.engines}
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
        meeting.settle()  # the engines are the next attempt's


def _train(run: _Run, engine: RemoteEngine, learner: RemoteLearner, meeting: Meeting) -> list[StepRecord]:
    """From the last checkpoint to the end, with the final policy written; returns all steps."""
    recipe, draft = run.recipe, run.plan.draft
    trains_draft = draft is not None and recipe.draft.online is not DraftOnline.OFF
    name = run.plan.title
    if recipe.placement.takes_turns:
        engine.rest()  # they have just started, or an attempt before this one failed in their turn
    learner.load(run.policy, recipe.grpo.optimizer, with_reference=recipe.grpo.loss.kl_coefficient > 0)
    if draft is not None and trains_draft:
        learner.continue_draft(draft, run.policy, recipe.draft, recipe.engine.dtype)
    restored = run.checkpoints.restore(learner)
    history, pending = restored.steps, Pending() if restored.pending is None else Pending.from_bytes(restored.pending)
    with (
        run.checkpoints.finished(learner),
        open_channel(recipe.refit, learner, engine) as channel,
        shared_cores(own_node(), engine, learner) if recipe.loop.max_off_policy_steps else nullcontext(),
        progress(name, total=recipe.grpo.num_steps, unit="step", done=len(history), in_log=False) as bar,
    ):
        gate = RefitGate(
            engine,
            learner,
            channel=channel,
            draft=draft,
            trains_draft=trains_draft,
            config=recipe.refit,
            probes=[prompt.token_ids for prompt in run.prompts[:_NUM_PROBES]],
        )

        def on_step(record: StepRecord, waiting: Pending | None = None) -> None:
            history.append(record)
            run.log(metrics_of(record), record.step)
            bar.advance(text=f"reward {record.reward_mean:.3f}")
            words = filter(None, (step_line(record, recipe.grpo.num_steps), bar.left()))
            logger.info("%s: %s", name, ", ".join(words))
            if recipe.grpo.is_checkpoint_due(record.step):
                run.checkpoints.save(learner, history, None if waiting is None else waiting.to_bytes())
            run.turn.end()

        def start_clock() -> StageClock:
            run.turn.begin()
            return StageClock()

        attempt = Attempt(
            recipe=recipe,
            arm=run.plan.arm,
            schedule=run.plan.schedule if run.plan.num_speculative_tokens else None,
            prompts=run.prompts,
            score=run.score,
            learner=learner,
            engines=engine,
            gate=gate,
            draft=TrainedDraft(recipe.draft, reference=run.plan.draft_length, history=history)
            if trains_draft
            else FixedDraft(version=0 if draft is not None else None),
            guard=AcceptanceGuard(record.acceptance for record in history if record.acceptance is not None),
            on_step=on_step,
            start_clock=start_clock,
            meeting=meeting,
            tally=Tally(run.directory / "submitted"),
        )
        attempt.run(history, pending)
        run.turn.begin()
        learner.save_hf(run.directory / "policy", run.policy)
        if trains_draft:
            learner.save_draft(run.directory / "draft")
    return history


def score(groups: Sequence[RolloutGroup], verifier: Verifier, decode: Decode) -> RewardResult:
    """One reward a rollout, group by group."""
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    return verifier.score(
        [decode(prompt.token_ids, rollout.token_ids) for prompt, rollout in pairs],
        [prompt.answer for prompt, _ in pairs],
        cut_off=[rollout.finish_reason is FinishReason.LENGTH for _, rollout in pairs],
    )
