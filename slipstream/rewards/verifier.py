"""Scores of responses against reference answers: 1 if the final answer is right, else 0.

Words, plain arithmetic, and lists and intervals of them are decided by exact values in microseconds (`values`). Answers
that require algebra (`\\log 8` against `3\\log 2`) go to sympy, which may not terminate or may exhaust memory: it runs
in a worker process that is killed at its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.rewards.answers import extract_answer
from slipstream.rewards.config import MATHEMATICS, MAX_ANSWER_CHARS, RewardConfig
from slipstream.rewards.pool import Request, WorkerPool
from slipstream.rewards.reward import RewardResult
from slipstream.rewards.spelling import TEXT, spell
from slipstream.rewards.values import Unread, compare, is_prose, parse
from slipstream.types import Prompt


class Verifier:
    """Scorer of responses. Workers start with the first answer that needs one; `close` ends them. Not thread-safe."""

    def __init__(self, config: RewardConfig) -> None:
        """Keep `config`; nothing starts yet."""
        self._pool = WorkerPool(MATHEMATICS, config)

    def close(self) -> None:
        """Kill the workers; a later call starts new ones."""
        self._pool.close()

    def judge(self, prompts: Sequence[Prompt], responses: Sequence[str], *, cut_off: Sequence[bool]) -> RewardResult:
        """Score `responses[i]` to `prompts[i]` by the prompt's answer."""
        return self.score(responses, [prompt.answer for prompt in prompts], cut_off=cut_off)

    def score(
        self, responses: Sequence[str], references: Sequence[str], *, cut_off: Sequence[bool] = ()
    ) -> RewardResult:
        """Score `responses[i]` against the answer `references[i]`; an empty `cut_off` says that none was cut off."""
        asked = zip(responses, references, cut_off or [False] * len(responses), strict=True)
        return self._decide([self._judge(extract_answer(text, is_cut_off=cut), gold) for text, gold, cut in asked])

    def equal(self, pairs: Sequence[tuple[str, str]], data_source: str = "") -> tuple[bool, ...]:
        """Compare the bare answers of each pair like a response's answer with its reference."""
        return self._verdicts([self._judge(answer, reference) for reference, answer in pairs])

    def gradable(self, references: Sequence[str], data_source: str = "") -> tuple[bool, ...]:
        """Check that each reference scores 1 for itself and 0 for another value.

        Prose, "", an equation that does not hold, and comparisons that time out cannot be scored.
        """
        are_read = self._verdicts([self._reads(reference) for reference in references])
        others = self._verdicts(
            [self._judge(f"{each}+1" if ok else None, each) for each, ok in zip(references, are_read, strict=True)]
        )
        return tuple(is_read and not is_same for is_read, is_same in zip(are_read, others, strict=True))

    def _judge(self, answer: str | None, reference: str) -> bool | Request:
        if answer is None or len(answer) > MAX_ANSWER_CHARS or len(reference) > MAX_ANSWER_CHARS:
            return False
        verdict = compare(reference, answer)
        return _request(reference, answer) if verdict is None else verdict

    def _reads(self, reference: str) -> bool | Request:
        """Judge whether the reference, in a box, equals itself and is more than prose."""
        if len(reference) > MAX_ANSWER_CHARS or extract_answer(f"\\boxed{{{reference}}}") != reference.strip():
            return False
        value = parse(reference)
        if value is Unread.UNDECIDED:
            return _request(reference, reference)
        if isinstance(value, Unread):  # what has words is graded by its text
            return value is Unread.AMBIGUOUS and TEXT in spell(reference)
        return not is_prose(value)

    def _verdicts(self, judged: Sequence[bool | Request]) -> tuple[bool, ...]:
        return tuple(reward == 1.0 for reward in self._decide(judged).rewards)

    def _decide(self, judged: Sequence[bool | Request]) -> RewardResult:
        """Let the pool decide the requests, and return all verdicts in order."""
        outcome = self._pool.run([verdict for verdict in judged if isinstance(verdict, Request)])
        decided = iter(outcome.values)
        verdicts = [next(decided) is True if isinstance(verdict, Request) else verdict for verdict in judged]
        return RewardResult(
            rewards=tuple(map(float, verdicts)), num_timeouts=outcome.num_timeouts, num_crashes=outcome.num_crashes
        )


def _request(gold: str, answer: str) -> Request:
    return Request(name=f"{answer!r} against {gold!r}", arguments={"gold": gold, "answer": answer})
