"""What the probes of a recipe's fields share: the small recipe, the form of a check, and an engine that notes."""

import json
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError, read_yaml
from slipstream.engine.protocol import GenerationResult
from slipstream.recipe import Recipe, load_recipe
from slipstream.refit.channel import Location, here
from slipstream.refit.config import Channel, EngineState, RefitError, WeightFiles
from slipstream.refit.fingerprint import Turn
from slipstream.types import Prompt, Rollout, RolloutGroup
from tests.unit.sampled import rollout

SMALL = read_yaml(
    """
policy:
  scratch:
    shape:
      {hidden_size: 16, num_layers: 3, num_attention_heads: 2, num_query_groups: 1, head_dim: 8, ffn_hidden_size: 16}
    num_steps: 3
    tokens_per_step: 8
    optimizer: {method: adamw, warmup_steps: 2}
learner: {dtype: float32}
engine: {dtype: float32}
data:
  num_validation_problems: 4
  synthetic:
    {num_train_problems: 12, num_conflicting: 1, num_draft_rows: 12, num_validation_problems: 4, num_leaked: 1,
     subtraction_rate: 0.0}
draft:
  pretrain:
    {num_prompts: 4, num_heldout_prompts: 2, num_steps: 4, tokens_per_step: 16, ttt_steps: 2,
     optimizer: {warmup_steps: 1}, checkpoint_every_steps: 2}
  eagle3: {tokens_per_row: 8}
grpo: {num_steps: 4, prompts_per_step: 2, group_size: 2, checkpoint_every_steps: 2, optimizer: {method: adamw}}
tuning: {candidate_ks: [0, 1, 3], batch_sizes: [2, 8], num_repeats: 2, max_live_engines: 2}
losslessness: {num_tokens: 400, num_repeats: 8, num_greedy_prompts: 2, num_replications: 5}
evaluation: {num_samples_per_problem: 2}
"""
)
PROMPTS = tuple(Prompt(id=str(i), text=str(i), token_ids=(1, i), answer="7") for i in range(8))


class Tools(typing.NamedTuple):
    """What a probe works with."""

    directory: Path
    patch: pytest.MonkeyPatch


Probe = Callable[[Recipe, Tools], object]


class Check(typing.NamedTuple):
    """Another `value` of a field, what sees it, and what else both recipes must say for it to be allowed.

    `along`: what changes with it, because it would be refused alone.
    """

    value: Any
    probe: Probe
    also: Mapping[str, Any] = {}
    along: Mapping[str, Any] = {}


def checks(section: str, probe: Probe, also: Mapping[str, Any] = {}, **values: Any) -> dict[str, Check]:
    """Checks of several fields of a section that one probe sees: the other value of each, by its name."""
    return {f"{section}.{name}": Check(value, probe, also) for name, value in values.items()}


def recipe_with(changes: Mapping[str, Any]) -> Recipe:
    """The small recipe with dotted `changes`."""
    nested = json.loads(json.dumps(SMALL))
    for name, value in changes.items():
        *sections, leaf = name.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[leaf] = value
    return load_recipe("tiny", overrides=nested)


def outcome(probe: Probe, recipe: Recipe, tools: Tools) -> str:
    """What a probe sees, an error included."""
    try:
        return repr(probe(recipe, tools))
    except (ConfigError, RefitError) as error:
        return f"refused: {error}"


def rollout_groups(prompts: Sequence[Prompt], group_size: int, version: int = 0) -> tuple[RolloutGroup, ...]:
    """Groups whose first rollout answers 7 and whose others answer 2 and are cut off."""

    def answer(prompt: Prompt, token: int) -> Rollout:
        how = {"is_cut": token == 2, "policy_version": version}
        return rollout((token, 2), (-0.5, -0.25), prompt_id=prompt.id, **how)

    answers = (7, *[2] * (group_size - 1))
    return tuple(RolloutGroup(prompt=p, rollouts=tuple(answer(p, token) for token in answers)) for p in prompts)


class NotedEngine:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.workers: tuple[Any, ...] = ()
        self.under_way: tuple[Any, ...] = ()
        self.version, self.num_resets = 0, 0

    def generate(self, prompts: Sequence[Prompt], *, sampling: Any, group_size: int, seed: int) -> GenerationResult:
        self.calls.append(("generate", [prompt.id for prompt in prompts], sampling, group_size, seed))
        groups = rollout_groups(prompts, group_size, self.version)
        return GenerationResult(groups=groups, acceptance=None, generation_s=1.0)

    def lost_workers(self) -> list[Any]:
        return []

    def limit_threads(self, node_id: str, num_threads: int | None) -> None:
        """It has no threads."""

    def unnoted(self) -> AbstractContextManager[None]:
        self.calls.append("unnoted")
        return nullcontext()

    def sleep(self) -> None:
        self.calls.append("sleep")

    def facts(self) -> dict[str, str]:
        return {}

    def take_lost(self, names: Sequence[str]) -> tuple[Any, ...]:
        del names
        return self.under_way

    def locations(self) -> list[Location]:
        return [here()]

    def start_refit(self, weights: WeightFiles) -> Callable[[], list[EngineState]]:
        return self.start_adopt(policy_version=weights.policy_version, draft_version=None)

    def control(self, channel: Channel, *, timeout_s: float) -> Any:
        return "control", channel, timeout_s

    def start_adopt(self, *, policy_version: int, draft_version: int | None) -> Callable[[], list[EngineState]]:
        self.version, self.num_resets = policy_version, self.num_resets + 1
        return self.states

    def states(self) -> list[EngineState]:
        versions = {"policy_version": self.version, "draft_version": None}
        return [EngineState(**versions, policy_digest="d", num_prefix_cache_resets=self.num_resets)]

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        return {"w": "float32"}

    def start_fingerprints(self, *, is_draft: bool, turn: Turn) -> Callable[[], list[dict[str, int]]]:
        self.calls.append("fingerprints" if turn.takes("w") else "none to compare")
        return lambda: [{"w": 7} if turn.takes("w") else {}]
