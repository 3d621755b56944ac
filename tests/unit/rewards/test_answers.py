"""What counts as the answer of a response, and which answers are spelled equally."""

from __future__ import annotations

import pytest

from slipstream.rewards.answers import extract_answer, normalise_answer


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
    ],
)
def test_equal_answers_are_spelled_equally(answer: str, plain: str) -> None:
    assert normalise_answer(answer) == plain
