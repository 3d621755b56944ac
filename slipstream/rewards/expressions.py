"""Exact numbers and expressions, with their units, as people and models write them.

A number is a ratio of sums of terms with rational coefficients, over radicals of primes, `\\pi`, `e`, `i` and
variables, so that integers, fractions, surds and polynomials are compared exactly. What may be read in two ways is
refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from fractions import Fraction

from slipstream.rewards.spelling import DEGREE, FUNCTIONS

RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""How far a decimal may be from a number that it is rounded, or cut off, from."""

Monomial = tuple[tuple[str, Fraction], ...]  # sorted factors: a prime's digits or a symbol, and its power
Sum = dict[Monomial, Fraction]  # without zeros

_MAX_TERMS = 48
_MAX_BITS = 4000  # of a coefficient
MAX_DEPTH = 40
_MAX_EXPONENT = 1000
_MAX_FACTOR = 31_623  # primes up to this are found in radicands: all of those below 10^9
_PRECISION = Context(prec=60)
_CONSTANTS = {
    "pi": Decimal("3.14159265358979323846264338327950288419716939937510582097494459"),
    "e": Decimal("2.71828182845904523536028747135266249775724709369995957496696763"),
}


class UnreadError(ValueError):
    """The text may mean more than one thing, or nothing that this module knows."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number or an expression: `top / bottom`.

    Attributes:
        place: a unit of the last decimal place, of a number that is written as a decimal.
        unit: `%`, `°`, a currency or a word; empty without one.
        opaque: it has functions or nested roots, of which different spellings may be equal.
    """

    top: Sum
    bottom: Sum
    place: Fraction | None = None
    unit: str = ""
    opaque: bool = False

    @property
    def fraction(self) -> Fraction | None:
        """The rational number that it is; None if it is none."""
        if self.bottom == _ONE and not (self.top.keys() - {()}):
            return self.top.get((), Fraction(0))
        return None

    @property
    def symbol(self) -> str | None:
        """The variable that it is; None if it is none."""
        if self.opaque or self.bottom != _ONE or len(self.top) != 1:
            return None
        ((monomial, coefficient),) = self.top.items()
        is_symbol = coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1
        return monomial[0][0] if is_symbol and not monomial[0][0].isdigit() else None


_ONE: Sum = {(): Fraction(1)}


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


def read_number(text: str) -> Number:
    """A number or an expression, with its unit."""
    unit, scale = "", 1
    currency = _CURRENCY.match(text)
    if currency is not None:
        text, unit = currency[1] + text[currency.end() :], currency[2]
    elif text.endswith(("%", DEGREE, "\\$", *_CURRENCIES)) and not _FUNCTION.search(text):
        text, unit = text.rstrip("\\$%" + DEGREE + _CURRENCIES).strip(), text[-1]
    else:
        text, unit, scale = _without_unit(text)
    decimal = _DECIMAL.fullmatch(text)
    number = _Reader(text).read() if decimal is None else _decimal_number(decimal)
    if scale != 1:
        place = None if number.place is None else number.place * scale
        number = replace(number, top=_scaled(number.top, Fraction(scale)), place=place)
    return replace(number, unit=unit)


def _without_unit(text: str) -> tuple[str, str, int]:
    """The text before a unit at its end, the unit, and the number that `million` stands for."""
    for match in _UNIT.finditer(text):
        if match.end() < len(text) or match.start() == 0:
            continue
        words = (match[1] or match[3] or "").replace(".", "").casefold().split()
        scale = _SCALES.get(words[0].removesuffix("s"), 1) if words else 1
        words = words[1:] if scale != 1 else words
        words = words[1:] if words[:1] == ["of"] else words
        if match[1] is None and scale == 1 and not _is_known(words):
            return text, "", 1
        if any(word.removesuffix("s") in _NO_UNITS or word in _NO_UNITS for word in words):
            raise UnreadError(text)
        exponent = match[2] or match[4]
        return text[: match.start()].strip(), _unit(words) + (f"^{exponent}" if exponent else ""), scale
    return text, "", 1


def _is_known(words: Sequence[str]) -> bool:
    return bool(words) and (_unit(words) in _UNIT_WORDS.values() or words[0] in _SHORT_UNITS)


def _unit(words: Sequence[str]) -> str:
    """One spelling of a unit: its sign if it has a common one, and no plural."""
    if not words:
        return ""
    if words[0] in ("square", "sq", "cubic") and len(words) > 1:
        return f"{_unit(words[1:])}^{3 if words[0] == 'cubic' else 2}"
    singular = [word[:-1] if word.endswith("s") and len(word) > 2 else word for word in words]
    return _UNIT_WORDS.get(singular[0], singular[0]) if len(words) == 1 else " ".join(singular)


def _decimal_number(match: re.Match[str]) -> Number:
    """Exactly what is written, and a unit of the last place if it has a point or a power of ten."""
    whole, places = match[2], match[3] or ""
    exponent = int(match[4] or match[5] or match[6] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        raise UnreadError(match[0])
    unit = Fraction(10) ** (exponent - len(places))
    size = int(whole + places) * unit
    is_decimal = match[3] is not None or exponent != 0
    return Number(_sum(-size if match[1] == "-" else size), _ONE, place=unit if is_decimal else None)


# Expressions.

_TOKEN = re.compile(r"\d+(?:\.\d*)?|\.\d+|\\[A-Za-z]+|[A-Za-z]+|\*\*|[-+*/^_(){}\[\]|!" + DEGREE + "]")
_CONSTANT_NAMES = {"\\pi": "pi", "\\infty": "infty"}
_NOT_SYMBOLS = frozenset({
    "\\begin", "\\end", "\\int", "\\sum", "\\prod", "\\lim", "\\text", "\\cup", "\\cap", "\\setminus", "\\in", "\\neq",
    "\\approx", "\\pmod", "\\bmod", "\\mod", "\\to", "\\overline", "\\bar", "\\vec", "\\hat", "\\dots", "\\ldots",
    "\\cdots", "\\not", "\\mid", "\\emptyset", "\\equiv", "\\sim", "\\angle", "\\triangle",
})  # fmt: skip


@dataclass(slots=True)
class _Token:
    text: str
    spaced: bool  # after a blank


class _Reader:
    """Reads one expression, and refuses what is read in two ways: `1/2x`, `x2`, `2\\frac{5}{3}`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[_Token] = []
        self._next = self._depth = 0
        self._opaque = False
        end = 0
        for match in _TOKEN.finditer(text):
            gap = text[end : match.start()]
            if gap.strip():
                raise UnreadError(text)
            self._tokens.append(_Token(match[0], bool(gap)))
            end = match.end()
        if text[end:].strip() or not self._tokens:
            raise UnreadError(text)

    def read(self) -> Number:
        """The whole text."""
        number = self._sum_of_terms()
        if self._next < len(self._tokens):
            raise UnreadError(self._text)
        return replace(number, opaque=self._opaque)

    def _peek(self, offset: int = 0) -> str:
        index = self._next + offset
        return self._tokens[index].text if index < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        text = self._peek()
        if not text or (expected and text not in expected):
            raise UnreadError(self._text)
        self._next += 1
        return text

    def _sum_of_terms(self) -> Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadError(self._text)
        number = self._term()
        while self._peek() in ("+", "-"):
            sign = -1 if self._take() == "-" else 1
            number = _add(number, _negated(self._term(), sign))
        self._depth -= 1
        return number

    def _term(self) -> Number:
        sign = 1
        while self._peek() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        number, has_slash = self._factor(), False
        while self._peek():
            token = self._peek()
            if token in ("*", "/"):
                self._take()
                is_negative = self._peek() == "-" and bool(self._take())
                other = _negated(self._factor(), -1 if is_negative else 1)
                number = _divided(number, other) if token == "/" else _multiplied(number, other)
                has_slash = token == "/"
            elif token[0].isalpha() or token[0] in "\\({[" or token == "|":
                if has_slash or token == "|":
                    break
                number = _multiplied(number, self._factor())
            else:
                break
        if has_slash and self._peek() and (self._peek()[0].isalnum() or self._peek()[0] in "\\({["):
            raise UnreadError(self._text)
        return _negated(number, sign)

    def _factor(self) -> Number:
        number = self._atom()
        while self._peek() in ("^", "**", "!", DEGREE):
            sign = self._take()
            if sign == DEGREE:  # of a function's argument
                number = _multiplied(number, _divided(_named("pi"), _rational(Fraction(180))))
            else:
                number = _factorial(number) if sign == "!" else self._powered(number)
        following = self._peek()
        if following and following[0] in "0123456789.":
            raise UnreadError(self._text)
        return number

    def _powered(self, number: Number) -> Number:
        exponent = self._argument(is_exponent=True)
        power = exponent.fraction
        if power is None:
            return self._opaque_atom("power", number, exponent)
        root = _power(number, power)
        return self._opaque_atom("power", number, exponent) if root is None else root

    def _atom(self) -> Number:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return self._literal(token)
        if token in ("(", "[", "{"):
            number = self._sum_of_terms()
            self._take({"(": ")", "[": "]", "{": "}"}[token])
            return number
        if token == "|":
            number = self._sum_of_terms()
            self._take("|")
            value = number.fraction
            return self._opaque_atom("abs", number) if value is None else _rational(abs(value))
        if token.lstrip("\\") in FUNCTIONS:
            return self._function(token.lstrip("\\"))
        if token == "\\frac":
            return _divided(self._argument(), self._argument())
        if token in ("\\binom", "\\dbinom", "\\tbinom"):
            return _binomial(self._argument(), self._argument())
        return self._symbol(token)

    def _literal(self, token: str) -> Number:
        """A number, or a mixed one: `3 1/2`, `3\\frac{1}{2}`."""
        value = Fraction(token if token[-1] != "." else token[:-1])
        following = self._tokens[self._next : self._next + 5]
        texts = [each.text for each in following]
        if texts[:1] == ["\\frac"]:
            start = self._next
            self._take()
            top, bottom = self._argument().fraction, self._argument().fraction
            if top is None or bottom is None:
                self._next = start  # a factor
                return _rational(value)
            return _rational(self._mixed(token, top, bottom))
        if texts and texts[0].isdigit() and following[0].spaced and texts[1:2] == ["/"] and texts[2:3] != []:
            if not texts[2].isdigit():
                raise UnreadError(self._text)
            self._next += 3
            return _rational(self._mixed(token, Fraction(texts[0]), Fraction(texts[2])))
        return _rational(value)

    def _mixed(self, token: str, top: Fraction, bottom: Fraction) -> Fraction:
        if not token.isdigit() or top.denominator != 1 or bottom.denominator != 1 or not 0 < top < bottom:
            raise UnreadError(self._text)
        return int(token) + top / bottom

    def _argument(self, *, is_exponent: bool = False) -> Number:
        """Read the argument of a command or a power: a group, or one sign as TeX has it; all digits of an exponent."""
        token = self._peek()
        if token == "{" or (is_exponent and token == "("):
            return self._atom()
        if is_exponent and token in ("-", "+"):
            self._take()
            return _negated(self._argument(is_exponent=True), -1 if token == "-" else 1)
        if token.isdigit():
            if is_exponent or len(token) == 1:
                self._take()
                return _rational(Fraction(token))
            self._tokens[self._next] = _Token(token[1:], spaced=False)
            return _rational(Fraction(token[0]))
        if len(token) > 1 and token.isalpha():
            raise UnreadError(self._text)
        if token and (token.isalpha() or token[0] == "\\") and token not in ("\\frac", "\\sqrt") and not is_exponent:
            return self._symbol(self._take())
        if token and (token.isalpha() or token in ("\\frac", "\\pi")):
            return self._atom()
        raise UnreadError(self._text)

    def _function(self, name: str) -> Number:
        if name == "sqrt":
            return self._root()
        power = index = None
        while self._peek() in ("^", "_"):
            if self._take() == "^":
                power = self._argument(is_exponent=True)
            else:
                index = self._argument()
        number = self._factor()
        while self._peek() and (self._peek()[0].isalpha() or self._peek() in ("\\pi", "\\theta")):
            number = _multiplied(number, self._factor())
        if name == "exp" and power is None and index is None:
            return self._opaque_atom("power", _named("e"), number)
        value = self._opaque_atom(name, *([number] if index is None else [index, number]))
        if power is None:
            return value
        exponent = power.fraction
        if exponent is None or exponent.denominator != 1 or exponent < 1:
            raise UnreadError(self._text)
        return _power(value, exponent) or self._opaque_atom("power", value, power)

    def _root(self) -> Number:
        degree = Fraction(2)
        if self._peek() == "[":
            self._take()
            degree = self._sum_of_terms().fraction or Fraction(0)
            self._take("]")
        token = self._peek()
        if degree.denominator != 1 or degree < 2 or degree > 100:
            raise UnreadError(self._text)
        number = self._atom() if token == "(" or (token.isdigit()) else self._argument()
        root = _power(number, 1 / degree)
        return self._opaque_atom("power", number, _rational(1 / degree)) if root is None else root

    def _symbol(self, token: str) -> Number:
        if token in _NOT_SYMBOLS:
            raise UnreadError(self._text)
        if token[0] == "\\":
            return _named(_CONSTANT_NAMES.get(token, token) + self._index())
        if not token.isalpha():
            raise UnreadError(self._text)
        if token == "pi":
            return _named("pi")
        if len(token) > 3 or (len(token) == 3 and not (self._next > 1 and self._peek(-2)[0].isdigit())):
            raise UnreadError(self._text)  # a word
        number = _rational(Fraction(1))
        for letter in token[:-1]:
            number = _multiplied(number, _named(letter))
        return _multiplied(number, self._last_letter(token[-1]))

    def _last_letter(self, letter: str) -> Number:
        return _named(letter + self._index())

    def _index(self) -> str:
        """`_{12}` of a variable."""
        if self._peek() != "_":
            return ""
        self._take()
        if self._peek() != "{":
            return "_" + self._take()
        parts = [self._take()]
        while parts[-1] != "}":
            parts.append(self._take())
        return "_" + "".join(parts[1:-1])

    def _opaque_atom(self, name: str, *arguments: Number) -> Number:
        """Something that equals itself, and maybe more than is known here."""
        self._opaque = True
        spelled = ";".join(f"{_key(each.top)}/{_key(each.bottom)}" for each in arguments)
        if len(spelled) > 2000:
            raise UnreadError(self._text)
        return _named(f"{name}({spelled})")


# Comparisons.


def equal_numbers(a: Number, b: Number) -> bool | None:
    """Compare two numbers or expressions, of which one may leave out the unit; None if equality is not known."""
    if a.unit and b.unit and a.unit != b.unit:
        return False
    verdict = _equal_sizes(a, b)
    if (
        verdict is not True and a.unit != b.unit and "%" in (a.unit, b.unit)
    ):  # 50 % is a place, and 50 if it is asked so
        percent, plain = (a, b) if a.unit == "%" else (b, a)
        place = None if percent.place is None else percent.place / 100
        hundredth = replace(percent, top=_scaled(percent.top, Fraction(1, 100)), place=place)
        return _equal_sizes(hundredth, plain) or verdict
    return verdict


def _equal_sizes(a: Number, b: Number) -> bool | None:
    left, right = _times(a.top, b.bottom), _times(b.top, a.bottom)
    if left == right:
        return True
    if a.opaque or b.opaque:
        return None
    return any(decimal.place is not None and is_rounding(decimal, other) for decimal, other in ((a, b), (b, a)))


def is_rounding(decimal: Number, other: Number, tolerance: Fraction | None = RELATIVE_TOLERANCE) -> bool:
    """Return True if a number written as a decimal is the other one, rounded or cut off after its last place."""
    value, exact = decimal.fraction, _approximate(other)
    if value is None or exact is None or decimal.place is None:
        return False
    error = abs(value - exact)
    is_cut_off = abs(value) < abs(exact) and error < decimal.place
    return (is_cut_off or 2 * error <= decimal.place) and (tolerance is None or error <= tolerance * abs(exact))


def _approximate(number: Number) -> Fraction | None:
    """A real constant to about 60 digits, or exactly if it is rational; None for what is none."""
    if number.fraction is not None:
        return number.fraction
    top, bottom = (_decimal(each) for each in (number.top, number.bottom))
    return None if top is None or not bottom else Fraction(top) / Fraction(bottom)


def _decimal(terms: Sum) -> Decimal | None:
    total = Decimal(0)
    for monomial, coefficient in terms.items():
        term = _PRECISION.divide(Decimal(coefficient.numerator), Decimal(coefficient.denominator))
        for base, power in monomial:
            constant = Decimal(base) if base.isdigit() else _CONSTANTS.get(base)
            if constant is None:
                return None
            exponent = _PRECISION.divide(Decimal(power.numerator), Decimal(power.denominator))
            term = _PRECISION.multiply(term, _PRECISION.power(constant, exponent))
        total = _PRECISION.add(total, term)
    return total


def variables(number: Number) -> set[str]:
    """Names of what is no constant in it."""
    names = {base for terms in (number.top, number.bottom) for monomial in terms for base, _ in monomial}
    return {name for name in names if not name.isdigit()} - {"pi", "e", "i"}


# Sums of terms.


def _key(terms: Sum) -> str:
    return repr(sorted((monomial, str(coefficient)) for monomial, coefficient in terms.items()))


def changed_number(number: Number) -> Number:
    """Another one of the same kind."""
    return replace(number, top=_scaled(number.top, Fraction(2)) if number.top else number.bottom)


def _sum(value: Fraction) -> Sum:
    return {(): Fraction(value)} if value else {}


def _rational(value: Fraction) -> Number:
    return Number(_sum(value), _ONE)


def _named(name: str) -> Number:
    return Number({((name, Fraction(1)),): Fraction(1)}, _ONE)


def _scaled(terms: Sum, factor: Fraction) -> Sum:
    return {monomial: coefficient * factor for monomial, coefficient in terms.items()}


def _plus(a: Sum, b: Sum) -> Sum:
    total = dict(a)
    for monomial, coefficient in b.items():
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    return _checked({monomial: coefficient for monomial, coefficient in total.items() if coefficient})


def _times(a: Sum, b: Sum) -> Sum:
    if len(a) * len(b) > 10 * _MAX_TERMS:
        raise UnreadError("too many terms")
    total: Sum = {}
    for left, x in a.items():
        for right, y in b.items():
            monomial, factor = _joined(left, right)
            total[monomial] = total.get(monomial, Fraction(0)) + x * y * factor
    return _checked({monomial: coefficient for monomial, coefficient in total.items() if coefficient})


def _checked(terms: Sum) -> Sum:
    sizes = [max(abs(each.numerator), each.denominator).bit_length() for each in terms.values()]
    if len(terms) > _MAX_TERMS or max(sizes, default=0) > _MAX_BITS:
        raise UnreadError("too large")
    return terms


def _joined(a: Monomial, b: Monomial) -> tuple[Monomial, Fraction]:
    """Product of two monomials, as one and a factor."""
    if not a or not b:
        return a or b, Fraction(1)
    powers = dict(a)
    for base, power in b:
        powers[base] = powers.get(base, Fraction(0)) + power
    return _normal(powers)


def _normal(powers: dict[str, Fraction]) -> tuple[Monomial, Fraction]:
    """A monomial whose primes have powers below 1 and `i` no more than its first, and the factor that this leaves."""
    factor, kept = Fraction(1), []
    for base, power in powers.items():
        if base.isdigit():
            whole = math.floor(power)
            factor *= Fraction(int(base)) ** whole
            power -= whole
        elif base == "i":
            factor *= -1 if power % 4 >= 2 else 1
            power %= 2
        if power:
            kept.append((base, power))
    return tuple(sorted(kept)), factor


def _add(a: Number, b: Number) -> Number:
    if a.bottom == b.bottom:
        return Number(_plus(a.top, b.top), a.bottom)
    return Number(_plus(_times(a.top, b.bottom), _times(b.top, a.bottom)), _times(a.bottom, b.bottom))


def _negated(number: Number, sign: int) -> Number:
    return number if sign > 0 else replace(number, top=_scaled(number.top, Fraction(-1)), place=None)


def _multiplied(a: Number, b: Number) -> Number:
    return _simple(Number(_times(a.top, b.top), _times(a.bottom, b.bottom)))


def _divided(a: Number, b: Number) -> Number:
    if not b.top:
        raise UnreadError("a division by zero")
    return _simple(Number(_times(a.top, b.bottom), _times(a.bottom, b.top)))


def _simple(number: Number) -> Number:
    """Without a denominator of one term."""
    if number.bottom == _ONE or len(number.bottom) != 1:
        return number
    ((monomial, coefficient),) = number.bottom.items()
    inverse, factor = _normal({base: -power for base, power in monomial})
    return Number(_times(number.top, {inverse: factor / coefficient}), _ONE)


def _power(number: Number, power: Fraction) -> Number | None:
    """`number ** power`; None if it is no sum of terms."""
    if power.denominator == 1:
        return _whole_power(number, int(power))
    if number.bottom != _ONE or len(number.top) != 1:
        return None
    ((monomial, coefficient),) = number.top.items()
    result = _rational(Fraction(1))
    if coefficient < 0:
        if power != Fraction(1, 2) or monomial:
            return None
        result, coefficient = _named("i"), -coefficient
    if any(base.isdigit() or each.denominator != 1 or not each % 2 for base, each in monomial):
        return None
    for base, each in (*_factors(coefficient.numerator), *((b, -e) for b, e in _factors(coefficient.denominator))):
        whole = math.floor(each * power)
        if abs(whole) > _MAX_EXPONENT:
            raise UnreadError("too large")
        monomial_of_base = ((str(base), each * power - whole),) if each * power != whole else ()
        result = _multiplied(result, Number({monomial_of_base: Fraction(base) ** whole}, _ONE))
    symbols = tuple((base, each * power) for base, each in monomial)
    return _multiplied(result, Number({symbols: Fraction(1)}, _ONE))


def _whole_power(number: Number, power: int) -> Number:
    if power < 0:
        number, power = _divided(_rational(Fraction(1)), number), -power
    if power == 0 and not number.top:
        raise UnreadError("0^0")
    bits = max((max(abs(c.numerator), c.denominator).bit_length() for c in number.top.values()), default=1)
    is_large = len(number.top) > 1 or len(number.bottom) > 1
    if bits * power > _MAX_BITS + bits or power > (64 if is_large else _MAX_EXPONENT):
        raise UnreadError("too large")
    result, square = _rational(Fraction(1)), number
    while power:
        if power & 1:
            result = _multiplied(result, square)
        power >>= 1
        square = _multiplied(square, square) if power else square
    return result


def _factors(number: int) -> list[tuple[int, int]]:
    """Primes of a number and their powers."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        if divisor > _MAX_FACTOR:
            raise UnreadError("too large to factorise")
        count = 0
        while number % divisor == 0:
            number, count = number // divisor, count + 1
        if count:
            found.append((divisor, count))
        divisor += 1 if divisor == 2 else 2
    return [*found, (number, 1)] if number > 1 else found


def _factorial(number: Number) -> Number:
    value = number.fraction
    if value is None or value.denominator != 1 or not 0 <= value <= 500:
        raise UnreadError("a factorial")
    return _rational(Fraction(math.factorial(int(value))))


def _binomial(top: Number, bottom: Number) -> Number:
    n, k = top.fraction, bottom.fraction
    if n is None or k is None or n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= 500:
        raise UnreadError("a binomial coefficient")
    return _rational(Fraction(math.comb(int(n), int(k))))


def difference(left: object, right: object) -> Sum | None:
    """The difference of an equation's two sides; None if they are more than expressions."""
    if not isinstance(left, Number) or not isinstance(right, Number) or left.opaque or right.opaque:
        return None
    return _plus(_times(left.top, right.bottom), _scaled(_times(right.top, left.bottom), Fraction(-1)))
