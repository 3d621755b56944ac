"""Normal form of the many spellings of an answer in Unicode, LaTeX, markdown and plain text.

Meaning stays: exponents, blanks between numbers, commas, units, and the difference between a range and a minus.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import accumulate

SET_START, SET_END = "\N{LEFT WHITE CURLY BRACKET}", "\N{RIGHT WHITE CURLY BRACKET}"
PLUS_MINUS, MINUS_PLUS = "\N{PLUS-MINUS SIGN}", "\N{MINUS-OR-PLUS SIGN}"
DEGREE, RANGE = "\N{DEGREE SIGN}", "\N{EN DASH}"
AT_MOST, AT_LEAST = "\N{LESS-THAN OR EQUAL TO}", "\N{GREATER-THAN OR EQUAL TO}"
TEXT = "\\text{"
FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "exp",
    "sqrt",
})  # fmt: skip

# What the normal form has, and the LaTeX commands and the characters that mean the same.
_SPELLINGS = (
    ("\\frac", "dfrac tfrac cfrac sfrac nicefrac", ""),
    ("", "left right big Big bigl bigr Bigl Bigr bigg Bigg biggl biggr small large Large LARGE huge Huge", ""),
    ("", "displaystyle textstyle displaylimits limits mathstrut ensuremath boxed fbox framebox underline bf rm", ""),
    ("\\text", "mbox textrm textbf textit textsf texttt textnormal emph operatorname text unit", ""),
    ("\\text", "mathrm mathbf mathit mathsf mathtt mathbb mathcal mathnormal boldsymbol bm pmb", ""),
    (" ", "quad qquad space", ""),
    ("\\,", "", "\N{NO-BREAK SPACE}\N{THIN SPACE}\N{HAIR SPACE}\N{NARROW NO-BREAK SPACE}\N{FIGURE SPACE}"),
    ("-", "", "\N{MINUS SIGN}\N{HYPHEN}\N{NON-BREAKING HYPHEN}"),
    ("/", "div", "\N{FRACTION SLASH}\N{DIVISION SLASH}\N{DIVISION SIGN}"),
    ("*", "cdot times ast", "\N{MULTIPLICATION SIGN}\N{DOT OPERATOR}\N{MIDDLE DOT}\N{ASTERISK OPERATOR}"),
    ("=", "approx simeq thickapprox", "\N{ALMOST EQUAL TO}"),
    ("<", "lt", ""),
    (">", "gt", ""),
    (AT_MOST, "le leq leqslant", AT_MOST + "\N{LESS-THAN OR SLANTED EQUAL TO}"),
    (AT_LEAST, "ge geq geqslant", AT_LEAST + "\N{GREATER-THAN OR SLANTED EQUAL TO}"),
    ("\\neq ", "ne", "\N{NOT EQUAL TO}"),
    (PLUS_MINUS, "pm", PLUS_MINUS),
    (MINUS_PLUS, "mp", MINUS_PLUS),
    (DEGREE, "degree textdegree", DEGREE + "\N{MASCULINE ORDINAL INDICATOR}\N{RING ABOVE}"),
    (SET_START, "lbrace", SET_START),
    (SET_END, "rbrace", SET_END),
    ("(", "langle lparen", ""),
    (")", "rangle rparen", ""),
    ("[", "lbrack", ""),
    ("]", "rbrack", ""),
    ("|", "lvert rvert vert", ""),
    (":", "colon", "\N{RATIO}"),
    (", ", "", "\N{FULLWIDTH COMMA}\N{IDEOGRAPHIC COMMA}"),
    (",", "", "\N{ARABIC THOUSANDS SEPARATOR}"),
    (".", "", "\N{IDEOGRAPHIC FULL STOP}\N{ARABIC DECIMAL SEPARATOR}"),
    ('"', "", "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"),
    ("i", "imath", ""),
    ("\\$", "dollar textdollar", ""),
    ("\\sqrt ", "", "\N{SQUARE ROOT}"),
    ("\\sqrt[3] ", "", "\N{CUBE ROOT}"),
    ("\\sqrt[4] ", "", "\N{FOURTH ROOT}"),
    ("\\infty ", "", "\N{INFINITY}"),
    ("\\emptyset ", "varnothing", "\N{EMPTY SET}"),
    ("\\mathbb{R}", "", "\N{DOUBLE-STRUCK CAPITAL R}"),
    ("\\cup ", "", "\N{UNION}"),
    ("\\cap ", "", "\N{INTERSECTION}"),
    ("\\in ", "", "\N{ELEMENT OF}"),
)
_COMMANDS = {name: sign for sign, names, _ in _SPELLINGS for name in names.split()}
_CHARACTERS = {char: sign for sign, _, chars in _SPELLINGS for char in chars}

_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]+")
_SLASHED = re.compile("([\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+)[/\N{FRACTION SLASH}]([\u2080-\u2089]+)")
_LOWERED = re.compile("[\u2080-\u208e]+")
_DASHES = "\N{EN DASH}\N{EM DASH}\N{FIGURE DASH}"
_RANGE = re.compile(f"(?<=[0-9])[{_DASHES}](?=[0-9])")

_REALS = re.compile(r"\\mathbb\s*(?:\{\s*R\s*\}|R(?![A-Za-z]))")
_RAISED_O = re.compile(r"(?<=\d)\s*\^\s*(?:\{\s*(?:\\(?:text|mathrm)\s*\{\s*o\s*\}|o)\s*\}|o(?![A-Za-z]))")
_COLOR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\([A-Za-z]+)\s*")
_ESCAPED = {"\\{": SET_START, "\\}": SET_END, "\\%": "%", "\\|": "|", "\\_": "_", "\\\\": "\\\\"}
_ESCAPE = re.compile(r"\\[\\{}%|_()\[\]]")
_MATH_MODE = re.compile(r"(?<!\\)\$")
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|" + DEGREE + r"|\{\s*" + DEGREE + r"\s*\})")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\,|\{,\}|,\\!\s*)\d{3})+(?!\d)")
_NOT_DIGIT = re.compile(r"\D+")
_SPACE = re.compile(r"(?:(?<!\\)\\[,;:> ]|~|\\hspace\{[^{}]*\}|\s)+")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTERS = re.compile(r"[A-Za-z]+")
_UNIT_LETTERS = frozenset("mgshlLJNWVAKCF")
_CONNECTIVE = re.compile(r"\s*,?\s*(?:and|or)\s*|\s*[,;]\s*")
_PLAIN_CONNECTIVE = re.compile(r"\s*,?\s+(?:and|or)\s+")
_CLOSING = re.compile(r"(?<![\\.])\.+$")
_BRACES = re.compile(r"\\[{}]|[{}]")
_EMPHASIS = ("**", "__", "*", "_", "`", '"', "'")
_INVISIBLE = re.compile("[\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_BLANK_NUMBERS = re.compile(r"(?<![_\d])\d+\s+\d")
_DANGLING = re.compile(r"^[*/^_]|[-+*/^_]$")
_IN_DEGREES = re.compile(r"(\d+(?:\.\d+)?)" + DEGREE)
_TO_LATEX = {
    SET_START: "\\{",
    SET_END: "\\}",
    PLUS_MINUS: "\\pm ",
    MINUS_PLUS: "\\mp ",
    AT_MOST: "\\le ",
    AT_LEAST: "\\ge ",
    DEGREE: "^\\circ ",
    "%": "\\%",
    "*": "\\cdot ",
}


def spell(answer: str) -> str:
    """Convert a bare answer to the normal form that `values.parse` reads."""
    text = unwrap(answer if answer.isascii() else _ascii(answer))
    text = _THOUSANDS.sub(lambda match: _NOT_DIGIT.sub("", match[0]), text)
    text = _MATH_MODE.sub("", _COLOR.sub("", text).replace("\\!", ""))
    text = _RAISED_O.sub(DEGREE, _REALS.sub(r"(-\\infty,\\infty)", text))
    text = _ESCAPE.sub(lambda match: _ESCAPED.get(match[0], " "), text)
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1], match[0]), text)
    text = _DEGREES.sub(DEGREE, _SPACE.sub(" ", text))
    text = _PLAIN_CONNECTIVE.sub(", ", _TEXT.sub(_words, text))
    return unwrap(text.replace("{,}", ","))


def unwrap(text: str) -> str:
    """Strip the signs around a text: white space, a full stop, `$`, emphasis and quotation marks."""
    while True:
        before = text
        text = _CLOSING.sub("", text.strip().rstrip("\\")).strip()
        core = text.lstrip("$") if text.endswith("\\$") else text.strip("$")
        text = _without_emphasis(text if "$" in core.removeprefix("\\$") else core)
        if text == before:
            return text


def without_invisible(text: str) -> str:
    """Remove characters without width: soft hyphens, joiners and direction marks."""
    return text if text.isascii() else _INVISIBLE.sub("", text)


def to_latex(spelled: str) -> str:
    """Convert the normal form of an expression to LaTeX, with degrees as radians."""
    return _IN_DEGREES.sub(r"\\frac{\1\\pi}{180}", spelled).translate(str.maketrans(_TO_LATEX))


def is_balanced(text: str) -> bool:
    """Return True if the braces are balanced, so that `\\boxed{text}` is one box."""
    braces = [brace for brace in _BRACES.findall(text) if not brace.startswith("\\")]
    depths = [0, *accumulate(1 if brace == "{" else -1 for brace in braces)]
    return min(depths) == depths[-1] == 0


def looks_mathematical(spelled: str) -> bool:
    """Return True if sympy's parser reads the normal form as it is meant.

    The parser drops an operator without operands and the content of `\\text{}`. It reads a word as the product of its
    letters, two adjacent numbers as one, and a range as a difference.
    """
    without_commands = _COMMAND.sub(" ", spelled)
    if RANGE in spelled or TEXT in spelled or _DANGLING.search(spelled) or _BLANK_NUMBERS.search(spelled):
        return False
    has_operand = re.search(r"[0-9A-Za-z]", without_commands) and not _WORD.search(without_commands)
    return bool(has_operand) and is_balanced(spelled)


def _without_emphasis(text: str) -> str:
    """Remove the first pair of marks around the text's start, and marks without an opening one."""
    for mark in _EMPHASIS:
        if text.startswith(mark) and (end := text.find(mark, len(mark))) > 0:
            return text[len(mark) : end] + text[end + len(mark) :]
    return text.removeprefix("**").rstrip("*_`")


def _ascii(text: str) -> str:
    """Convert characters of other alphabets and typographic ones to LaTeX, and drop invisible ones."""
    text = _RANGE.sub(RANGE, without_invisible(text))
    text = _SLASHED.sub(lambda match: f"\\frac{{{_plain(match[1])}}}{{{_plain(match[2])}}}", text)
    text = _RAISED.sub(lambda match: f"^{_group(match[0])}", text)
    text = _LOWERED.sub(lambda match: f"_{_group(match[0])}", text)
    text = re.sub(f"(?<![0-9])[{_DASHES}]|[{_DASHES}](?![0-9])", "-", text)
    return "".join(char if char.isascii() else _char(char) for char in text)


def _group(text: str) -> str:
    plain = _plain(text)
    return plain if len(plain) == 1 else f"{{{plain}}}"


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-")


@lru_cache(maxsize=1024)
def _char(char: str) -> str:
    if char in _CHARACTERS:
        return _CHARACTERS[char]
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    plain = unicodedata.normalize("NFKC", char).replace("\N{FRACTION SLASH}", "/")
    if unicodedata.category(char) == "No" and "/" in plain:
        numerator, _, denominator = plain.partition("/")
        return f"\\frac{{{numerator}}}{{{denominator}}}"
    name = unicodedata.name(plain, "") if len(plain) == 1 else ""
    if name.startswith("GREEK SMALL LETTER ") and name.count(" ") == 3:
        return f"\\{name.rpartition(' ')[2].lower()} "
    if name.startswith("GREEK CAPITAL LETTER ") and name.count(" ") == 3:
        return f"\\{name.rpartition(' ')[2].capitalize()} "
    return plain


def _words(match: re.Match[str]) -> str:
    """Unwrap text that is a number, a symbol or a function, turn `and` into a comma, and keep other words marked."""
    content = match[1]
    if _CONNECTIVE.fullmatch(content):
        return ", "
    words = _LETTERS.findall(content)
    if content.strip() in FUNCTIONS:
        return f"\\{content.strip()} "
    is_unit = content.strip() in _UNIT_LETTERS and match.string[: match.start()].rstrip()[-1:].isdigit()
    if all(len(word) == 1 for word in words) and not is_unit:
        return content
    return f"\\text{{{' '.join(content.split())}}}"
