"""Probes of the draft: its training, and the choice of its length."""

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from slipstream.config import ConfigError
from slipstream.data.tokenizer import write_tokenizer
from slipstream.drafts import length, methods
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.pretrain import scratch_model
from slipstream.drafts.trainer import DraftTrainer
from slipstream.engine.protocol import GenerationResult, RunningTime
from slipstream.ragged import Ragged
from slipstream.recipe import Recipe
from slipstream.records.steps import ArmRecord, ScheduleEntry
from slipstream.stages import pretrain_draft, support, train_grpo, tune_draft_length
from slipstream.stages import recipe_engines as stage_engines
from slipstream.stages.context import arm_node
from slipstream.train.arm import Run
from slipstream.train.batch import Pending
from slipstream.types import Arm, Prompt
from slipstream.workers.learner_process import LearnerProcess
from tests.small import tuned
from tests.unit.recipe_fields.base import PROMPTS, Check, NotedEngine, Tools, checks, rollout_groups
from tests.unit.recipe_fields.policy import OPTIMIZER, own_policy

# The recipe's own method of drafts is Muon.
PRETRAINER: dict[str, Any] = {**OPTIMIZER, "method": "adamw", "learning_rate": 0.5, "warmup_steps": 1}


class DraftLearner:
    """Notes what a draft's training asks of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers = {
            "draft_step": 1.0,
            "hold_draft_chats": True,
            "evaluate_draft": SimpleNamespace(rate_by_position=(0.5,), mean_acceptance_length=1.5),
        }

        def call(*arguments: Any) -> Any:
            self.calls.append((name, [each for each in arguments if not dataclasses.is_dataclass(each)]))
            return answers.get(name, 7)

        return call


class WordyEngine(NotedEngine):
    """Answers each token of another engine's answers twice: a draft of three tokens fits in."""

    def generate(self, prompts: Sequence[Prompt], **asked: Any) -> GenerationResult:
        found = super().generate(prompts, **asked)
        groups = []
        for group in found.groups:
            rollouts = (replace(one, token_ids=2 * one.token_ids) for one in group.rollouts)
            groups.append(replace(group, rollouts=tuple(rollouts)))
        return replace(found, groups=tuple(groups))


def draft_training(recipe: Recipe, tools: Tools) -> object:
    """What engine and learner are asked for by the draft's training."""
    engine, learner = WordyEngine(), DraftLearner()
    tools.patch.setattr(pretrain_draft, "start_engine", lambda policy, config, layout: nullcontext(engine))
    tools.patch.setattr(pretrain_draft, "start_learner", lambda config, layout: nullcontext(learner))
    directory = tools.directory / "draft_training"
    pretrain_draft.train_on(PROMPTS, recipe, policy=directory, directory=directory, on_step=lambda step, loss: None)
    return engine.calls, learner.calls


def draft_prompts(recipe: Recipe, tools: Tools) -> object:
    seen: list[Any] = []

    def train_on(prompts: Sequence[str], *_: Any, **__: Any) -> Any:
        seen.append(prompts)
        raise ConfigError(str(prompts))

    sets = SimpleNamespace(draft_in_domain="in domain", draft_general="general")
    tools.patch.setattr(pretrain_draft, "connect", lambda: None)
    tools.patch.setattr(pretrain_draft, "read_prompt_sets", lambda data: sets)
    tools.patch.setattr(pretrain_draft, "tracked", lambda *arguments: nullcontext())
    tools.patch.setattr(pretrain_draft, "train_on", train_on)
    for name in ("draft_key", "policy_identity", "data_identity"):
        tools.patch.setattr(pretrain_draft, name, lambda *inputs, **more: "key")
    context = support.RunContext(execution="e", root=str(tools.directory))
    return pretrain_draft.pretrain_draft(context, recipe, policy=tools.directory, data=tools.directory)


def saved_policy(recipe: Recipe, tools: Tools) -> Path:
    write_tokenizer(tools.directory / "tokenizer", max_length=64)
    own_policy(recipe).save_hf(tools.directory / "policy", tools.directory / "tokenizer")
    return tools.directory / "policy"


def chats_of(number: int) -> Chats:
    """So many chats of eight tokens with the states that the policy has of them."""
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    chats = [random.integers(4, 60, size=8).tolist() for _ in range(number)]
    states = [(torch.randn(8, 48, generator=generator), torch.randn(8, 16, generator=generator)) for _ in chats]
    return Chats(chats, [2] * number, states)


def weights_sum(trainer: DraftTrainer) -> float:
    return sum(float(parameter.detach().double().abs().sum()) for parameter in trainer._trained)


def draft_steps(recipe: Recipe, tools: Tools) -> object:
    """Two updates of a draft: their losses, its weights' sum, its settings, and what it says of held-out chats."""
    trainer, chats = DraftTrainer(saved_policy(recipe, tools), recipe.draft), chats_of(3)
    losses = [trainer.step(chats) for _ in range(2)]
    trainer.save(tools.directory / "draft")
    config = json.loads((tools.directory / "draft" / "config.json").read_text())
    layers, rows = config.get("eagle_aux_hidden_state_layer_ids"), len(trainer._rows(chats))
    return losses, rows, weights_sum(trainer), layers, trainer.evaluate(chats)


def head_calls(recipe: Recipe, tools: Tools) -> int:
    """How often the draft's output head is asked in one update: once a chunk and pass."""
    trainer = DraftTrainer(saved_policy(recipe, tools), recipe.draft)
    calls: list[None] = []
    trainer._model.lm_head.register_forward_hook(lambda *_: calls.append(None))
    trainer.step(Chats([list(range(4, 12))], [2], [(torch.zeros(8, 48), torch.zeros(8, 16))]))
    return len(calls)


def known_tokens(recipe: Recipe, tools: Tools) -> object:
    """Of a policy of 64 tokens those that the draft knows."""
    policy = SimpleNamespace(from_hf=lambda path: SimpleNamespace(vocab_size=64))
    tools.patch.setattr(pretrain_draft, "Architecture", policy)
    answers = Chats([(1, 7, 7, 9)], [1])
    return pretrain_draft.known_tokens(recipe.draft, answers, tools.directory)


def online_steps(recipe: Recipe, tools: Tools) -> object:
    """Two steps' training of a saved draft: losses, updates, and its weights' sum."""
    policy, draft = saved_policy(recipe, tools), tools.directory / "draft"
    DraftTrainer(policy, recipe.draft).save(draft)
    trainer = DraftTrainer(policy, recipe.draft, given=draft, is_online=True)
    losses = [trainer.learn(chats_of(4), temperature=1.0) for _ in range(2)]
    return losses, int(trainer.state()["num_steps"]), weights_sum(trainer)


def draft_cache(recipe: Recipe, _: Tools) -> bool:
    """Whether the hidden states of a chat that take 1 MiB are kept."""
    process = LearnerProcess.__new__(LearnerProcess)
    process._policy = typing.cast(
        Any, SimpleNamespace(hidden_states_bytes=lambda chats, ids: 2**20, hidden_states=lambda chats, ids: [])
    )
    process._draft = typing.cast(Any, SimpleNamespace(layer_ids=(0, 1, 2)))
    return process.hold_draft_chats(([0], Ragged.of([(1,)], np.int32), [0]), recipe.draft)


class TimedEngine:
    """Takes a second with k=0, and 0.8 s with a draft; a rollout alone gains a token 1.05 times as fast with k=3."""

    def __init__(self, k: int, calls: list[Any]) -> None:
        self.k, self.calls, self.forget = k, calls, lambda: None

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, seed: int, **_: Any) -> GenerationResult:
        self.calls.append((self.k, len(prompts), group_size, seed))
        alone = RunningTime(num_running=1, num_steps=1, num_tokens=1, elapsed_s=1.0 / 1.05 if self.k == 3 else 1.0)
        took: Any = {"generation_s": 0.8 if self.k else 1.0, "running": (alone,)}
        return GenerationResult(groups=rollout_groups(prompts, group_size), acceptance=None, **took)


def tuning(recipe: Recipe, tools: Tools) -> object:
    """Who generates what in which order, and what is chosen."""
    calls: list[Any] = []

    @contextmanager
    def start(k: int) -> Iterator[Any]:
        yield TimedEngine(k, calls)

    swept = length.sweep(
        start, PROMPTS, config=recipe.tuning, sampling=recipe.sampling, seed=0, group_size=recipe.grpo.group_size
    )
    record = length.choose(swept.points, config=recipe.tuning, batch=8, rounds=swept.rounds)
    return calls, record.chosen_k, record.schedule


def swept(recipe: Recipe, tools: Tools) -> object:
    """How much of a GPU the engines of the sweep take, and how long their responses may be."""
    engines: list[Any] = []

    @contextmanager
    def start_engine(policy: Path, *, config: Any, **_: Any) -> Iterator[Any]:
        engines.append(config.gpu_memory_utilization)
        yield SimpleNamespace(workers=())

    def sweep(start: Any, prompts: Any, *, sampling: Any, **_: Any) -> Any:
        with start(0):
            return sampling.max_response_tokens

    tools.patch.setattr(stage_engines, "start_engine", start_engine)
    tools.patch.setattr(tune_draft_length.length, "sweep", sweep)
    tools.patch.setattr(tune_draft_length, "read_prompt_sets", lambda data: SimpleNamespace(train=()))
    here = tools.directory
    return tune_draft_length._sweep(recipe, policy=here, data=here, draft=here, timed=set()), engines


def arm_plan(recipe: Recipe, tools: Tools) -> object:
    """What the speculative arm drafts by, and what its engine starts with."""
    ((plan, _),) = planned(recipe, tools, [Arm.SPECULATIVE])
    return plan.num_speculative_tokens, plan.schedule, plan.start_engine.keywords


def turns_of_arms(recipe: Recipe, tools: Tools) -> object:
    """The steps that each arm takes before it is the other's turn; None: there are no turns."""
    return [turn and turn.num_steps for _, turn in planned(recipe, tools, list(Arm))]


def planned(recipe: Recipe, tools: Tools, arms: list[Arm]) -> list[tuple[Any, Any]]:
    """How arms are trained: each one's plan, and its turns."""
    plans: list[Any] = []
    tuned(tools.directory, (1, 4, 3), (5, 8, 1), k=1)

    def run(*, plan: Any, turn: Any, directory: Path, **_: Any) -> Any:
        plans.append((plan, turn))
        record = ArmRecord(arm=plan.arm, num_speculative_tokens=plan.num_speculative_tokens, steps=())
        return SimpleNamespace(directory=directory, train=lambda: record)

    for name in ("connect", "accelerators", "decode", "tokenizer", "parameters"):
        tools.patch.setattr(train_grpo, name, lambda *_: {})
    tools.patch.setattr(train_grpo, "read_prompt_sets", lambda data: SimpleNamespace(train=(), validation=()))
    tracker = SimpleNamespace(log=None, log_artifact=lambda path: None)
    tools.patch.setattr(train_grpo, "tracked", lambda *arguments, **more: nullcontext(tracker))
    tools.patch.setattr(train_grpo, "Run", run)
    context = support.RunContext(execution="e", root=str(tools.directory))
    here = tools.directory
    train_grpo.train_grpo(context, recipe, arms, policy=here, data=here, draft=here, tuning=here)
    for arm in arms:
        (tools.directory / "e" / arm_node(arm) / "arm.json").unlink()  # it is asked twice
    return plans


def flight(recipe: Recipe, tools: Tools) -> object:
    """How the engines of an arm are told to draft, step by step, where drafting costs 4 % more than not."""
    table = (ScheduleEntry(batch_from=1, batch_to=8, num_speculative_tokens=3),)
    told: list[Any] = []

    class Engines(NotedEngine):
        def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
            told.append(schedule)

        def generate(self, prompts: Sequence[Prompt], **settings: Any) -> GenerationResult:
            drafts = not told or told[-1] == table
            return replace(super().generate(prompts, **settings), generation_s=1.04 if drafts else 1.0)

    engines: Any = Engines()
    plan: Any = SimpleNamespace(num_speculative_tokens=3, schedule=table)
    unused: Any = None
    places: Any = {"policy": tools.directory, "directory": tools.directory}
    run = Run(recipe=recipe, plan=plan, prompts=(), decode=unused, log=unused, **places)
    piloted = run.fault_tolerant(engines, unused, unused, [], Pending())
    for step in range(24):
        piloted.generate(PROMPTS[:1], sampling=recipe.sampling, group_size=2, seed=step)
    return [schedule == table for schedule in told]


def told_vllm(recipe: Recipe, tools: Tools) -> object:
    """What vLLM is told of the draft; suffix decoding's package is taken to be there."""
    tools.patch.setattr(methods, "find_spec", lambda package: package)
    return methods.speculative_config(recipe.draft, stage_engines.draft_weights(recipe.draft, tools.directory), 3)


def small_draft(recipe: Recipe, tools: Tools) -> object:
    """The small model that is to propose tokens, given or to be trained."""
    policy = {"vocab_size": 64, "max_position_embeddings": 512, "eos_token_id": 3}
    (tools.directory / "config.json").write_text(json.dumps(policy))
    return recipe.draft.trains, scratch_model(recipe.draft, tools.directory)


FOUR_LAYERS = {"policy.scratch.shape.num_layers": 4}
NGRAM, SUFFIX, HISTORY, DRAFT_MODEL = (
    {"draft.method": method} for method in ("ngram", "suffix", "history", "draft_model")
)
DFLASH = {"draft.method": "dflash", "draft.pretrain.ttt_steps": 3}  # as long as the longest of tuning.candidate_ks
CHECKS = {
    **checks("draft", told_vllm, method="ngram", sampling="greedy", verification="block"),
    **checks("draft.ngram", told_vllm, NGRAM, prompt_lookup_min=3, prompt_lookup_max=4),
    **checks("draft.suffix", told_vllm, SUFFIX, max_tree_depth=8, max_cached_requests=0, max_spec_factor=2.0),
    "draft.suffix.min_token_prob": Check(0.5, told_vllm, SUFFIX),
    **checks("draft.history", told_vllm, HISTORY, match_min=3, match_max=8, max_tokens=9),
    "draft.model": Check("somewhere", small_draft, DRAFT_MODEL),
    **checks("draft.draft_model.shape", small_draft, DRAFT_MODEL, hidden_size=32, num_layers=1, num_attention_heads=4),
    **checks("draft.draft_model.shape", small_draft, DRAFT_MODEL, num_query_groups=2, head_dim=16, ffn_hidden_size=64),
    "draft.draft_model.shape.init_std": Check(0.1, small_draft, DRAFT_MODEL),
    **checks("draft.draft_model.optimizer", small_draft, DRAFT_MODEL, **PRETRAINER),
    "placement.arms_in_turn": Check("off", turns_of_arms),
    "draft.init": Check("general", draft_prompts),
    **checks("draft.pretrain", draft_training, num_prompts=3, samples_per_prompt=2, num_heldout_prompts=1, num_steps=5),
    **checks("draft.pretrain", draft_training, tokens_per_step=4, checkpoint_every_steps=1),
    "draft.eagle3.aux_hidden_state_layer_ids": Check([0, 1, 3], draft_steps, FOUR_LAYERS),
    **checks("draft.eagle3", draft_steps, tokens_per_row=16, fc_norm=True, norm_output=True, loss="tv"),
    **checks("draft.pretrain", draft_steps, ttt_steps=3, ttt_step_loss_decay=0.5),
    "draft.eagle3.loss_chunk_tokens": Check(4, head_calls),
    "draft.eagle3.vocab_size": Check(2, known_tokens),
    **checks("draft.dflash", draft_steps, DFLASH, num_layers=1, tokens_per_row=16),
    "draft.dflash.loss_chunk_tokens": Check(4, head_calls, DFLASH),
    "draft.dflash.vocab_size": Check(2, known_tokens, DFLASH),
    **checks("draft.dflash.optimizer", draft_steps, DFLASH, **PRETRAINER),
    **checks("draft.pretrain.optimizer", draft_steps, **{**PRETRAINER, "warmup_steps": 4}),
    "draft.seed": Check(1, draft_steps),
    **checks("draft.online.optimizer", online_steps, learning_rate=0.1, warmup_steps=1),
    **{f"draft.online.optimizer.{name}": Check(value, online_steps) for name, value in OPTIMIZER.items()},
    **checks("draft.online", online_steps, tokens_per_update=8, ttt_steps=1, updates=2),
    "draft.pretrain.states_cache_gib": Check(0.0001, draft_cache),
    **checks("tuning", tuning, candidate_ks=[0, 1], batch_sizes=[2, 4], num_repeats=3, max_live_engines=3),
    **checks("tuning", swept, max_response_tokens=1, gpu_memory_utilization=0.1),
    "draft.length": Check("by_batch", arm_plan),
    "draft.autopilot": Check(True, flight),
}
