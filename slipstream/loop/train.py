"""One arm of GRPO training from start, or from its last checkpoint, to end: what stands around the loop."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import from_mapping
from slipstream.data.prompts import PromptStream
from slipstream.loop import workers
from slipstream.loop.acceptance_guard import AcceptanceGuard
from slipstream.loop.refit_gate import RefitGate
from slipstream.loop.sync import Learner, SyncLoop
from slipstream.policy.stats import CheckpointError
from slipstream.records import ArmRecord, StepRecord
from slipstream.refit import transfer_directory
from slipstream.rewards.verifier import RewardResult, Verifier
from slipstream.types import STAGES, Arm, Prompt, RolloutGroup

if TYPE_CHECKING:
    from slipstream.loop.workers import RemoteEngine
    from slipstream.recipe import Recipe

logger = logging.getLogger(__name__)

LogMetrics = Callable[[Mapping[str, float], int], None]
_CHECKPOINTS_KEPT = 2
_NUM_PROBES = 16  # prompts that an engine is compared on if its tensors cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmPlan:
    """What sets one arm apart from the other: its engine, nothing else."""

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
    transfer = transfer_directory()
    try:
        with (
            workers.start_learner(recipe.learner) as learner,
            plan.start_engine() as engine,
            Verifier(recipe.reward) as verifier,
        ):
            with_reference = recipe.grpo.loss.kl_coefficient > 0
            learner.call("load", policy, recipe.grpo.optimizer, with_reference=with_reference)
            history = checkpoints.restore(learner)
            draft_version = 0 if plan.draft is not None else None
            gate = RefitGate(
                engine,
                learner,
                transfer=transfer,
                draft=plan.draft,
                config=recipe.refit,
                probes=[prompt.token_ids for prompt in prompts[:_NUM_PROBES]],
            )

            def on_step(record: StepRecord) -> None:
                history.append(record)
                log(metrics_of(record), record.step)
                logger.info("train_grpo %s: %s", plan.arm.value, _line(record, recipe.grpo.num_steps))
                if len(history) % recipe.grpo.checkpoint_every_steps == 0:
                    checkpoints.save(learner, history)

            loop = SyncLoop(
                engine=engine,
                learner=learner,
                prompts=PromptStream(
                    prompts=tuple(prompts), batch_size=recipe.grpo.prompts_per_step, seed=recipe.grpo.seed
                ),
                score=lambda groups: score(groups, verifier, decode),
                config=recipe.grpo,
                sampling=recipe.sampling,
                gate=gate,
                on_step=on_step,
                draft_version=draft_version,
                guard=AcceptanceGuard(record.acceptance for record in history if record.acceptance is not None),
            )
            loop.run(start_step=len(history))
            learner.call("save_hf", directory / "policy", policy)
    finally:
        shutil.rmtree(transfer)
    return ArmRecord(arm=plan.arm, num_speculative_tokens=plan.num_speculative_tokens, steps=tuple(history))


def score(groups: Sequence[RolloutGroup], verifier: Verifier, decode: Callable[[Sequence[int]], str]) -> RewardResult:
    """One reward a rollout, group by group."""
    texts = [decode(rollout.token_ids) for group in groups for rollout in group.rollouts]
    return verifier.score(texts, [group.prompt.answer for group in groups for _ in group.rollouts])


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one arm: each holds the learner's whole state and every step's record up to it.

    `recipe` names what they belong to: steps of one recipe must not be continued with another.
    """

    directory: Path
    recipe: str
    keep: int = field(default=_CHECKPOINTS_KEPT)

    def save(self, learner: Learner, history: Sequence[StepRecord]) -> None:
        """Write the checkpoint after `len(history)` steps, then drop the oldest beyond `keep`."""
        path = self.directory / f"step-{len(history):06d}"
        learner.save_checkpoint(path, {"recipe": self.recipe, "steps": [asdict(record) for record in history]})
        for old in self._paths()[: -self.keep]:
            shutil.rmtree(old)

    def restore(self, learner: Learner) -> list[StepRecord]:
        """Load the newest whole checkpoint into the learner, if there is one; returns the steps that it holds.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged; or they belong to another recipe.
        """
        damaged: list[str] = []
        for path in reversed(self._paths()):
            try:
                extra = learner.load_checkpoint(path)
            except CheckpointError as error:
                damaged.append(str(error))
                logger.error("train_grpo: %s; trying the one before it", error)
                continue
            if extra["recipe"] != self.recipe:
                raise CheckpointError(
                    f"checkpoint {path} must be of this run's recipe, got another one's: give the run another "
                    "execution name, or the recipe that it was started with"
                )
            history = [from_mapping(StepRecord, step, f"steps[{i}]") for i, step in enumerate(extra["steps"])]
            logger.info("train_grpo: going on from %s, step %d", path.name, len(history))
            return history
        if damaged:
            raise CheckpointError(f"no checkpoint can be resumed from; remove them to start anew: {'; '.join(damaged)}")
        return []

    def _paths(self) -> list[Path]:
        """Complete checkpoints, oldest first: a half-written one has another name."""
        return sorted(self.directory.glob("step-??????"))


def metrics_of(record: StepRecord) -> dict[str, float]:
    """A step's metrics under their MLflow names."""
    seconds = record.times.by_stage()
    metrics: dict[str, float] = {f"time/{stage}_s": seconds[stage] for stage in STAGES}
    metrics |= {
        "time/step_s": record.times.step_s,
        "rollout/response_tokens": record.num_response_tokens,
        "rollout/tokens_per_s": record.num_response_tokens / record.times.generation_s,
        "rollout/truncated": record.num_truncated,
        "train/reward": record.reward_mean,
        "train/reward_timeouts": record.num_reward_timeouts,
        "train/reward_crashes": record.num_reward_crashes,
        "train/zero_signal_groups": record.num_zero_signal_groups,
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/kl": record.kl,
        "train/clip_fraction": record.clip_fraction,
        "train/mismatch_kl": record.mismatch_kl,
        "train/mismatch_k3": record.mismatch_k3,
        "train/mismatch_mean": record.mismatch_mean,
        "train/mismatch_max": record.mismatch_max,
        "train/mismatch_outside_fraction": record.mismatch_outside_fraction,
        "refit/num_checked_tensors": record.refit.num_tensors,
        "refit/check_s": record.refit.elapsed_s,
        "train/policy_version": record.policy_version,
    }
    if record.refit.probe_difference is not None:
        metrics["refit/probe_difference"] = record.refit.probe_difference
    if record.acceptance is not None:
        metrics["spec/mean_acceptance_length"] = record.acceptance.mean_acceptance_length
        metrics["spec/acceptance_rate"] = record.acceptance.acceptance_rate
        for position, rate in enumerate(record.acceptance.rate_by_position, start=1):
            metrics[f"spec/acceptance_rate_pos_{position}"] = rate
    return metrics


def _line(record: StepRecord, num_steps: int) -> str:
    acceptance = "" if record.acceptance is None else f", AL {record.acceptance.mean_acceptance_length:.2f}"
    tokens_per_s = record.num_response_tokens / record.times.generation_s
    return (
        f"step {record.step + 1}/{num_steps}, reward {record.reward_mean:.3f}, {record.times.step_s:.2f} s "
        f"(generation {record.times.generation_s:.2f} s, {tokens_per_s:.0f} tokens/s){acceptance}"
    )
