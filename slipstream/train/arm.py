"""Train one arm with GRPO: build its loop, resume from its last checkpoint, restart after lost processes."""

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
from slipstream.drafts.methods import DraftMethod
from slipstream.logs import progress
from slipstream.recipe import Recipe
from slipstream.records.files import write_atomic
from slipstream.records.steps import ArmRecord, ScheduleEntry, StepRecord
from slipstream.refit.channel import open_channel
from slipstream.refit.gate import RefitGate
from slipstream.rewards.config import OverlongConfig
from slipstream.rewards.function import open_reward
from slipstream.rewards.reward import Reward, RewardResult, penalized
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.asynchronous import AsyncLoop
from slipstream.train.batch import Pending, Submitted
from slipstream.train.checkpoints import Checkpoints
from slipstream.train.loop import Draft, SyncLoop, TrainedDraft, Trainer
from slipstream.train.metrics import StageClock, metrics_of, step_line
from slipstream.train.queues import ThreadGroup
from slipstream.train.recovery import Autopilot, FaultTolerantEngines, WeightsLostError
from slipstream.train.turns import ALONE, Turn
from slipstream.types import Arm, FinishReason, LoopMode, Prompt, RolloutGroup
from slipstream.workers.calls import LostWorkerError, machines
from slipstream.workers.cores import shared_cores
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.learners import RemoteLearner, start_learner
from slipstream.workers.session import own_node

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int], Sequence[int]], str]
"""Function from the tokens of a prompt and its response to the response's text, as `stages.support.decode` has it."""

LogMetrics = Callable[[Mapping[str, float], int], None]
_PREEMPTED = (
    "%s: step %d: the KV cache was full, and vLLM preempted and recomputed %d rollouts, which slows generation: "
    "raise engine.gpu_memory_utilization, or set placement.memory in_turn and raise it; rollout/preemptions "
    "counts them from now on"
)
_NUM_PROBES = 16  # prompts on which an engine's logprobs are compared if its tensors cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmPlan:
    """Settings of one arm: its engines, its draft, its draft lengths and its name."""

    arm: Arm
    num_speculative_tokens: int
    draft: Path | None  # directory of the draft that the engines start with
    draft_length: float | None = None  # mean acceptance length that the draft can reach; None: that of the first steps
    start_engine: Callable[[], AbstractContextManager[RemoteEngine]]
    schedule: tuple[ScheduleEntry, ...] = ()  # k by running batch; empty: one k throughout
    label: str = ""  # name in progress lines; empty: the arm's name
    validation: tuple[Prompt, ...] = ()  # problems for evaluations during training; empty: there are none

    @property
    def title(self) -> str:
        """Name in progress lines and in the log."""
        return f"train_grpo {self.label or self.arm.value}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Training of one arm, in as many attempts as its restarts allow."""

    recipe: Recipe
    plan: ArmPlan
    policy: Path
    prompts: Sequence[Prompt]
    decode: Decode
    directory: Path
    log: LogMetrics  # receives the metrics of each step
    turn: Turn = ALONE

    def train(self) -> ArmRecord:
        """Train; write the policy to `directory/policy` and a draft that learned beside it to `directory/draft`.

        Adapters of the policy are in its folder `adapter`.
        """
        recipe, plan = self.recipe, self.plan
        per_step = recipe.grpo.prompts_per_step * recipe.grpo.group_size
        with plan.start_engine() as engines, open_reward(recipe.reward, per_step=per_step) as reward:
            facts = engines.facts()
            words = ", ".join(f"{name} {value}" for name, value in facts.items())
            logger.info("%s: engines with %s", plan.title, words)
            steps = self.with_restarts(engines, reward)
            machine = machines(engines.workers)
        return ArmRecord(
            arm=plan.arm,
            num_speculative_tokens=plan.num_speculative_tokens,
            steps=tuple(steps),
            schedule=plan.schedule,
            machine=machine,
            engine=facts,
            loop=recipe.loop.mode.value,
            max_off_policy_steps=recipe.loop.max_off_policy_steps,
            steps_a_turn=self.turn.num_steps,
        )

    def with_restarts(self, engines: RemoteEngine, reward: Reward) -> list[StepRecord]:
        """Train to the end, after a lost learner rank or lost weights from the last checkpoint; return all steps."""
        num_learners = num_engines = 0  # restarts after a lost learner rank, and after lost weights
        config = self.recipe
        checkpoints = Checkpoints(directory=self.directory / "checkpoints", recipe=config.fingerprint())
        while True:
            threads = ThreadGroup()
            try:
                with start_learner(config.learner, layout=config.layout) as learner:
                    return self._attempt(engines, learner, reward, checkpoints, threads)
            except LostWorkerError as error:
                num_learners += 1
                is_engine = {worker.name for worker in error.workers} & {worker.name for worker in engines.workers}
                if is_engine or num_learners > config.learner.max_restarts:
                    raise
                logger.error(
                    "%s; the learner restarts from its last checkpoint, restart %d of at most %d in this run",
                    error,
                    num_learners,
                    config.learner.max_restarts,
                )
            except WeightsLostError as error:
                num_engines += 1
                if num_engines > config.engine.max_restarts:
                    raise
                logger.error("%s; training resumes from its last checkpoint", error)
            threads.join()  # the next attempt needs idle engines

    def _attempt(
        self,
        engines: RemoteEngine,
        learner: RemoteLearner,
        reward: Reward,
        checkpoints: Checkpoints,
        threads: ThreadGroup,
    ) -> list[StepRecord]:
        """Train from the last checkpoint to the end and write the final policy; return the records of all steps."""
        recipe, draft, title = self.recipe, self.plan.draft, self.plan.title
        self._prepare(engines, learner)
        history, waiting = checkpoints.restore(learner)
        pending = Pending() if waiting is None else Pending.from_bytes(waiting)
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
                record = self._evaluated(record, tolerant, reward)
                if record.num_preemptions and not any(each.num_preemptions for each in history):
                    logger.warning(_PREEMPTED, title, record.step + 1, record.num_preemptions)
                history.append(record)
                self.log(metrics_of(record), record.step)
                bar.advance(text=f"reward {record.reward_mean:.3f}")
                words = filter(None, (step_line(record, recipe.grpo.num_steps), bar.left()))
                logger.info("%s: %s", title, ", ".join(words))
                if recipe.grpo.is_checkpoint_due(record.step):
                    checkpoints.save(learner, history, None if waiting is None else waiting.to_bytes())
                    self._keep_histories(engines)
                    if self.turn.num_steps > 0:
                        learner.finish_checkpoint()  # else it would be written while another arm's step is timed

            trainer = self._trainer(learner, history)
            tolerant = self.fault_tolerant(engines, gate, learner, history, pending)
            overlong = {"overlong": recipe.reward.overlong, "max_response_tokens": recipe.sampling.max_response_tokens}
            rewards = partial(score, reward=reward, decode=self.decode, **overlong)
            start_clock = partial(self._start_clock, history)
            loop = self.loop(tolerant, trainer, rewards, on_step, pending, threads, start_clock)
            loop.run(start_step=len(history))
            self.turn.begin(len(history))
            learner.save_hf(self.directory / "policy", self.policy)
            if self._trains_draft:
                learner.save_draft(self.directory / "draft")
        return history

    def _prepare(self, engines: RemoteEngine, learner: RemoteLearner) -> None:
        """Make the engines whole, and load what the run started with into the learner."""
        recipe, draft = self.recipe, self.plan.draft
        if lost := engines.lost_workers():
            logger.error("%s: %s died while no step ran and start again", self.plan.title, ", ".join(map(str, lost)))
            engines.replace(lost)
        if (directory := self._histories) is not None:
            paths = sorted(directory.glob("[0-9]*"), key=lambda path: int(path.name))
            engines.recall([path.read_bytes() for path in paths])  # those that have a history keep it
        if recipe.placement.takes_turns:
            engines.sleep()  # they have just started, or were awake when an earlier attempt failed
        learner.load(
            self.policy,
            recipe.grpo.optimizer,
            with_reference=recipe.grpo.loss.kl_coefficient > 0,
            lora=recipe.policy.lora,
            sent_as=recipe.engine.weight_format,
        )
        if draft is not None and self._trains_draft:
            learner.continue_draft(draft, self.policy, recipe.draft, recipe.engine.dtype)

    @property
    def _histories(self) -> Path | None:
        """Directory of the engines' histories; None where they draft from none."""
        is_drafting = self.plan.num_speculative_tokens > 0 and self.recipe.draft.method is DraftMethod.HISTORY
        return self.directory / "histories" if is_drafting else None

    def _keep_histories(self, engines: RemoteEngine) -> None:
        """Write the engines' histories, for a resumed run: any history is right, whatever the step."""
        if (directory := self._histories) is None:
            return
        try:
            for index, history in enumerate(engines.histories()):
                write_atomic(directory / str(index), history)
        except LostWorkerError as error:  # the loop replaces it at its next call
            logger.warning("%s: the engines' histories stay as they were written before: %s", self.plan.title, error)

    def loop(
        self,
        engines: FaultTolerantEngines,
        trainer: Trainer,
        score: Callable[[Sequence[RolloutGroup]], RewardResult],
        on_step: Callable[..., None],
        pending: Pending,
        threads: ThreadGroup,
        start_clock: Callable[[], StageClock],
    ) -> SyncLoop | AsyncLoop:
        """Build the loop of the recipe."""
        recipe = self.recipe
        grpo = recipe.grpo
        prompts = PromptStream(prompts=tuple(self.prompts), batch_size=grpo.prompts_per_step, seed=grpo.seed)
        if recipe.loop.is_synchronous:
            return SyncLoop(
                arm=self.plan.arm,
                engine=engines,
                gate=engines,
                prompts=prompts,
                score=score,
                trainer=trainer,
                on_step=on_step,
                start_clock=start_clock,
            )
        return AsyncLoop(
            arm=self.plan.arm,
            engines=engines,
            prompts=prompts,
            score=score,
            trainer=trainer,
            loop=recipe.loop,
            on_step=on_step,
            start_clock=start_clock,
            turn=self.turn,
            threads=threads,
            pending=pending,
            submitted=Submitted(self.directory / "submitted"),
        )

    def _start_clock(self, history: Sequence[StepRecord]) -> StageClock:
        """Start the clock of the next step once it is this arm's turn."""
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
        """Wrap the engines and their gate for the loop, so that lost engines are replaced."""
        recipe, k = self.recipe, self.plan.num_speculative_tokens
        steps = [record.autopilot for record in history] + [each.result.autopilot for each in pending.scored]
        if recipe.loop.mode is LoopMode.IN_FLIGHT:
            engines.run_in_flight(recipe.loop.kv_cache)  # also drops what an earlier attempt left unfinished
        return FaultTolerantEngines(
            engines,
            gate,
            sampling=recipe.sampling,
            max_restarts=recipe.engine.max_restarts,
            is_beside_training=not recipe.loop.is_synchronous,
            memory_sharer=learner if recipe.placement.takes_turns else None,
            autopilot=Autopilot(self.plan.schedule, steps) if k > 0 and recipe.draft.autopilot else None,
        )

    def _evaluated(self, record: StepRecord, engines: FaultTolerantEngines, reward: Reward) -> StepRecord:
        """Add the accuracy of the policy that sampled a step's rollouts to its record where an evaluation is due.

        Only a synchronous loop evaluates: its engines are idle between steps and still hold that policy.
        """
        recipe, plan, step = self.recipe, self.plan, record.step
        if not plan.validation or not recipe.loop.is_synchronous or not recipe.evaluation.is_due(step):
            return record
        try:
            with engines.between_steps():
                found = evaluation.evaluate(
                    engines,
                    plan.validation,
                    reward=reward,
                    decode=self.decode,
                    config=recipe.evaluation,
                    policy=plan.arm.value,
                    seed=recipe.grpo.seed,
                )
                return replace(record, evaluation=found)
        except WeightsLostError as error:
            logger.error("%s: the policy after step %d is not evaluated, training goes on: %s", plan.title, step, error)
            return record

    @property
    def _trains_draft(self) -> bool:
        return self.plan.draft is not None and self.recipe.draft.online.when is not DraftOnline.OFF

    def _trainer(self, learner: RemoteLearner, history: Sequence[StepRecord]) -> Trainer:
        recipe, draft = self.recipe, Draft(version=None if self.plan.draft is None else 0)
        if self._trains_draft:
            draft = TrainedDraft(recipe.draft, reference=self.plan.draft_length, history=history)
        return Trainer(
            learner=learner,
            config=recipe.grpo,
            sampling=recipe.sampling,
            draft=draft,
            guard=AcceptanceGuard(
                (record.acceptance for record in history if record.acceptance is not None),
                may_rest=any(not entry.num_speculative_tokens for entry in self.plan.schedule),
            ),
            max_lag=recipe.loop.max_off_policy_steps,
        )


def score(
    groups: Sequence[RolloutGroup],
    reward: Reward,
    decode: Decode,
    *,
    max_response_tokens: int,
    overlong: OverlongConfig,
) -> RewardResult:
    """Score each rollout, group by group, less what `overlong` takes off those that near `max_response_tokens`."""
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    found = reward.judge(
        [prompt for prompt, _ in pairs],
        [decode(prompt.token_ids, rollout.token_ids) for prompt, rollout in pairs],
        cut_off=[rollout.finish_reason is FinishReason.LENGTH for _, rollout in pairs],
    )
    lengths = [len(rollout.token_ids) for _, rollout in pairs]
    return penalized(found, lengths, max_response_tokens=max_response_tokens, overlong=overlong)
