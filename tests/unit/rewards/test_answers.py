"""What counts as the answer of a response, and which answers are spelled equally."""

from __future__ import annotations

import pytest

from slipstream.rewards.answers import (
    extract_answer,
    is_balanced,
    is_integer,
    looks_mathematical,
    normalise_answer,
)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{1+\\boxed{2}}", "1+\\boxed{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed {7}", "7"),
        ("a set {1, \\boxed{3}", "3"),
        ("\\boxed{4} and a box cut off \\boxed{5", "4"),
        ("\\boxed{}", None),
        ("text\nAnswer: $12$.\n", "12"),
        ("Answer: 1\nthe final answer: 2", "2"),
        ("\\boxed{3}\nAnswer: 4", "3"),
        ("no answer at all", None),
        ("<think>\\boxed{1}</think>\\boxed{2}", "2"),
        ("\\boxed{1}</think>\\boxed{2}", "2"),
        ("<think>\\boxed{1}</think>I do not know", None),
        ("<think>\\boxed{1} and cut off", None),
        ("<think>a</think>\\boxed{1}</think>\\boxed{2}", "2"),
        ("\\boxed{ 6 }", "6"),
        ("a } b \\boxed{6}", "6"),
        ("\\boxed{a{b}c}", "a{b}c"),
        ("ANSWER :\t$$.5$", ".5"),
        ("Answer: $x.$", "x"),
        ("Answer: $", None),
        ("Answer: 2X", "2X"),
        ("Answer: X2", "X2"),
        ("a</think>\\boxed{1}</think>I do not know", None),
    ],
)
def test_the_answer_of_a_response(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("025", "25"),
        ("-0", "0"),
        ("+7", "7"),
        ("-012", "-12"),
        ("$1,234$", "1234"),
        ("1\\,234.", "1234"),
        ("$12$.", "12"),
        (".5", ".5"),
        ("\N{MINUS SIGN}3", "-3"),
        ("\N{ARABIC-INDIC DIGIT FOUR}\N{ARABIC-INDIC DIGIT TWO}", "42"),
        ("\N{FULLWIDTH DIGIT NINE}", "9"),
        ("1,23", "1,23"),
        ("(1, 2)", "(1,2)"),
        ("1,234,567", "1234567"),
        ("-1,234", "-1234"),
        ("12345,678", "12345,678"),
        ("00", "0"),
        ("-00", "0"),
        ("1\\;2\\:3\\ 4\\!5~6", "123456"),
        ("$$.5", ".5"),
        ("x.$", "x"),
        ("x07", "x07"),
        ("2X", "2X"),
        ("X2", "X2"),
    ],
)
def test_equal_answers_are_spelled_equally(answer: str, plain: str) -> None:
    assert normalise_answer(answer) == plain


@pytest.mark.parametrize(("plain", "integer"), [("12", True), ("-3", True), ("+3", True), ("1.0", False), ("", False)])
def test_an_integer_is_digits_with_a_sign(plain: str, integer: bool) -> None:
    assert is_integer(plain) is integer


@pytest.mark.parametrize(
    ("text", "balanced"),
    [
        ("", True),
        ("\\frac{1}{2}", True),
        ("{{}}", True),
        ("{", False),
        ("}", False),
        ("}{", False),
        ("\\{", True),  # an escaped brace is a character
        ("\\boxed{1}", True),
        ("\\boxed{1", False),
        ("{\\boxed {1}", False),
    ],
)
def test_every_brace_has_its_partner(text: str, balanced: bool) -> None:
    assert is_balanced(text) is balanced


@pytest.mark.parametrize(
    ("text", "mathematical"),
    [
        ("7", True),
        ("x", True),
        ("X", True),
        ("x+yz", True),
        ("word", False),
        ("WORD", False),
        ("abc", False),
        ("???", False),
        ("\\frac{1}{2}", True),
        ("\\Gamma(2)", True),
        ("\\pi", False),  # a command alone is neither a digit nor a letter
        ("\\text{metres}", False),
        ("5\\text{metres}", True),
        ("5\\mathrm{km}", True),
        ("5\\mbox{miles}", True),
        ("5\\sqrt{miles}", False),
    ],
)
def test_words_are_not_mathematics(text: str, mathematical: bool) -> None:
    assert looks_mathematical(text) is mathematical
