"""Extraction of a response's answer."""

import pytest

from slipstream.rewards.answers import extract_answer, opens_thought

BOXED = {
    "\\boxed{1} then \\boxed{2}": "2",
    "\\boxed{\\frac{1}{\\sqrt{2}}}": "\\frac{1}{\\sqrt{2}}",
    "\\boxed{1+\\boxed{2}}": "1+\\boxed{2}",
    "\\boxed{\\{1,2\\}}": "\\{1,2\\}",
    "\\boxed{4} and a box cut off \\boxed{5": "4",
    "\\boxed{4} and \\boxed": "4",
    "\\boxed \\frac{1}{2}$": "\\frac{1}{2}",
    **{"\\boxed {7}": "7", "a set {1, \\boxed{3}": "3", "\\boxed{ 6 }": "6", "a } b \\boxed{6}": "6"},
    **{"\\boxed{a{b}c}": "a{b}c", "\\fbox{5}": "5", "\\boxed 5": "5", "so $\\boxed 5$.": "5", "\\boxed-5": "-5"},
    **{"\\bo\u200bxed{1\u20602}": "12", "\\boxed{\\fbox{5}}": "\\fbox{5}", "\\boxed{2+2=4}": "2+2=4"},
    **{"\\boxed{x=5}": "x=5", "\\boxed{3}\nAnswer: 4": "3"},
}
SAID = {
    **{"text\nAnswer: $12$.\n": "12", "Answer: 1\nthe final answer: 2": "2", "ANSWER :\t$$.5$": ".5"},
    **{"Answer: $x.$": "x", "Answer: 2X": "2X", "Answer: X2": "X2", "Answer: **73**": "73", "**Answer:** 73": "73"},
    **{"**Answer**: 73": "73", "**Answer: 73**": "73", "*Answer:* `73`": "73", "### Answer:\n\n**73**": "73"},
    **{"The final answer is: 73.": "73", "Answer\N{FULLWIDTH COLON}73": "73", "Answer: 1\u200b2": "12"},
    "Final Answer: **73** apples": "73 apples",
}
AFTER_THOUGHTS = {
    "<think>\\boxed{1}</think>\\boxed{2}": "2",
    "\\boxed{1}</think>\\boxed{2}": "2",
    "<think>a</think>\\boxed{1}</think>\\boxed{2}": "2",
    "<think>a</think>\\boxed{1}<think>\\boxed{2}": "1",
}
NOTHING = [
    *("no answer at all", "Answer: $", "Answer: 2+2=5", "<think>\\boxed{1} and cut off", "\\boxed{2+2=5=34}"),
    *(
        "a</think><think>\\boxed{1}",
        "<think>\\boxed{1}</think>I do not know",
        "a</think>\\boxed{1}</think>I do not know",
    ),
    *("\\boxed{}", "\\boxedx{4}", "\\boxed72}", "\\boxed+{56}", "\\boxed\n97"),
]


@pytest.mark.parametrize(("response", "answer"), (BOXED | SAID | AFTER_THOUGHTS | dict.fromkeys(NOTHING)).items())
def test_the_answer_of_a_response(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 12", None),  # 123 may have been meant
        *(("Answer: 7\nAnswer: 12", "7"), ("Answer: 12\n", "12"), ("\\boxed 12", None), ("\\boxed 12 ", "12")),
        *(("\\boxed{12}", "12"), ("\\boxed{12}? Let me", "12"), ("<think>\\boxed{12}", None)),
    ],
)
def test_an_answer_without_an_end_of_its_own_is_none_where_the_response_was_cut_off(
    response: str, answer: str | None
) -> None:
    assert extract_answer(response, is_cut_off=True) == answer


@pytest.mark.parametrize(
    ("prompt", "is_turn", "opens"),
    [
        ("assistant\n<think>\n", True, True),
        ("assistant\n<think>\nOkay, ", True, True),
        ("assistant\n<think>\n\n</think>\n\n", True, False),
        ("assistant\n", True, False),
        ("Reply with <think> first. assistant:", False, False),
        ("Reply with <think> first. assistant: <think>\n", False, True),
    ],
)
def test_a_prompt_opens_a_thought_in_the_turn_of_the_policy_alone(prompt: str, is_turn: bool, opens: bool) -> None:
    assert opens_thought(prompt, is_turn=is_turn) is opens
