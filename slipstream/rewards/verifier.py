"""Score responses against reference answers: 1 if the final answer is right, else 0.

Nearly all answers are decided by text alone, in microseconds. What is left (`\\frac{1}{2}` against `0.5`) goes to
math-verify in a worker process that is killed at its deadline, for sympy can run, or eat memory, without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from slipstream.rewards.answers import extract_answer, is_balanced, is_integer, looks_mathematical, normalise_answer
from slipstream.rewards.config import RewardConfig
from slipstream.rewards.pool import Request, WorkerPool


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """Rewards in the order of the responses; a time-out or a crash scored 0."""

    rewards: tuple[float, ...]
    num_timeouts: int
    num_crashes: int


class Verifier:
    """Scores responses. Workers start at the first answer that needs one; `close` ends them. Not thread-safe."""

    def __init__(self, config: RewardConfig) -> None:
        """Keep `config`; nothing starts yet."""
        self._max_chars = config.max_answer_chars
        self._pool = WorkerPool(
            num_workers=config.num_workers, timeout_s=config.timeout_s, memory_gib=config.worker_memory_gib
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; a later call starts new ones."""
        self._pool.close()

    def score(self, responses: Sequence[str], answers: Sequence[str]) -> RewardResult:
        """Score `responses[i]` against the reference `answers[i]`."""
        return self._decide(
            [
                self._judge_response(extract_answer(response), gold)
                for response, gold in zip(responses, answers, strict=True)
            ]
        )

    def gradable(self, references: Sequence[str]) -> tuple[bool, ...]:
        """Whether each reference answer can be scored against; prose, "" and what takes too long cannot."""
        return tuple(reward == 1.0 for reward in self._decide([self._judge_gold(gold) for gold in references]).rewards)

    def equal(self, pairs: Sequence[tuple[str, str]]) -> tuple[bool, ...]:
        """Whether the two bare answers of each pair are equal, by the comparison that scores responses."""
        judged = [self._judge_response(answer, gold) for answer, gold in pairs]
        return tuple(reward == 1.0 for reward in self._decide(judged).rewards)

    def _judge_response(self, answer: str | None, gold: str) -> bool | Request:
        if answer is None or len(answer) > self._max_chars or len(gold) > self._max_chars:
            return False
        plain_answer, plain_gold = normalise_answer(answer), normalise_answer(gold)
        if plain_answer == plain_gold:
            return True
        if is_integer(plain_answer) and is_integer(plain_gold):
            return False
        return Request(gold=gold, answer=answer) if is_balanced(answer) and is_balanced(gold) else False

    def _judge_gold(self, gold: str) -> bool | Request:
        if len(gold) > self._max_chars or not is_balanced(gold):
            return False
        plain = normalise_answer(gold)
        if is_integer(plain):
            return True
        return Request(gold=gold, answer=None) if looks_mathematical(plain) else False

    def _decide(self, judged: Sequence[bool | Request]) -> RewardResult:
        """Let the pool decide what text could not, and put everything in order."""
        outcome = self._pool.run([verdict for verdict in judged if isinstance(verdict, Request)])
        decided = iter(outcome.verdicts)
        verdicts = [next(decided) if isinstance(verdict, Request) else verdict for verdict in judged]
        return RewardResult(
            rewards=tuple(map(float, verdicts)),
            num_timeouts=outcome.num_timeouts,
            num_crashes=outcome.num_crashes,
        )
