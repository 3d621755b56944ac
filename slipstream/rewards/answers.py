"""What counts as a response's answer, and how equal answers are spelled equally. Pure text, linear in its length."""

from __future__ import annotations

import re
import unicodedata
from collections import deque

_THINK_START, _THINK_END = "<think>", "</think>"
_BRACES = re.compile(r"\\[{}]|\\boxed\s*\{|[{}]")
_ANSWER_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]*)", re.IGNORECASE)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+")
_INTEGER = re.compile(r"[+-]?\d+")
_LATEX_SPACE = re.compile(r"\\[,!;: ]|~")


def extract_answer(response: str) -> str | None:
    """The content of the last complete `\\boxed{}`, else what follows the last `Answer:`; None if there is neither.

    Only text after the last `</think>` counts, and an unfinished thought holds no answer. Linear in the length.
    """
    _, closed, final = response.rpartition(_THINK_END)
    if not closed and _THINK_START in response:
        return None
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


def is_integer(plain: str) -> bool:
    """Whether `plain`, as `normalise_answer` gives it, is an integer: then text alone decides equality."""
    return _INTEGER.fullmatch(plain) is not None


def is_balanced(text: str) -> bool:
    """Whether each brace has its partner, so that `\\boxed{text}` is one box."""
    depth = 0
    for match in _BRACES.finditer(text):
        if not match[0].startswith("\\") or match[0].startswith("\\boxed"):
            depth += -1 if match[0] == "}" else 1
        if depth < 0:
            return False
    return depth == 0


def looks_mathematical(text: str) -> bool:
    """Whether `text` is more than words: math-verify reads any word as a product of its letters."""
    without_commands = re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[a-zA-Z]+", "", text)
    return bool(re.search(r"[0-9a-zA-Z]", without_commands)) and not re.search(r"[a-zA-Z]{3,}", without_commands)


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
