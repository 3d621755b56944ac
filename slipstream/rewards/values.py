"""Values of answers: `\\frac{1}{2}`, `0.5` and `½` are equal, `(1, 2)` and `1, 2` are not.

Numbers may stand in lists, tuples, intervals, matrices, equations and words. Text that cannot be read with certainty is
not read at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise

from slipstream.rewards.config import MAX_ANSWER_CHARS
from slipstream.rewards.expressions import Number, UnreadError, equal_equations, equal_numbers, is_rounding, read_number
from slipstream.rewards.spelling import AT_LEAST, AT_MOST, FUNCTIONS, MINUS_PLUS, PLUS_MINUS, SET_END, SET_START, spell


class Unread(Enum):
    """Reasons why a text has no value."""

    AMBIGUOUS = "the text has two readings, or is in no known notation"
    FALSE = "an equation does not hold, such as `2+2=5`"
    UNDECIDED = "only algebra can read the text, in a process without it"


@dataclass(frozen=True, slots=True)
class Group:
    """Values in brackets, or joined by a sign.

    Attributes:
        signs: brackets of a tuple, a vector or an interval, `{}` of a list or a set, or the sign between the items: `:`
            in a ratio, `\\cup` in a union, `&` in a row of a matrix, and `\\\\` between such rows.
    """

    signs: str
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Word:
    """Text in lower case; a choice is one letter."""

    text: str
    is_choice: bool = False
    is_marked: bool = False  # by `\\text{}` or a numeral's base, which tell the word from prose


@dataclass(frozen=True, slots=True)
class Equation:
    """Two equal sides; an assignment has the `name` that it assigns `value` to."""

    sides: tuple[str, str] | None
    name: str | None = None
    value: Value | None = None


Value = Number | Group | Word | Equation
_LIST, _UNION = "{}", "\\cup"


class _ValueError(UnreadError):
    """The text has no value, for another reason than ambiguity."""

    def __init__(self, reason: Unread) -> None:
        super().__init__(reason.value)
        self.reason = reason


@lru_cache(maxsize=4096)
def parse(answer: str) -> Value | Unread:
    """Read the value of a bare answer."""
    try:
        return _value(spell(answer), 0)
    except _ValueError as error:
        return error.reason
    except (UnreadError, RecursionError):
        return Unread.AMBIGUOUS


def compare(a: str, b: str) -> bool | None:
    """Compare two bare answers by value, or by text where one has none or is long; None if algebra is required."""
    if max(len(a), len(b)) > MAX_ANSWER_CHARS:
        return a == b
    if _INTEGER.fullmatch(a) and _INTEGER.fullmatch(b) and a.isascii() and b.isascii():
        return int(a) == int(b)
    left, right = parse(a), parse(b)
    if spell(a) == spell(b):
        return left is not Unread.FALSE
    if isinstance(left, Unread) or isinstance(right, Unread):
        return False if {Unread.AMBIGUOUS, Unread.FALSE} & {left, right} else None
    return equal(left, right)


def is_falsehood(answer: str) -> bool:
    """Return True if the answer holds a chain of equations of which one does not hold."""
    return "=" in answer and parse(answer) is Unread.FALSE


def equal(a: Value, b: Value) -> bool | None:
    """Compare two values; None if equality is unknown.

    Integers, fractions and surds are compared exactly. A decimal also equals a number that it rounds or truncates, to
    all its places, if the two differ by at most one millionth: 0.333333 equals a third, and 0.333 does not.
    """
    if isinstance(a, Equation) or isinstance(b, Equation):
        return _equal_equations(a, b)
    if isinstance(a, Word) or isinstance(b, Word):
        spelled = [_spelled(each) for each in (a, b)]
        return spelled[0] == spelled[1] is not None
    if isinstance(a, Number) and isinstance(b, Number):
        return equal_numbers(a, b)
    return isinstance(a, Group) and isinstance(b, Group) and _equal_groups(a, b)


def is_prose(value: Value) -> bool:
    """Return True if a value contains unmarked words."""
    match value:
        case Word():
            return not value.is_marked
        case Group():
            return any(map(is_prose, value.items))
        case Equation():
            return value.value is not None and is_prose(value.value)
    return False


def _equal_groups(a: Group, b: Group) -> bool | None:
    """Compare two groups. Vectors may have any brackets, but those of two items tell points from intervals."""
    is_unordered = a.signs in (_LIST, _UNION)
    if len(a.items) != len(b.items):
        return False
    if a.signs != b.signs and (is_unordered or b.signs in (_LIST, _UNION) or len(a.items) == 2):
        return False
    if is_unordered:
        return _equal_in_any_order(a.items, b.items)
    verdicts = [equal(x, y) for x, y in zip(a.items, b.items, strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def _equal_in_any_order(a: Sequence[Value], b: Sequence[Value]) -> bool | None:
    """Match each value of one list with an equal value of the other; None if a match is unknown."""
    left, is_certain = list(b), True
    for x in a:
        verdicts = [equal(x, y) for y in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            is_certain = False
        else:
            return False
    return True if is_certain else None


def _spelled(value: Value) -> str | None:
    """Return the text of a word, or of a variable that may be a choice."""
    if isinstance(value, Word):
        return value.text
    symbol = value.symbol if isinstance(value, Number) and not value.unit else None
    return None if symbol is None else symbol.casefold()


def _equal_equations(a: Value, b: Value) -> bool | None:
    if isinstance(a, Equation) and isinstance(b, Equation):
        is_same = None if a.sides is None or b.sides is None else equal_equations(a.sides, b.sides)
        if is_same is not True and a.value is not None and b.value is not None:
            return a.name == b.name and equal(a.value, b.value)
        return is_same
    equation, other = (a, b) if isinstance(a, Equation) else (b, a)
    assert isinstance(equation, Equation)
    return False if equation.value is None else equal(equation.value, other)


# Reading, from the whole answer down to a number.

_INTEGER = re.compile(r"[+-]?\d+")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_CHOICE = re.compile(
    r"\(\s*([A-Za-z])\s*\)|([A-Z])\)|(?:[Oo]ption|[Cc]hoice) \(?([A-Z])\)?|\(?([A-J])[).:]\s+([\w\\$(-].*)"
)
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MARKED = re.compile(r"\\text\{([^{}]*[A-Za-z][^{}]*)\}")
_WORD = re.compile(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+){0,3}|[nN]o|[oO]n|[iI]s")
_NUMERAL = re.compile(r"\(?([0-9][0-9A-F]*|[A-F][0-9A-F]+)\)?\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}")
_MEMBER = re.compile(r"([A-Za-z])\s*\\in(?![A-Za-z])\s*(.*)")
_NAME = re.compile(
    r"[A-Za-z](?:\^\{-1\}|'+)?\([^()]*\)|[A-Z]{2,4}|[A-Za-z]{4,}|[A-Za-z]'"
    r"|\\(?:angle|triangle|overline|vec) ?(?:\{[A-Z]+\}|[A-Z]+)"
    r"|\\text\{[^{}]*\}"
)
_ORDER = re.compile(r"(<=|>=|[<>" + AT_MOST + AT_LEAST + r"])")
_MAX_ITEMS = 64
_MAX_DEPTH = 40
_OPEN, _CLOSE = "([{" + SET_START, ")]}" + SET_END


def _value(text: str, depth: int) -> Value:
    if not text or depth > _MAX_DEPTH:
        raise UnreadError(text)
    if _INTEGER.fullmatch(text):
        return read_number(text)
    word = _word(text)
    if word is not None or text == "\\emptyset":
        return word or Group(_LIST, ())
    pieces = _pieces(text, is_inside=False)
    if len(pieces) > 1:
        return _bag(pieces, depth)
    text = pieces[0]
    member = _MEMBER.fullmatch(text)
    if member is not None:
        return Equation(None, member[1], _value(member[2].strip(), depth + 1))
    if "=" in text.replace("<=", "").replace(">=", ""):
        return _equation(text, depth)
    return _range(text, depth) if _ORDER.search(text) else _item(text, depth)


def _item(text: str, depth: int) -> Value:
    """Read one value: brackets, a matrix, a numeral, or a number with possible ± signs."""
    for sign in (_UNION, ":"):
        if sign in text:
            return Group(sign, tuple(_value(part.strip(), depth + 1) for part in text.split(sign)))
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        return _matrix(matrix[2], depth)
    numeral = _NUMERAL.fullmatch(text)
    if numeral is not None:
        base = int(numeral[2] or numeral[3])
        if 2 <= base <= 36 and all(int(digit, 36) < base for digit in numeral[1]):
            return Word(f"{numeral[1].lstrip('0') or '0'}_{base}", is_marked=True)
    if text[0] in _OPEN and text[-1] in _CLOSE and _encloses(text):
        pieces = _pieces(text[1:-1].strip(), is_inside=True)
        if text[0] == SET_START or len(pieces) > 1:
            return _bracketed(text[0], text[-1], pieces, depth)
        return _value(text[1:-1].strip(), depth + 1)
    if PLUS_MINUS in text or MINUS_PLUS in text:
        both = [text.replace(PLUS_MINUS, a).replace(MINUS_PLUS, b) for a, b in (("+", "-"), ("-", "+"))]
        return Group(_LIST, tuple(_distinct([read_number(each) for each in both])))
    return read_number(text)


def _word(text: str) -> Word | None:
    if _DATE.fullmatch(text):  # and no difference of numbers
        return Word(text, is_marked=True)
    marked = _MARKED.fullmatch(text)
    if marked is not None:
        inside = _word(marked[1].strip())
        if inside is not None and inside.is_choice:
            return inside
        return Word(" ".join(marked[1].casefold().split()), is_marked=True)
    choice = _CHOICE.fullmatch(text)
    if choice is not None and not (choice[5] and _OTHER_CHOICE.search(choice[5])):
        return Word((choice[1] or choice[2] or choice[3] or choice[4]).casefold(), is_choice=True, is_marked=True)
    if _WORD.fullmatch(text) and text not in FUNCTIONS:
        return Word(" ".join(text.casefold().split()))
    return None


def _pieces(text: str, *, is_inside: bool) -> list[str]:
    """Split at the commas or semicolons that separate items, but not at those of thousands.

    A comma before a blank separates, and so do all commas if some do not fit thousands. Inside brackets, a comma
    without a blank belongs to thousands only where other commas have a blank, or where a group begins with 0.
    """
    cuts = [index for index, level in enumerate(_levels(text)) if text[index] in ",;" and level == 0]
    if not cuts:
        return [text]
    wide = [cut for cut in cuts if text[cut] == ";" or text[cut + 1 : cut + 2].isspace()]
    grouped = list(_GROUPED.finditer(text))
    inside = {match.start() + offset for match in grouped for offset, char in enumerate(match[0]) if char == ","}
    of_thousands = inside & set(cuts)
    is_list = not any(",0" in match[0] for match in grouped) if is_inside else of_thousands != set(cuts)
    if not wide and is_list:
        of_thousands = set()
    edges = [-1, *(cut for cut in cuts if cut not in of_thousands), len(text)]
    pieces = [text[start + 1 : end] for start, end in pairwise(edges)]
    if len(pieces) > _MAX_ITEMS:
        raise UnreadError(text)
    for match in grouped if of_thousands else ():
        pieces = [piece.replace(match[0], match[0].replace(",", "")) for piece in pieces]
    return [piece.strip() for piece in pieces]


def _bag(pieces: Sequence[str], depth: int) -> Value:
    """Read a list without brackets; a single name that all values are assigned to is dropped."""
    values = [each for piece in pieces for each in _listed(_value(piece, depth + 1))]
    names = {each.name for each in values if isinstance(each, Equation)}
    if len(names) == 1 and None not in names:
        values = [each.value or each if isinstance(each, Equation) else each for each in values]
    return Group(_LIST, tuple(values))


def _listed(value: Value) -> Sequence[Value]:
    """Return the items of a list or a set; any other value is one item."""
    return value.items if isinstance(value, Group) and value.signs == _LIST else [value]


def _bracketed(left: str, right: str, pieces: Sequence[str], depth: int) -> Value:
    items = [_value(piece, depth + 1) for piece in pieces if piece]
    if left in (SET_START, "{"):
        unique = _distinct([each for item in items for each in _listed(item)])
        return unique[0] if len(unique) == 1 else Group(_LIST, tuple(unique))
    if len(items) != len(pieces) or any(isinstance(item, Group) and item.signs == _LIST for item in items):
        raise UnreadError(left)
    return Group(left + right, tuple(items))


def _distinct(values: Sequence[Value]) -> list[Value]:
    found: list[Value] = []
    for value in values:
        verdicts = [equal(value, each) for each in found]
        if None in verdicts and True not in verdicts:
            raise _ValueError(Unread.UNDECIDED)
        if True not in verdicts:
            found.append(value)
    return found


def _levels(text: str) -> list[int]:
    """Return how many brackets are open after each character."""
    return list(accumulate((char in _OPEN) - (char in _CLOSE) for char in text))


def _encloses(text: str) -> bool:
    """Return True if the first bracket is closed by the last character."""
    *inner, last = _levels(text)
    return last == 0 and 0 not in inner


def _matrix(body: str, depth: int) -> Value:
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", body)]
    cells = [tuple(_value(cell.strip(), depth + 1) for cell in row.split("&")) for row in rows if row]
    if not cells or len({len(row) for row in cells}) > 1 or sum(map(len, cells)) > _MAX_ITEMS:
        raise UnreadError(body)
    return Group("\\\\", tuple(Group("&", row) for row in cells))


def _equation(text: str, depth: int) -> Value:
    """Read an assignment, an equation, or a chain of equations; a true chain has the value of its sides."""
    sides = [side.strip() for side in text.removeprefix("=").split("=")]
    if "" in sides or len(sides) > _MAX_ITEMS:
        raise UnreadError(text)
    if len(sides) == 1:
        return _value(sides[0], depth + 1)
    name = sides[0] if _is_name(sides[0]) else None
    if name is None and len(sides) == 2 and _is_name(sides[1]):
        name, sides = sides[1], sides[::-1]
    values = [_value(side, depth + 1) for side in (sides if name is None else sides[1:])]
    pairs = list(pairwise(values))
    verdicts = [_same(a, b) for a, b in pairs]
    if any(verdict is False and _are_constants(a, b) for verdict, (a, b) in zip(verdicts, pairs, strict=True)):
        raise _ValueError(Unread.FALSE)
    if all(verdicts):
        exact = [each for each in values if not (isinstance(each, Number) and each.place is not None)]
        value = (exact or values)[-1]  # the last one that is not written as a decimal
        return value if name is None else Equation(_sides(sides, values), name.replace(" ", ""), value)
    if None in verdicts:
        raise _ValueError(Unread.UNDECIDED)
    if name is not None or len(sides) > 2:
        raise UnreadError(text)
    return Equation(_sides(sides, values))


def _is_name(side: str) -> bool:
    """Return True if a side is a variable, a function's value, a word or a name, but not a constant."""
    if _NAME.fullmatch(side):
        return True
    try:
        symbol = read_number(side).symbol
    except UnreadError:
        return False
    return symbol is not None and symbol not in ("\\pi", "e", "i", "\\infty")


def _sides(sides: Sequence[str], values: Sequence[Value]) -> tuple[str, str] | None:
    """Return both sides of an equation of expressions; None for an equation of other values."""
    return (sides[0], sides[-1]) if all(isinstance(each, Number) for each in values) else None


def _same(a: Value, b: Value) -> bool | None:
    """Compare both sides of `a = b`; a decimal may round the other side to any number of places."""
    if isinstance(a, Number) and isinstance(b, Number) and not a.unit and not b.unit:
        return is_rounding(a, b, None) or is_rounding(b, a, None) or equal(a, b)
    return equal(a, b)


def _are_constants(*values: Value) -> bool:
    """Return True if all values are numbers without units and variables."""
    return all(isinstance(each, Number) and each.is_constant and not each.unit for each in values)


def _range(text: str, depth: int) -> Value:
    """Read an interval of one variable, such as `2 < x` or `-2 \\le x < 7`."""
    parts = [part.strip() for part in _ORDER.split(text)]
    signs = [{"<=": AT_MOST, ">=": AT_LEAST}.get(sign, sign) for sign in parts[1::2]]
    sides = [_value(side, depth + 1) for side in parts[::2]]
    if signs[0] in ">" + AT_LEAST:
        turned = {">": "<", AT_LEAST: AT_MOST}
        signs, sides = [turned.get(sign, "") for sign in signs][::-1], sides[::-1]
    if not set(signs) <= {"<", AT_MOST} or len(signs) > 2:
        raise UnreadError(text)
    if len(signs) == 1:
        is_upper = isinstance(sides[0], Number) and sides[0].symbol is not None
        sides = [read_number("-\\infty"), *sides] if is_upper else [*sides, read_number("\\infty")]
        signs = ["<", *signs] if is_upper else [*signs, "<"]
    low, middle, high = sides
    if not isinstance(middle, Number) or middle.symbol is None:
        raise UnreadError(text)
    for bound in (low, high):
        if not isinstance(bound, Number) or not bound.is_constant:
            raise UnreadError(text)
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Equation(None, middle.symbol, Group(brackets, (low, high)))
