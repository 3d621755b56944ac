"""One arm of GRPO training from start, or from its last checkpoint, to end: what stands around the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from slipstream.data.prompts import PromptStream
from slipstream.progress import progress
from slipstream.recipe import Recipe
from slipstream.records import ArmRecord, StepRecord
from slipstream.refit.channel.driver import open_channel
from slipstream.refit.gate import RefitGate
from slipstream.rewards.verifier import RewardResult, Verifier
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.checkpoints import Checkpoints
from slipstream.train.loop import SyncLoop
from slipstream.train.metrics import metrics_of, step_line
from slipstream.types import Arm, Prompt, RolloutGroup
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.learners import start_learner

logger = logging.getLogger(__name__)

LogMetrics = Callable[[Mapping[str, float], int], None]
_NUM_PROBES = 16  # prompts that an engine is compared on if its tensors cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmPlan:
    """What sets one arm apart from the other: its engine and the seeds of its rollouts, nothing else."""

    arm: Arm
    num_speculative_tokens: int
    draft: Path | None  # directory of the draft that the engine holds
    start_engine: Callable[[], AbstractContextManager[RemoteEngine]]


def train(
    recipe: Recipe,
    plan: ArmPlan,
    *,
    policy: Path,
    prompts: Sequence[Prompt],
    decode: Callable[[Sequence[int]], str],
    directory: Path,
    log: LogMetrics,
) -> ArmRecord:
    """Train and write the final policy to `directory/policy`.

    Args:
        decode: tokens to text, for scoring.
        log: gets the metrics of each step.
    """
    checkpoints = Checkpoints(directory=directory / "checkpoints", recipe=recipe.fingerprint())
    name = f"train_grpo {plan.arm.value}"
    with (
        start_learner(recipe.learner, layout=recipe.layout) as learner,
        plan.start_engine() as engine,
        Verifier(recipe.reward) as verifier,
        ExitStack() as running,
    ):
        learner.load(policy, recipe.grpo.optimizer, with_reference=recipe.grpo.loss.kl_coefficient > 0)
        history = checkpoints.restore(learner)
        running.enter_context(checkpoints.finished(learner))
        channel = running.enter_context(open_channel(recipe.refit, learner, engine))
        bar = running.enter_context(
            progress(name, total=recipe.grpo.num_steps, unit="step", done=len(history), in_log=False)
        )

        def on_step(record: StepRecord) -> None:
            history.append(record)
            log(metrics_of(record), record.step)
            bar.advance(text=f"reward {record.reward_mean:.3f}")
            words = filter(None, (step_line(record, recipe.grpo.num_steps), bar.left()))
            logger.info("%s: %s", name, ", ".join(words))
            if len(history) % recipe.grpo.checkpoint_every_steps == 0:
                checkpoints.save(learner, history)

        SyncLoop(
            arm=plan.arm,
            engine=engine,
            learner=learner,
            prompts=PromptStream(
                prompts=tuple(prompts), batch_size=recipe.grpo.prompts_per_step, seed=recipe.grpo.seed
            ),
            score=lambda groups: score(groups, verifier, decode),
            config=recipe.grpo,
            sampling=recipe.sampling,
            gate=RefitGate(
                engine,
                learner,
                channel=channel,
                draft=plan.draft,
                config=recipe.refit,
                probes=[prompt.token_ids for prompt in prompts[:_NUM_PROBES]],
            ),
            on_step=on_step,
            draft_version=0 if plan.draft is not None else None,
            guard=AcceptanceGuard(record.acceptance for record in history if record.acceptance is not None),
        ).run(start_step=len(history))
        learner.save_hf(directory / "policy", policy)
    return ArmRecord(arm=plan.arm, num_speculative_tokens=plan.num_speculative_tokens, steps=tuple(history))


def score(groups: Sequence[RolloutGroup], verifier: Verifier, decode: Callable[[Sequence[int]], str]) -> RewardResult:
    """One reward a rollout, group by group."""
    texts = [decode(rollout.token_ids) for group in groups for rollout in group.rollouts]
    return verifier.score(texts, [group.prompt.answer for group in groups for _ in group.rollouts])
