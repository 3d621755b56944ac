"""Probes of what judges a run: its evaluation and its certificate."""

import typing
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.engine.protocol import Trace
from slipstream.evaluation import evaluate
from slipstream.losslessness.sampling import Subject, draw
from slipstream.losslessness.verdict import certify
from slipstream.recipe import Recipe
from slipstream.rewards.reward import RewardResult
from slipstream.types import Prompt
from tests.unit.recipe_fields.base import PROMPTS, Check, NotedEngine, Tools, checks
from tests.unit.recipe_fields.training import evaluations


def evaluation_calls(recipe: Recipe, _: Tools) -> object:
    engine = NotedEngine()

    def judge(prompts: Any, texts: Sequence[str], cut_off: Any) -> RewardResult:
        return RewardResult(rewards=(0.0,) * len(texts), num_timeouts=0, num_crashes=0)

    how: Any = {"reward": SimpleNamespace(judge=judge), "decode": lambda _, ids: str(ids), "policy": "start"}
    evaluate(typing.cast(Any, engine), PROMPTS, config=recipe.evaluation, seed=0, **how)
    return engine.calls


CHANCES = np.array([0.3, 0.25, 0.25, 0.2])


class DrawingEngine:
    """Draws four tokens at a time by their chances; greedily it answers `greedy`."""

    def __init__(self, greedy: int) -> None:
        self.greedy = greedy
        self.calls: list[Any] = []

    def trace(self, prompts: Sequence[Prompt], *, sampling: Any, group_size: int, seed: int) -> list[Trace]:
        self.calls.append((len(prompts), sampling.temperature, group_size, seed))
        random, num = np.random.default_rng(seed), min(4, sampling.max_response_tokens)

        def one(prompt: Prompt) -> Trace:
            drawn = random.choice(4, num, p=CHANCES) if sampling.temperature else [self.greedy] * num
            tokens: Any = {"prompt_token_ids": prompt.token_ids, "token_ids": tuple(int(token) for token in drawn)}
            return Trace(**tokens, window_lengths=(1,) * num, policy_versions=(0,) * num)

        return [one(prompt) for prompt in prompts for _ in range(group_size)]


class ExactPolicy:
    """The same chances, and a biased policy that always draws the likeliest token."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def conditionals(self, sequences: Any, prompt_lengths: Any, sampling: Any, *, seed: int) -> Any:
        self.seeds.append(seed)
        pairs = zip(sequences, prompt_lengths, strict=True)
        drawn = np.array([token for tokens, start in pairs for token in tokens[start:]])
        logs = np.log(CHANCES)
        mean = float((CHANCES * logs).sum())
        variance = float((CHANCES * (logs - mean) ** 2).sum())
        known = [np.cumsum(CHANCES)[drawn] - CHANCES[drawn], CHANCES[drawn], mean, variance, CHANCES.max()]
        bias = [0.0, CHANCES[0], 0.7]
        return np.stack([np.broadcast_to(column, drawn.shape) for column in (*known, *bias, *bias)], axis=1)

    def next_token_probabilities(self, prefixes: Sequence[Any], sampling: Any) -> Any:
        return np.tile(CHANCES, (len(prefixes), 1))


def certificate(recipe: Recipe, _: Tools) -> object:
    """What is drawn, and what is said of it: nothing that a certificate merely repeats of its settings."""
    config, policy, drawing = recipe.losslessness, ExactPolicy(), (DrawingEngine(0), DrawingEngine(1))
    how: Any = {"config": config, "sampling": recipe.sampling}
    samples = [draw(engine, PROMPTS, **how, batch=4, seed=config.seed + i) for i, engine in enumerate(drawing)]
    subject = Subject(num_speculative_tokens=1, policy_fingerprint="p", draft_fingerprint="d", versions={})
    record = certify(samples[0], samples[1], policy, **how, subject=subject, started_s=0.0)
    rejected = [finding.name for finding in record.findings if finding.reject]
    near = record.greedy.num_near_ties
    return [engine.calls for engine in drawing], policy.seeds, record.verdict, rejected, record.detectable, near


CHECKS = {
    "evaluation.num_samples_per_problem": Check(3, evaluation_calls),
    **checks("evaluation.sampling", evaluation_calls, temperature=0.5, top_p=0.5, top_k=5, max_response_tokens=100),
    "evaluation.every_steps": Check(2, evaluations),
    **checks("losslessness", certificate, num_tokens=500, num_repeated_prompts=2, num_repeats=9, num_greedy_prompts=3),
    **checks("losslessness", certificate, family_level=0.2, power=0.2, num_replications=30, max_detectable_bias=0.9),
    **checks("losslessness", certificate, near_tie_nats=0.1, seed=1),
}
