"""Score responses against reference answers: 1 if the final answer is right, else 0.

Nearly all answers are decided by text alone, in microseconds. What is left (`\\frac{1}{2}` against `0.5`) goes to
math-verify in a worker process that is killed at its deadline, for sympy can run, or eat memory, without end.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from slipstream.config import require
from slipstream.reward_pool import Request, WorkerPool

_THINK_START, _THINK_END = "<think>", "</think>"
_BRACES = re.compile(r"\\[{}]|\\boxed\s*\{|[{}]")
_ANSWER_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]*)", re.IGNORECASE)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+")
_INTEGER = re.compile(r"[+-]?\d+")
_LATEX_SPACE = re.compile(r"\\[,!;: ]|~")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How long and in how many processes answers are verified."""

    timeout_s: float = 5.0  # for one answer; then its worker is killed and the answer scores 0
    num_workers: int = 1
    max_answer_chars: int = 512  # longer answers score 0 unread
    worker_memory_gib: float = 2.0

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "reward.timeout_s", "must be > 0", self.timeout_s)
        require(self.num_workers > 0, "reward.num_workers", "must be > 0", self.num_workers)
        # A request must fit into a pipe's buffer, or writing it could block on a worker that hangs.
        require(
            0 < self.max_answer_chars <= 4096,
            "reward.max_answer_chars",
            "must lie in [1, 4096]",
            self.max_answer_chars,
        )
        require(self.worker_memory_gib >= 0.5, "reward.worker_memory_gib", "must be >= 0.5", self.worker_memory_gib)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """Rewards in the order of the responses; a time-out or a crash scored 0."""

    rewards: tuple[float, ...]
    num_timeouts: int
    num_crashes: int


def extract_answer(response: str) -> str | None:
    """The content of the last complete `\\boxed{}`, else what follows the last `Answer:`; None if there is neither.

    Only text after the last `</think>` counts, and an unfinished thought holds no answer. Linear in the length.
    """
    thought, closed, final = response.rpartition(_THINK_END)
    if not closed and _THINK_START in response:
        return None
    final = final if closed else thought + final
    boxed = _last_boxed(final)
    if boxed is not None:
        return boxed.strip() or None
    line = deque(_ANSWER_LINE.finditer(final), maxlen=1)
    return (line[0][1].strip().rstrip("$.").lstrip("$").strip() or None) if line else None


def normalise_answer(answer: str) -> str:
    """Spell equal answers equally where that is safe: Unicode digits, white space, `$`, thousands, leading zeros."""
    text = unicodedata.normalize("NFKC", _LATEX_SPACE.sub("", answer)).replace("\N{MINUS SIGN}", "-")
    text = "".join(text.split()).rstrip("$.").lstrip("$")
    text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-").lstrip("0") or "0"
        return "-" + digits if text[0] == "-" and digits != "0" else digits
    return text


def _last_boxed(text: str) -> str | None:
    """Content of the box that closes last; where boxes nest, that is the outer one."""
    opened: list[int | None] = []  # where the content of each open box starts; None for other braces
    content = None
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}":
            start = opened.pop() if opened else None
            if start is not None:
                content = text[start : match.start()]
        elif token == "{":
            opened.append(None)
        elif token.startswith("\\boxed"):
            opened.append(match.end())
    return content


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

    def parseable(self, answers: Sequence[str]) -> tuple[bool, ...]:
        """Whether each reference answer can be scored against; prose, "" and what takes too long cannot."""
        return tuple(reward == 1.0 for reward in self._decide([self._judge_gold(gold) for gold in answers]).rewards)

    def _judge_response(self, answer: str | None, gold: str) -> bool | Request:
        if answer is None or len(answer) > self._max_chars or len(gold) > self._max_chars:
            return False
        plain_answer, plain_gold = normalise_answer(answer), normalise_answer(gold)
        if plain_answer == plain_gold:
            return True
        if _INTEGER.fullmatch(plain_answer) and _INTEGER.fullmatch(plain_gold):
            return False
        return Request(gold=gold, answer=answer) if _is_balanced(answer) and _is_balanced(gold) else False

    def _judge_gold(self, gold: str) -> bool | Request:
        if len(gold) > self._max_chars or not _is_balanced(gold):
            return False
        plain = normalise_answer(gold)
        if _INTEGER.fullmatch(plain):
            return True
        return Request(gold=gold, answer=None) if _looks_mathematical(plain) else False

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


def _is_balanced(text: str) -> bool:
    """Whether each brace has its partner, so that `\\boxed{text}` is one box."""
    depth = 0
    for match in _BRACES.finditer(text):
        if not match[0].startswith("\\") or match[0].startswith("\\boxed"):
            depth += -1 if match[0] == "}" else 1
        if depth < 0:
            return False
    return depth == 0


def _looks_mathematical(text: str) -> bool:
    """Whether `text` is more than words: math-verify reads any word as a product of its letters."""
    without_commands = re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[a-zA-Z]+", "", text)
    return bool(re.search(r"[0-9a-zA-Z]", without_commands)) and not re.search(r"[a-zA-Z]{3,}", without_commands)
