"""Exact comparison of expressions with sympy; only worker processes import it, for sympy may not terminate."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from slipstream.rewards.spelling import to_latex

_CONFIG = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_CONSTANTS = [(sympy.Symbol("i"), sympy.I), (sympy.Symbol("e"), sympy.E)]
_DIGITS = 60
# Numbers that the grammar requires in braces: under a root, in a fraction and in an exponent.
_BARE = (
    (re.compile(r"(\d*)\.(\d+)|(\d+)\."), lambda m: str(m[3] or f"\\frac{{{int(m[1] + m[2])}}}{{1{'0' * len(m[2])}}}")),
    (re.compile(r"\\sqrt(\[[^\[\]]*\])?\s*(\d+|[A-Za-z]|\\[A-Za-z]+)"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\sqrt(\[[^\[\]]*\])?\s*\(([^()]*)\)"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\frac\s*([\dA-Za-z])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*([\dA-Za-z]|\\[A-Za-z]+)"), r"\1{\2}"),
    (re.compile(r"\^\s*([-+]?\d+)"), r"^{\1}"),
)


def equal(a: str, b: str) -> bool | None:
    """Compare two expressions; None if one cannot be read."""
    left, right = _read(a), _read(b)
    return None if left is None or right is None else left == right or _is_zero(left - right)


def proportional(a: tuple[str, str], b: tuple[str, str]) -> bool | None:
    """Compare two equations up to a factor, by their sides; None if a side cannot be read."""
    sides = [side for side in map(_read, (*a, *b)) if side is not None]
    if len(sides) < 4:
        return None
    left, right = sides[0] - sides[1], sides[2] - sides[3]
    if left == 0 or right == 0:
        return left == right
    return not sympy.simplify(left / right).free_symbols


def approximate(text: str) -> Fraction | None:
    """Evaluate a real constant to 60 digits; None for any other text."""
    expression = _read(text)
    value = None if expression is None or expression.free_symbols else expression.evalf(_DIGITS)
    return Fraction(str(value)) if value is not None and value.is_Float else None


def _is_zero(difference: sympy.Expr) -> bool:
    if difference is sympy.nan:  # the difference of two infinities
        return False
    expanded = sympy.expand(difference)
    if expanded == 0:
        return True
    symbols = sorted(expanded.free_symbols, key=str)
    point = [(symbol, sympy.Rational(1237 + 114 * index, 1000)) for index, symbol in enumerate(symbols)]
    value = expanded.subs(point).evalf(_DIGITS)
    if value.is_comparable and abs(value) > 10 ** (-_DIGITS // 2):  # not 0 at the test point
        return False
    return sympy.simplify(expanded) == 0


@lru_cache(maxsize=4096)
def _read(text: str) -> sympy.Expr | None:
    latex = to_latex(text)
    for pattern, replacement in _BARE:
        latex = pattern.sub(replacement, latex)
    try:
        expression = latex2sympy(latex, normalization_config=None, conversion_config=_CONFIG)
    except (MemoryError, SystemError):
        raise
    except Exception:  # noqa: BLE001 - the library raises bare ones, for whatever it cannot read
        return None
    if not isinstance(expression, sympy.Expr):
        return None
    return expression.subs(_CONSTANTS)
