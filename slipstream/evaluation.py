"""Accuracy of a policy on a fixed set of problems: avg@k, maj@k and their uncertainty.

Legend: `N` problems, `k` samples a problem.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np

from slipstream.config import Checked, Defaults, PositiveInt, require
from slipstream.data.config import REASONING_GYM
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines
from slipstream.records.steps import EvaluationRecord
from slipstream.rewards.answers import extract_answer, tagged_answer
from slipstream.rewards.reward import Reward
from slipstream.rewards.values import compare
from slipstream.statistics import reward_ci95
from slipstream.types import FinishReason, Prompt


class EvaluationConfig(Checked, path="evaluation"):
    """Evaluation on the validation problems, apart from training, with the sampling that Qwen3 is published with."""

    num_samples_per_problem: PositiveInt = 32
    """Responses to each validation problem, whose mean accuracy is reported."""
    sampling: Annotated[SamplingConfig, Defaults(temperature=0.6, top_p=0.95, top_k=20)]
    """Sampling of these responses."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations of a synchronous arm while it trains; null evaluates before and after it alone."""

    def _check(self) -> None:
        can_differ = self.sampling.temperature > 0 or self.num_samples_per_problem == 1
        fix = "greedy samples are all equal: set num_samples_per_problem to 1"
        self._require(can_differ, "sampling.temperature", "must be > 0 with more than one sample a problem", fix)

    def is_due(self, num_updates: int) -> bool:
        """Return True if a policy that goes on training is evaluated after so many updates."""
        return self.every_steps is not None and num_updates > 0 and num_updates % self.every_steps == 0


def maj_at_k(answers_Nk: Sequence[Sequence[str | None]], rewards_Nk: Sequence[Sequence[float]]) -> float:
    """Share of problems whose most frequent answer is right.

    Of m answers that tie each counts 1/m, as if one were sampled. A sample without an answer (None) does not vote.
    """
    return float(np.mean([_majority(a, r) for a, r in zip(answers_Nk, rewards_Nk, strict=True)]))


def prompt_hash(prompts: Sequence[Prompt]) -> str:
    """Hash of the prompts' tokens, in order, and of their reference answers."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.token_ids, prompt.answer)).encode())
    return digest.hexdigest()[:16]


def evaluate(
    engine: Engines,
    prompts: Sequence[Prompt],
    *,
    reward: Reward,
    decode: Callable[[Sequence[int], Sequence[int]], str],
    config: EvaluationConfig,
    policy: str,
    seed: int,
) -> EvaluationRecord:
    """Sample k responses to each problem with the engine's present weights, and score them.

    Args:
        decode: decoder of responses, as in `stages.support.decode`.
        policy: name of the weights in the record.
    """
    require(len(prompts) > 0, "data.validation", "must have problems to evaluate on", len(prompts))
    k = config.num_samples_per_problem
    groups = engine.generate(prompts, sampling=config.sampling, group_size=k, seed=seed).groups
    assert [len(group.rollouts) for group in groups] == [k] * len(prompts)
    samples = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    texts = [decode(prompt.token_ids, rollout.token_ids) for prompt, rollout in samples]
    truncated = [rollout.finish_reason is FinishReason.LENGTH for _, rollout in samples]
    scored = reward.judge([prompt for prompt, _ in samples], texts, cut_off=truncated)
    answers = [
        (tagged_answer if prompt.data_source.startswith(REASONING_GYM) else extract_answer)(text, is_cut_off=cut)
        for (prompt, _), text, cut in zip(samples, texts, truncated, strict=True)
    ]
    problems = [slice(start, start + k) for start in range(0, len(samples), k)]
    rewards_Nk = [scored.rewards[own] for own in problems]
    rates = [float(np.mean(rewards)) for rewards in rewards_Nk]
    return EvaluationRecord(
        policy=policy,
        num_problems=len(prompts),
        k=k,
        avg_at_k=float(np.mean(rates)),
        maj_at_k=maj_at_k([answers[own] for own in problems], rewards_Nk),
        ci95=reward_ci95(rates),
        truncated_fraction=float(np.mean(truncated)),
        num_timeouts=scored.num_timeouts,
        prompt_hash=prompt_hash(prompts),
        correct_by_problem=tuple(map(sum, rewards_Nk)),
    )


def _majority(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Chance that a sample of the most frequent answers is right."""
    votes: dict[str, list[float]] = {}  # by the first spelling of an answer
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            alike = (other for other, vote in votes.items() if compare(other, answer) or reward == vote[0] == 1)
            first = next(alike, answer)  # what is right is alike, in whatever spelling
            votes.setdefault(first, []).append(reward)
    if not votes:
        return 0.0
    most = max(len(vote) for vote in votes.values())
    return float(np.mean([np.mean(vote) for vote in votes.values() if len(vote) == most]))
