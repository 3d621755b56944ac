"""What counts as the answer of a response."""

from __future__ import annotations

import pytest

from slipstream.rewards.answers import extract_answer


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
