"""Numbers and expressions with units, in the spellings of people and models.

Plain arithmetic has an exact value at once. Expressions with roots, constants, variables or functions are compared by
sympy, which only worker processes `install`; in other processes their equality is unknown. Ambiguous text is rejected.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import ModuleType

from slipstream.rewards.spelling import DEGREE, FUNCTIONS, looks_mathematical

RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""Largest relative difference between a decimal and the number that it rounds or truncates."""

_MAX_BITS = 4000  # size of a power
_MAX_EXPONENT = 1000


class UnreadError(ValueError):
    """The text is ambiguous, or in no known notation."""


_algebra: ModuleType | None = None  # `slipstream.rewards.algebra` in worker processes


def install(algebra: ModuleType) -> None:
    """Let `algebra` compare in this process what plain arithmetic cannot."""
    global _algebra
    _algebra = algebra


_SYMBOL = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:\s*_\s*(?:\w|\{[^{}]*\}))?")


@dataclass(frozen=True, slots=True)
class Number:
    """A number or an expression.

    Attributes:
        text: the spelling without its unit.
        value: exact value of plain arithmetic; None where algebra is required.
        place: value of the last decimal place, for a number written as a decimal.
        unit: `%`, `°`, a currency or a word; empty without one.
    """

    text: str
    value: Fraction | None = None
    place: Fraction | None = None
    unit: str = ""

    @property
    def symbol(self) -> str | None:
        """Name of the variable or constant that the text consists of; None for any other text."""
        return "".join(self.text.split()) if _SYMBOL.fullmatch(self.text) else None

    @property
    def is_constant(self) -> bool:
        """Return True if the number holds no variable."""
        return self.value is not None or re.search(r"[A-Za-z]", _CONSTANT.sub("", self.text)) is None


# Numbers with units.

_UNIT_WORDS = {
    "dollar": "$", "usd": "$", "percent": "%", "degree": DEGREE, "deg": DEGREE,
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "kilometer": "km",
    "kilometre": "km", "meter": "m", "metre": "m", "inche": "in", "inch": "in", "foot": "ft", "feet": "ft",
    "mile": "mi", "yard": "yd", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g",
    "kilogram": "kg", "pound": "lb", "ounce": "oz", "liter": "l", "litre": "l", "cent": "cent", "unit": "unit",
}  # fmt: skip
_SHORT_UNITS = frozenset(
    ("cm", "mm", "km", "kg", "mg", "ml", "ft", "in", "mi", "yd", "lb", "oz", "min", "hr", "sec", "deg", "hz", "mph")
)
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNITS = frozenset({
    "or", "and", "if", "not", "more", "less", "fewer", "than", "at", "least", "most", "to", "up", "about", "mod",
    "when", "for", "is", "are", "squared", "cubed", "factorial", "half", "halve", "third", "quarter", "fourth", "fifth",
    "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth", "thousandth", "pi", "plus", "minus", "times", "over",
    "by", "pair",
})  # fmt: skip
_UNIT = re.compile(
    r"\\text\{([^{}]*)\}(?:\s*\^\s*\{?([23])\}?)?|([A-Za-z]{2,}(?: [A-Za-z]{2,})?)(?:\s*\^\s*\{?([23])\}?)?"
)
_CURRENCIES = "€£¥"
_CURRENCY = re.compile(r"([+-]?)\s*\\?([$" + _CURRENCIES + r"])\s*")
_FUNCTION = re.compile(r"\\(?:" + "|".join(sorted(FUNCTIONS - {"sqrt"})) + r")(?![A-Za-z])")
_DECIMAL = re.compile(
    r"([+-]?)(?=\.?\d)(\d*)(?:\.(\d*))?"
    r"(?:[eE]([+-]?\d{1,4})|\s*[*xX]\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d{1,4})\s*\}|([+-]?\d{1,4})))?"
)

_CONSTANT = re.compile(r"\\(?:pi|infty|sqrt|frac|cdot)(?![A-Za-z])|(?<![A-Za-z])[ei](?![A-Za-z])")
_PLAIN_FUNCTION = re.compile(r"(?<![\\A-Za-z])(pi|" + "|".join(sorted(FUNCTIONS)) + r")(?![A-Za-z])")
_NOT_EXPRESSION = re.compile(
    r"\\(?:begin|end|int|sum|prod|lim|text|cup|cap|setminus|in|neq|approx|pmod|bmod|mod|to|overline|bar|vec|hat|dots|ldots"
    r"|cdots|not|mid|emptyset|equiv|sim|angle|triangle)(?![A-Za-z])|[,;:&%\"']|\d\s*_"
)


def read_number(text: str) -> Number:
    """Read a number or an expression with its unit."""
    unit, scale = "", 1
    currency = _CURRENCY.match(text)
    if currency is not None:
        text, unit = currency[1] + text[currency.end() :], currency[2]
    elif text.endswith(("%", DEGREE, "\\$", *_CURRENCIES)) and not _FUNCTION.search(text):
        text, unit = text.rstrip("\\$%" + DEGREE + _CURRENCIES).strip(), text[-1]
    else:
        text, unit, scale = _without_unit(text)
    text = _MIXED.sub(_mixed, _PLAIN_FUNCTION.sub(r"\\\1 ", text.replace("**", "^")).strip())
    decimal = _DECIMAL.fullmatch(text)
    number = Number(text, _arithmetic(text)) if decimal is None else _decimal_number(decimal)
    is_read = number.value is not None or _SYMBOL.fullmatch(text.lstrip("+- ")) or looks_mathematical(text)
    if not is_read or _NOT_EXPRESSION.search(text):
        raise UnreadError(text)
    return replace(_scaled(number, Fraction(scale)), unit=unit)


def _without_unit(text: str) -> tuple[str, str, int]:
    """Split the text into number, trailing unit, and the factor of a word such as `million`."""
    for match in _UNIT.finditer(text):
        if match.end() < len(text) or match.start() == 0:
            continue
        words = (match[1] or match[3] or "").replace(".", "").casefold().split()
        scale = _SCALES.get(words[0].removesuffix("s"), 1) if words else 1
        words = words[1:] if scale != 1 else words
        words = words[1:] if words[:1] == ["of"] else words
        is_known = words and (_unit(words) in _UNIT_WORDS.values() or words[0] in _SHORT_UNITS)
        if match[1] is None and scale == 1 and not is_known:
            return text, "", 1
        if any(word.removesuffix("s") in _NO_UNITS or word in _NO_UNITS for word in words):
            raise UnreadError(text)
        exponent = match[2] or match[4]
        return text[: match.start()].strip(), _unit(words) + (f"^{exponent}" if exponent else ""), scale
    return text, "", 1


def _unit(words: Sequence[str]) -> str:
    """Normalise a unit: its common sign if it has one, and no plural."""
    if not words:
        return ""
    if words[0] in ("square", "sq", "cubic") and len(words) > 1:
        return f"{_unit(words[1:])}^{3 if words[0] == 'cubic' else 2}"
    singular = [word[:-1] if word.endswith("s") and len(word) > 2 else word for word in words]
    return _UNIT_WORDS.get(singular[0], singular[0]) if len(words) == 1 else " ".join(singular)


def _decimal_number(match: re.Match[str]) -> Number:
    """Return the exact value of a decimal, with its last place if it has a point or a power of ten."""
    whole, places = match[2], match[3] or ""
    exponent = int(match[4] or match[5] or match[6] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        raise UnreadError(match[0])
    unit = Fraction(10) ** (exponent - len(places))
    size = int(whole + places) * unit
    is_decimal = match[3] is not None or exponent != 0
    return Number(match[0], -size if match[1] == "-" else size, place=unit if is_decimal else None)


# Values of plain arithmetic.

_MIXED = re.compile(
    r"(?<![\d./^_}])(\d+)"
    r"(?:\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))| (\d+)\s*/\s*(\d+)(?![\d.]))"
)
_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_PLAIN = re.compile(r"[-+*/^(){}\d.\s]+")
_LITERAL = re.compile(r"\d+\.?\d*|\.\d+")


def _arithmetic(text: str) -> Fraction | None:
    """Evaluate digits, operators and fractions exactly by Python's grammar; None for any other text."""
    while "\\frac" in text and (replaced := _FRACTION.sub(r"((\1\2)/(\3\4))", text)) != text:
        text = replaced
    if not _PLAIN.fullmatch(text):
        return None
    source = _LITERAL.sub(lambda match: f"({Fraction(match[0])})", text.strip())
    try:
        tree = ast.parse(source.translate({ord("^"): "**", ord("{"): "(", ord("}"): ")"}), mode="eval")
        return _evaluated(tree.body)
    except (SyntaxError, MemoryError, RecursionError):
        return None


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = [each for each in match.groups() if each is not None]
    return f"({whole}+{top}/{bottom})" if 0 < int(top) < int(bottom) else match[0]


def _evaluated(node: ast.expr) -> Fraction | None:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            value = _evaluated(operand)
            return -value if value is not None and isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, right=right):
            a, b = _evaluated(left), _evaluated(right)
            return None if a is None or b is None else _combined(a, node.op, b)
    return None


def _combined(a: Fraction, operator: ast.operator, b: Fraction) -> Fraction | None:
    if not b and (isinstance(operator, ast.Div) or (not a and isinstance(operator, ast.Pow))):
        raise UnreadError("no value")
    match operator:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b
        case ast.Pow() if b.denominator == 1 and (a or b > 0):
            is_small = abs(b) * max(a.numerator.bit_length(), a.denominator.bit_length()) <= _MAX_BITS
            return a**b.numerator if is_small else None
    return None


# Comparisons.


def equal_numbers(a: Number, b: Number) -> bool | None:
    """Compare two numbers or expressions, of which one may omit the unit; None if equality is unknown."""
    if a.unit and b.unit and a.unit != b.unit:
        return False
    verdict = _equal_sizes(a, b)
    if verdict is True or a.unit == b.unit or "%" not in (a.unit, b.unit):
        return verdict
    percent, plain = (a, b) if a.unit == "%" else (b, a)
    # 50 % is a half, and 50 where the question asks for percent.
    return _equal_sizes(_scaled(percent, Fraction(1, 100)), plain) or verdict


def _equal_sizes(a: Number, b: Number) -> bool | None:
    if a.text == b.text or (a.value is not None and a.value == b.value):
        return True
    if a.value is None or b.value is None:
        is_equal = None if _algebra is None else _algebra.equal(a.text, b.text)
        if is_equal is not False:
            return is_equal
    return is_rounding(a, b) or is_rounding(b, a)


def is_rounding(decimal: Number, other: Number, tolerance: Fraction | None = RELATIVE_TOLERANCE) -> bool:
    """Return True if a decimal is the other number, rounded or truncated after its last place."""
    if decimal.value is None or decimal.place is None:
        return False
    exact = other.value
    if exact is None and _algebra is not None:
        exact = _algebra.approximate(other.text)
    if exact is None:
        return False
    error = abs(decimal.value - exact)
    is_cut_off = abs(decimal.value) < abs(exact) and error < decimal.place
    return (is_cut_off or 2 * error <= decimal.place) and (tolerance is None or error <= tolerance * abs(exact))


def equal_equations(a: tuple[str, str], b: tuple[str, str]) -> bool | None:
    """Compare two equations by their sides, up to a factor; None if equality is unknown."""
    return True if a == b else None if _algebra is None else _algebra.proportional(a, b)


def _scaled(number: Number, factor: Fraction) -> Number:
    if factor == 1:
        return number
    value = None if number.value is None else number.value * factor
    place = None if number.place is None else number.place * factor
    return replace(number, text=f"({number.text})*{factor}", value=value, place=place)
