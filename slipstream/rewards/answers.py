"""Extraction of a response's answer, by text alone and linear in its length."""

from __future__ import annotations

import re
from collections import deque

from slipstream.rewards.config import MAX_ANSWER_CHARS
from slipstream.rewards.spelling import unwrap, without_invisible
from slipstream.rewards.values import is_falsehood

THINK_START, THINK_END = "<think>", "</think>"
_BRACES = re.compile(r"\\[{}]|\\(?:boxed|fbox|framebox)(?![A-Za-z])(?:\s*(\{)|)|[{}]")
# What `\boxed` without braces holds: it begins like a number, a symbol or a command, and no brace is left open or over.
_UNBRACED = re.compile(r"[ \t]*((?=[-+]?(?:[\w.(]|\\[A-Za-z]))(?:[^\s{}$]|\{(?:[^{}]|\{[^{}]*\})*\})++)(?![{}])")
_ANSWER_LINE = re.compile(r"answer[*_ \t]{0,8}(?:is[*_ \t]{0,8})?[:\N{FULLWIDTH COLON}][ \t]*([^\n]*)", re.IGNORECASE)
_CLOSED_EMPHASIS = re.compile(r"(?:\*\*|__|\*|_)(?=\s|$)")
_NEXT_LINE = re.compile(r"\s*([^\n]*)")


def extract_answer(response: str, *, is_cut_off: bool = False) -> str | None:
    """The content of the last complete `\\boxed{}`, else what follows the last `Answer:`; None if there is neither.

    Only text after the last `</think>` counts, and an unfinished thought holds no answer. An equation, or a chain of
    them, that does not hold is no answer either: `2+2=5`. Linear in the length.

    Args:
        response: with `<think>` before it where the prompt ends inside a thought.
        is_cut_off: the response ran into its limit, so that an answer without an end of its own may be a part of one.
    """
    _, closed, final = response.rpartition(THINK_END)
    if not closed and THINK_START in response:
        return None
    final = without_invisible(final)
    answer = _last_boxed(final, is_cut_off=is_cut_off)
    if answer is None:
        answer = _last_line(final, is_cut_off=is_cut_off)
    if answer is None or (len(answer) <= MAX_ANSWER_CHARS and is_falsehood(answer)):
        return None
    return answer.strip() or None


def opens_thought(prompt: str, *, is_turn: bool) -> bool:
    """Return True if a response begins inside a thought, which the chat template has opened before it.

    Args:
        is_turn: `prompt` is no more than the beginning of the policy's own turn. Else what a user wrote of `<think>`
            may be in it, and only a tag at its very end counts.
    """
    _, _, rest = prompt.rpartition(THINK_END)
    return THINK_START in rest if is_turn else rest.rstrip().endswith(THINK_START)


def _last_line(text: str, *, is_cut_off: bool) -> str | None:
    for match in reversed(deque(_ANSWER_LINE.finditer(text), maxlen=2)):
        line, end = _CLOSED_EMPHASIS.sub("", match[1].strip(), count=1) if match[1] else "", match.end()
        if not line.strip():
            following = _NEXT_LINE.match(text, match.end())
            assert following is not None
            line, end = following[1], following.end()
        if not (is_cut_off and end == len(text)):
            return _unwrapped(line)
    return None


def _last_boxed(text: str, *, is_cut_off: bool) -> str | None:
    """Content of the box that closes last; where boxes nest, that is the outer one."""
    opened: list[int | None] = []  # where the content of each open box starts; None for other braces
    found: deque[tuple[int, int | None]] = deque(maxlen=2)  # start and end of contents; no end: a box without braces
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}":
            start = opened.pop() if opened else None
            if start is not None:
                found.append((start, match.start()))
        elif token == "{":
            opened.append(None)
        elif match[1]:
            opened.append(match.end())
        elif not token.endswith(("{", "}")):
            found.append((match.end(), None))
    for start, end in reversed(found):
        if end is not None:
            return text[start:end]
        unbraced = _UNBRACED.match(text, start)
        if unbraced is not None and not (is_cut_off and unbraced.end() == len(text)):
            return _unwrapped(unbraced[1])
    return None


def _unwrapped(answer: str) -> str:
    """An answer without the signs around it; one that nobody reads for its length stays as it is."""
    answer = answer.strip()
    return unwrap(answer) if len(answer) <= MAX_ANSWER_CHARS else answer
