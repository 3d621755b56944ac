"""Extraction of a response's answer from its text, in linear time."""

from __future__ import annotations

import re
from collections import deque

from slipstream.rewards.config import MAX_ANSWER_CHARS
from slipstream.rewards.spelling import unwrap, without_invisible
from slipstream.rewards.values import is_falsehood

THINK_START, THINK_END = "<think>", "</think>"
_BRACES = re.compile(r"\\[{}]|\\(?:boxed|fbox|framebox)(?![A-Za-z])(?:\s*(\{)|)|[{}]")
# Content of `\boxed` without braces: it begins like a number, a symbol or a command, and its braces are balanced.
_UNBRACED = re.compile(r"[ \t]*((?=[-+]?(?:[\w.(]|\\[A-Za-z]))(?:[^\s{}$]|\{(?:[^{}]|\{[^{}]*\})*\})++)(?![{}])")
_ANSWER_LINE = re.compile(r"answer[*_ \t]{0,8}(?:is[*_ \t]{0,8})?[:\N{FULLWIDTH COLON}][ \t]*([^\n]*)", re.IGNORECASE)
_CLOSED_EMPHASIS = re.compile(r"(?:\*\*|__|\*|_)(?=\s|$)")
_NEXT_LINE = re.compile(r"\s*([^\n]*)")


def extract_answer(response: str, *, is_cut_off: bool = False) -> str | None:
    """Extract the content of the last complete `\\boxed{}`, else the text after the last `Answer:`, else None.

    Only text after the last `</think>` counts, and an unfinished thought holds no answer. A chain of equations that
    does not hold, such as `2+2=5`, is no answer. Time is linear in the length.

    Args:
        response: the response, preceded by `<think>` where the prompt ends inside a thought.
        is_cut_off: the response reached its length limit, so an answer without a delimiter may be incomplete.
    """
    final = _after_thoughts(response)
    if final is None:
        return None
    final = without_invisible(final)
    answer = _last_boxed(final, is_cut_off=is_cut_off)
    if answer is None:
        answer = _last_line(final, is_cut_off=is_cut_off)
    if answer is None or (len(answer) <= MAX_ANSWER_CHARS and is_falsehood(answer)):
        return None
    return answer.strip() or None


def tagged_answer(response: str, *, is_cut_off: bool = False) -> str | None:
    """Extract what stands in the last `<answer>` … `</answer>` after all thoughts, else what `extract_answer` does."""
    _, opened, inside = (_after_thoughts(response) or "").rpartition("<answer>")
    answer, ended, _ = inside.partition("</answer>")
    if opened and ended and answer.strip():
        return answer.strip()
    return extract_answer(response, is_cut_off=is_cut_off)


def _after_thoughts(response: str) -> str | None:
    """Return the text between the last finished thought and an unfinished one; None where the first is unfinished."""
    _, closed, final = response.rpartition(THINK_END)
    final, opened, _ = final.partition(THINK_START)
    return None if opened and not closed else final


def opens_thought(prompt: str, *, is_turn: bool) -> bool:
    """Return True if a response begins inside a thought that the chat template opened.

    Args:
        is_turn: `prompt` holds only the start of the policy's own turn. Otherwise a user may have written `<think>`,
            and only a tag at the very end counts.
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
    """Return the content of the box that closes last; of nested boxes that is the outer one."""
    opened: list[int | None] = []  # where the content of each open box starts; None for other braces
    found: deque[tuple[int, int | None]] = deque(maxlen=2)  # start and end of contents; None for a box without braces
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
    """Strip the signs around an answer; one that is too long to be compared stays as it is."""
    answer = answer.strip()
    return unwrap(answer) if len(answer) <= MAX_ANSWER_CHARS else answer
