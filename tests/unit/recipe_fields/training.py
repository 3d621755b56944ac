"""Probes of GRPO: one arm between an engine and a learner that note what they are asked."""

import subprocess
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream.drafts.length import DraftLength
from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.correction import corrected
from slipstream.grpo.loss import policy_loss
from slipstream.grpo.update import Trained
from slipstream.recipe import Recipe
from slipstream.records.steps import DraftUpdate, TrainStats
from slipstream.refit.channel import Location, Snapshot, here
from slipstream.refit.config import EngineState, WeightFiles
from slipstream.refit.fingerprint import Turn
from slipstream.rewards import pool, verifier
from slipstream.rewards.config import MATHEMATICS, RewardConfig
from slipstream.rewards.function import RewardError, open_reward
from slipstream.rewards.pool import Outcome
from slipstream.stages.train_grpo import arm_plan
from slipstream.train import arm
from slipstream.types import Arm, Prompt
from slipstream.workers.calls import LostWorkerError, Worker
from tests.unit.recipe_fields.base import PROMPTS, Check, NotedEngine, Tools, checks, rollout_groups
from tests.unit.recipe_fields.policy import megatron_optimizer
from tests.unit.recipe_fields.workers import engine_arguments
from tests.unit.sampled import accepted
from tests.unit.train.world import Delays, FlightWorld, in_flight


class NotedLearner:
    """Notes updates and checkpoints; its logprobs are -0.5 a token."""

    def __init__(self) -> None:
        self.loads: list[Any] = []
        self.updates: list[Any] = []
        self.checkpoints: list[str] = []
        self.channels: list[Any] = []
        self.drafts: list[Any] = []
        self.num_offloads = 0
        self.workers: tuple[Any, ...] = ()

    def limit_threads(self, node_id: str, num_threads: int | None) -> None:
        """It has no threads."""

    def offload(self) -> None:
        self.num_offloads += 1

    def load(self, policy: Path, optimizer: Any, *, with_reference: bool, lora: Any, sent_as: Any) -> None:
        self.loads.append((optimizer, with_reference, lora, sent_as))

    def logprobs(self, batch: Any, temperature: float) -> list[Any]:
        return [np.full(2, -0.5, dtype=np.float32) for _ in batch.token_ids]

    def ref_logprobs(self, batch: Any, temperature: float) -> None:
        return None

    def train_step(self, update: Any) -> Trained:
        self.updates.append(update)
        stats = TrainStats(loss=0.0, grad_norm=0.0, kl=0.0, clip_fraction=0.0, num_tokens=1, learning_rate=0.0)
        draft = DraftUpdate(loss=1.0, num_updates=1, elapsed_s=0.5) if update.trains_draft else None
        return Trained(stats=stats, own_logprobs=self.logprobs(update.batch, update.temperature), draft=draft)

    def locations(self) -> list[Location]:
        return [here()]

    def weight_bytes(self) -> int:
        return 4

    def open_stream(self, settings: Any, engines: Any) -> None:
        self.channels.append((settings, engines))

    def stream(self, *, is_draft: bool, timeout_s: float) -> str | None:
        self.channels.append(timeout_s)
        return "d"

    def close_stream(self) -> None:
        self.channels.append("closed")

    def start_publish(self, directory: Path, version: int, *, is_draft: bool = False) -> Callable[[], Snapshot]:
        self.channels.append("published")
        return lambda: Snapshot(path="weights", version=version, digest="d")

    def continue_draft(self, draft: Path, policy: Path, config: Any, engine_dtype: Any) -> None:
        self.drafts.append((draft.name, config, engine_dtype))

    def start_fingerprints(
        self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
    ) -> Callable[[], dict[str, int]]:
        return lambda: {name: 7 for name in dtypes if turn.takes(name)}

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        path.mkdir(parents=True)
        self.checkpoints.append(path.name)

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        """Nothing is written in the background."""

    def inspect_checkpoint(self, path: Path) -> dict[str, Any]:
        return {}

    def save_hf(self, path: Path, tokenizer_dir: Path) -> None:
        """The end."""

    def save_draft(self, path: Path) -> None:
        self.drafts.append(path.name)


class LostEngine(NotedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.workers = (Worker(None, "engine 0"),)

    def generate(self, prompts: Sequence[Prompt], **_: Any) -> GenerationResult:
        raise LostWorkerError("engine 0 died", self.workers)

    def replace(self, lost: Sequence[Worker]) -> None:
        self.calls.append("replaced")


class LostLearner(NotedLearner):
    def train_step(self, update: Any) -> Trained:
        raise LostWorkerError("learner rank 0 died", [Worker(None, "learner rank 0")])


def trained(
    recipe: Recipe,
    tools: Tools,
    *,
    engine: NotedEngine | None = None,
    learner: NotedLearner | None = None,
    draft: Path | None = None,
    validation: tuple[Prompt, ...] = (),
) -> tuple[NotedEngine, NotedLearner, Any, list[Any]]:
    """One arm of training between an engine and a learner that note what they are asked, and a pool that does."""
    engine, learner, pools = engine or NotedEngine(), learner or NotedLearner(), []

    class Pool:
        def __init__(self, function: str, config: RewardConfig) -> None:
            pools.append(function)

        def run(self, requests: Sequence[Any]) -> Outcome:
            return Outcome(values=(False,) * len(requests), failures={}, num_timeouts=0, num_crashes=0)

        def close(self) -> None:
            """Nothing runs."""

    tools.patch.setattr(verifier, "WorkerPool", Pool)
    tools.patch.setattr(arm, "own_node", lambda: "here")
    tools.patch.setattr(arm, "start_learner", lambda config, layout: nullcontext(learner))
    drafts: dict[str, Any] = {"arm": Arm.AUTOREGRESSIVE, "num_speculative_tokens": 0, "draft": None}
    if draft is not None:
        drafts = {"arm": Arm.SPECULATIVE, "num_speculative_tokens": 3, "draft": draft, "draft_length": 2.5}
    start = typing.cast(Any, lambda: nullcontext(engine))
    plan = arm.ArmPlan(start_engine=start, validation=validation, **drafts)
    places = {"policy": tools.directory, "directory": tools.directory / "arm"}
    calls = {"decode": lambda _, ids: "\\boxed{" + "0" * 20 + f"{ids[0]}}}", "log": lambda metrics, step: None}
    run = arm.Run(recipe=recipe, plan=plan, prompts=PROMPTS, **places, **calls)
    return engine, learner, run.train(), pools


def training_calls(recipe: Recipe, tools: Tools) -> object:
    """What the engine is asked for, what each update is made of, and when a checkpoint is written."""
    engine, learner, _, _ = trained(recipe, tools)
    updates = [
        (each.batch.counts, each.batch.advantages, each.temperature, each.trainer_logprobs is None)
        for each in learner.updates
    ]
    return engine.calls, updates, learner.checkpoints, [with_reference for _, with_reference, _, _ in learner.loads]


def training_loss(recipe: Recipe, tools: Tools) -> object:
    """The loss that an update asks for: ratios 0.5 and 2, to the engine 12 and 18, advantages 1 and -1, a reference."""
    _, learner, _, _ = trained(recipe, tools)
    config = learner.updates[0].loss
    ratio_BT, mask_BT = torch.tensor([[0.5, 2.0]]).log(), torch.ones(1, 2, dtype=torch.bool)
    places, zeros_BT = [(0, slice(2))], torch.zeros(1, 2)
    weights = corrected(torch.tensor([[2.5, 2.9]]), mask_BT, places, config)
    how: Any = {"trainer_logprobs_BT": zeros_BT, "ref_logprobs_BT": zeros_BT, "mask_BT": mask_BT, "places": places}

    def loss(advantage: float) -> float:
        advantages_BT = torch.full((1, 1), advantage)
        return policy_loss(ratio_BT, advantages_BT=advantages_BT, config=config, weights=weights, **how).loss.item()

    return loss(1.0), loss(-1.0)


def training_optimizer(recipe: Recipe, tools: Tools) -> object:
    """Megatron's optimizer of the settings that the learner is loaded with."""
    _, learner, _, _ = trained(recipe, tools)
    assert learner.loads[0][0] is recipe.grpo.optimizer
    return megatron_optimizer(recipe, tools)


def training_adapters(recipe: Recipe, tools: Tools) -> object:
    """The adapters that the learner is to train."""
    _, learner, _, _ = trained(recipe, tools)
    return [lora for _, _, lora, _ in learner.loads]


def training_format(recipe: Recipe, tools: Tools) -> object:
    """The format in which engines hold the policy and the learner sends it."""
    _, learner, _, _ = trained(recipe, tools)
    assert [sent_as for *_, sent_as in learner.loads] == [recipe.engine.weight_format]
    return engine_arguments(recipe, tools)


def training_records(recipe: Recipe, tools: Tools) -> object:
    _, _, record, _ = trained(recipe, tools)
    return [(step.mismatch, step.reward_mean) for step in record.steps]


def evaluations(recipe: Recipe, tools: Tools) -> object:
    """The steps whose policies are evaluated, and with what the engine is asked for that."""
    engine, _, record, _ = trained(recipe, tools, validation=PROMPTS[6:])
    return engine.calls, [(step.step, step.evaluation) for step in record.steps if step.evaluation is not None]


def training_turns(recipe: Recipe, tools: Tools) -> object:
    engine, learner, _, _ = trained(recipe, tools)
    return engine.calls.count("sleep"), learner.num_offloads


def training_loop(recipe: Recipe, tools: Tools) -> object:
    _, _, record, _ = trained(recipe, tools)
    return record.loop, record.max_off_policy_steps


def started_engines(recipe: Recipe, tools: Tools) -> object:
    length, place = DraftLength(num_speculative_tokens=0), tools.directory
    plan = arm_plan(recipe, Arm.AUTOREGRESSIVE, policy=place, draft=place, length=length)
    return typing.cast(partial, plan.start_engine).keywords["kv_cache"]


def restarts_in_flight(recipe: Recipe, tools: Tools) -> object:
    """Whether rollouts that training would wait for start anew, with a learner that is never waited for."""
    world = FlightWorld(delays=Delays(seed=1, longest_s=0.001), lag=1)
    in_flight(world, 1, too_old=recipe.loop.too_old)
    return world.num_restarts > 0


def training_channel(recipe: Recipe, tools: Tools) -> object:
    """How weights travel: which channel is opened, with which buckets and deadlines."""
    return trained(recipe, tools)[1].channels


def engine_restarts(recipe: Recipe, tools: Tools) -> object:
    engine = LostEngine()
    with pytest.raises(LostWorkerError):
        trained(recipe, tools, engine=engine)
    return engine.calls.count("replaced")


def learner_restarts(recipe: Recipe, tools: Tools) -> object:
    learner, engine = LostLearner(), NotedEngine()
    with pytest.raises(LostWorkerError):
        trained(recipe, tools, learner=learner, engine=engine)
    return len(learner.loads)


def reward_workers(recipe: Recipe, tools: Tools) -> object:
    """What the workers for three responses are started with: function, memory and time."""
    start, started = subprocess.Popen, []

    def note(command: list[str], **settings: Any) -> Any:
        started.append(command[2:])
        return start(["sleep", "60"], **settings)

    tools.patch.setattr(pool.subprocess, "Popen", note)
    workers = pool.WorkerPool(MATHEMATICS, recipe.reward)
    workers._feed(deque([(0, "", b"")] * 3))
    workers.close()
    return started


def failing_rewards(recipe: Recipe, _: Tools) -> object:
    """What is said of a function that fails for a quarter of the responses."""
    with open_reward(recipe.reward) as reward:
        try:
            return reward.judge(PROMPTS[:1] * 4, ["1", "2", "3", "four"], cut_off=[False] * 4)
        except RewardError as error:
            return str(error)


ACCEPTED = accepted(10**6, 750_000)


class DraftingEngine(NotedEngine):
    """Takes a draft, which could save 0.3 s of each step's 1 s."""

    def __init__(self) -> None:
        super().__init__()
        self.draft_version = 0

    def generate(self, prompts: Sequence[Prompt], *, sampling: Any, group_size: int, seed: int) -> GenerationResult:
        groups = tuple(
            replace(group, rollouts=tuple(replace(each, draft_version=self.draft_version) for each in group.rollouts))
            for group in rollout_groups(prompts, group_size, self.version)
        )
        return GenerationResult(groups=groups, acceptance=ACCEPTED, generation_s=1.0)

    def start_refit(self, weights: WeightFiles) -> Callable[[], list[EngineState]]:
        if weights.draft is not None:
            self.draft_version = weights.draft_version
        return super().start_refit(weights)

    def states(self) -> list[EngineState]:
        return [replace(state, draft_version=self.draft_version, draft_digest="d") for state in super().states()]


def online_training(recipe: Recipe, tools: Tools) -> object:
    """Which steps train a draft that is accepted less than it could be, and the draft version of each step."""
    save_file({"w": torch.zeros(1)}, tools.directory / "model.safetensors")
    _, learner, record, _ = trained(recipe, tools, engine=DraftingEngine(), draft=tools.directory)
    return [each.trains_draft for each in learner.updates], [step.draft_version for step in record.steps]


CORRECTED = {"grpo.loss.truncated_importance_sampling": 2.0}
CAPPED_HIGH = {"grpo.loss.truncated_importance_sampling": 1000.0}
MASKED = {"grpo.loss.truncated_importance_sampling": 2.0, "grpo.loss.mask_band": [0.5, 16.0]}
GROUPS_OF_4 = {"tuning.batch_sizes": [4, 8]}
WHEN_STALE = {"draft.online.when": "when_stale", "grpo.num_steps": 10}
OVER_GLOO = {"refit.channel": "gloo"}
ONE_STEP_OFF = {"loop.mode": "one_step_off", **CORRECTED}
IN_FLIGHT = {"loop.mode": "in_flight", "loop.max_off_policy_steps": 1, **CORRECTED}
_ON_GPU = {"placement.gpus_per_node": 1, "engine.kv_cache_gib": None, "engine.gpu_memory_utilization": 0.45}
IN_TURN = {**_ON_GPU, "engine.num_kept_idle": 0, "learner.num_kept_idle": 0}
OWN_REWARD = {"function": f"{Path(__file__).with_name('rewards_of_a_user.py')}:compute_score"}
ALL_ALIKE = {"reward.function": OWN_REWARD["function"]}
FAILING = {"reward.function": f"{Path(__file__).with_name('rewards_of_a_user.py')}:strict"}
ADAPTERS = {"policy.lora.rank": 2}
CHECKS = {
    **checks("policy.lora", training_adapters, ADAPTERS, rank=3, alpha=8.0, targets=["q_proj"]),
    "placement.memory": Check("in_turn", training_turns, IN_TURN),
    "loop.mode": Check("one_step_off", training_loop),
    "loop.max_off_policy_steps": Check(2, training_loop, ONE_STEP_OFF),
    "loop.kv_cache": Check("keep", started_engines, IN_FLIGHT),
    "loop.too_old": Check("restart", restarts_in_flight, IN_FLIGHT),
    "sampling.temperature": Check(0.5, training_calls),
    **checks("grpo", training_calls, num_steps=5, prompts_per_step=1, scale_advantages_by_std=True, updates_per_step=2),
    **checks("grpo", training_calls, recompute_logprobs="always", checkpoint_every_steps=1, seed=1),
    "grpo.group_size": Check(4, training_calls, GROUPS_OF_4),
    "grpo.dynamic_sampling.max_extra_batches": Check(1, training_calls, ALL_ALIKE),
    **checks(
        "grpo.optimizer", training_optimizer, learning_rate=0.5, method="muon", betas=[0.8, 0.9], weight_decay=0.1
    ),
    "grpo.optimizer.clip_grad": Check(0.5, training_optimizer),
    **checks("grpo.loss", training_loss, kind="rloo", clip_low=0.4, clip_high=0.4, kl_coefficient=0.1),
    "grpo.loss.kl_estimator": Check("k1", training_loss, {"grpo.loss.kl_coefficient": 0.1}),
    **checks("grpo.loss", training_loss, CORRECTED, truncated_importance_sampling=3.0, mask_band=[0.5, 16.0]),
    "engine.quantization": Check("int8", training_format, CAPPED_HIGH),
    "grpo.loss.correction": Check("sequence", training_loss, CAPPED_HIGH),
    "grpo.loss.mask_level": Check("sequence", training_loss, MASKED),
    "grpo.loss.filter_overlong": Check(True, training_calls),
    "draft.online.when": Check("always", online_training),
    "draft.online.horizon_steps": Check(1, online_training, WHEN_STALE),
    "refit.channel": Check("gloo", training_channel),
    **checks("refit", training_channel, OVER_GLOO, bucket_mib=1.0, timeout_s=5.0),
    "engine.max_restarts": Check(1, engine_restarts),
    "learner.max_restarts": Check(2, learner_restarts),
    "refit.check_every_steps": Check(2, training_calls),
    **checks("reward", training_records, function=OWN_REWARD["function"], functions=[OWN_REWARD]),
    **{
        f"reward.functions[].{name}": Check(
            [{**OWN_REWARD, name: value}], training_records, {"reward.functions": [OWN_REWARD]}
        )
        for name, value in {"function": "mathematics", "weight": 2.0, "data_source": "other"}.items()
    },
    "reward.overlong.buffer_tokens": Check(160, training_records),
    "reward.overlong.penalty": Check(2.0, training_records, {"reward.overlong.buffer_tokens": 160}),
    "reward.max_failed_fraction": Check(0.2, failing_rewards, FAILING),
    **checks("reward", reward_workers, timeout_s=1.0, num_workers=2, worker_memory_gib=1.0),
}
