"""Scoring: what counts as the answer, what is equal, and that nothing a policy writes can hang or break it."""

import re
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from slipstream.rewards.config import RewardConfig
from slipstream.rewards.reward import RewardResult
from slipstream.rewards.verifier import Verifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with closing(Verifier(RewardConfig(timeout_s=30.0))) as verifier:
        yield verifier


def box(answer: str) -> str:
    return f"so it is \\boxed{{{answer}}}"


def test_rewards_keep_the_order_of_the_responses_and_a_response_says_whether_it_was_cut_off(verifier: Verifier) -> None:
    responses = [box("1"), box("\\frac{2}{4}"), "none", box("\\frac{2}{4}"), box("3")]
    assert verifier.score(responses, ["1", "0.5", "1", "0.25", "4"]).rewards == (1.0, 1.0, 0.0, 0.0, 0.0)
    assert verifier.score(["Answer: 42"] * 2, ["42"] * 2, cut_off=[True, False]).rewards == (0.0, 1.0)
    with pytest.raises(ValueError, match="zip"):
        verifier.score(["Answer: 42"] * 2, ["42"] * 2, cut_off=[True])


def test_a_million_characters_score_0_whatever_they_are(verifier: Verifier) -> None:
    texts = ["9" * 10**6, box("9" * 10**6), "\\boxed{" * 140_000, "{" * 10**6, "}" * 10**6, "Answer: " * 125_000]
    texts += ["Answer: " + sign * 10**6 for sign in ("*", "_*", "$", ".", " ", "\n", "=")]
    assert verifier.score(texts, ["9"] * len(texts)).rewards == (0.0,) * len(texts)


def test_plain_answers_need_no_worker() -> None:
    before = set(psutil.Process().children())
    with closing(Verifier(RewardConfig())) as verifier:
        assert verifier.score(["Answer: {x", "Answer: x"], ["x^2", "{x^2"]).rewards == (0.0, 0.0)
        responses = ["<think>\n12+7=19\n</think>\n" + box(str(i)) for i in range(64)]
        assert sum(verifier.score(responses, ["7"] * 64).rewards) == 1
        assert set(psutil.Process().children()) <= before


def test_a_sympy_bomb_is_killed_counted_and_scores_0_while_the_others_are_scored() -> None:
    with closing(Verifier(RewardConfig(timeout_s=1.0))) as verifier:
        verifier.score([box("\\log 8")], ["3\\log 2"])  # the start of a worker is not what is measured
        result = verifier.score([box("9^{9^{9^{9}}}"), box("7")], ["7", "7"])
        assert result == RewardResult(rewards=(0.0, 1.0), num_timeouts=1, num_crashes=0)


GRADABLE = r"""34 ;; -3 ;; 0 ;; \pi ;; 2\sqrt{3} ;; \frac{1}{2} ;; .0625 ;; 1e3 ;; 52_8 ;; 90^\circ ;; 50\% ;; (1,-2)
[0,\infty) ;; \{1,2\} ;; 1,-2 ;; B ;; x ;; k=3 ;; x\in[1,4] ;; \cot{x} ;; 6-5i ;; 1\pm\sqrt{7} ;; (0,1)\cup(2,3)
\frac{7}4\text{degrees} ;; \$12.40 ;; 11,\!080 ;; \text{(B)} ;; \text{Ada} ;; \text{odd} ;; 3 \frac{1}{2}
12 \mbox{ m}^2 ;; 2x - 3y + 1 = 0 ;; \begin{pmatrix} 1/3 \\ -2 \end{pmatrix}"""
GRADABLE = re.split(" ;; |\n", GRADABLE)
NOT_GRADABLE = r"no answer ;; ??? ;; six ;; it depends on x ;; \frac{1 ;; }{ ;; 2+2=5 ;; nan ;; \text{} ;; \sqrt{2}=1.5"
NOT_GRADABLE = [*NOT_GRADABLE.split(" ;; "), "", " ", "9" * 5000]


def test_a_reference_is_gradable_if_it_scores_1_itself_and_another_of_its_kind_0(verifier: Verifier) -> None:
    assert [each for each, ok in zip(GRADABLE, verifier.gradable(GRADABLE), strict=True) if not ok] == []
    assert verifier.score([box(each) for each in GRADABLE], GRADABLE).rewards == (1.0,) * len(GRADABLE)
    others = [*GRADABLE[1:], GRADABLE[0]]
    assert verifier.score([box(each) for each in others], GRADABLE).rewards == (0.0,) * len(GRADABLE)


def test_what_no_response_could_be_scored_against_or_is_too_long_is_not_gradable(verifier: Verifier) -> None:
    assert verifier.gradable(NOT_GRADABLE) == (False,) * len(NOT_GRADABLE)
    longest, longer = "1" * 512, "0" + "1" * 512
    assert verifier.gradable([longest, longer]) == (True, False)
    answers = [box(longest), box(longer), box(longest)]
    assert verifier.score(answers, [longest, longest, longer]).rewards == (1.0, 0.0, 0.0)
