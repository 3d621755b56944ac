"""Which answers are equal: a table of references and answers by kind, decided by hand."""

import random
import re
import time
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.rewards.config import RewardConfig
from slipstream.rewards.values import compare, is_falsehood
from slipstream.rewards.verifier import Verifier

PLAIN = {"thousands", "fractions", "mixed numbers", "small and large numbers", "matrices", "numerals", "dress"}


def read_table() -> Iterator[tuple[str, str, str, bool]]:
    """Kind, reference, answer, and whether it is right."""
    table = Path(__file__).with_name("answers.txt").read_text(encoding="utf-8")
    _, *kinds = re.split(r"^# ", table, flags=re.MULTILINE)
    for kind, *rows in (each.splitlines() for each in kinds):
        for row in rows:
            named = re.sub(r"\\N\{([^}]*)\}", lambda match: unicodedata.lookup(match[1]), row)
            match = re.fullmatch(r"(.*?)(?: => (.*?))?(?: != (.*))?", named)
            assert match is not None
            for answers, wanted in ((match[2], True), (match[3], False)):
                for answer in [] if answers is None else answers.split(" ;; "):
                    yield kind, match[1], answer, wanted


PAIRS = list(read_table())
KINDS = list(dict.fromkeys(kind for kind, *_ in PAIRS))


PIECES = r"""( ) [ ] { } 1 2 10 x y ab + - * / ^ _ = < , ; % ° . ! | e ± ² ½ π ₁ i 0 & ** √ ' " \{ \} \frac \sqrt \text{
\pi \$ \log \cup \in \, \\ \boxed{ \sin \pm \begin{pmatrix} \end{pmatrix} and million cm (a+b) 9^ (1,"""


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with closing(Verifier(RewardConfig(timeout_s=30.0))) as verifier:
        yield verifier


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_each_kind_are_equal_or_not_as_the_table_says(verifier: Verifier, kind: str) -> None:
    pairs = [(reference, answer, wanted) for of, reference, answer, wanted in PAIRS if of == kind]
    found = verifier.equal([(reference, answer) for reference, answer, _ in pairs])
    assert [pair for pair, verdict in zip(pairs, found, strict=True) if pair[2] is not verdict] == []


def test_the_order_of_a_pair_does_not_matter_where_values_decide() -> None:
    for _, reference, answer, _ in PAIRS:
        assert compare(reference, answer) == compare(answer, reference), (reference, answer)


def test_plain_arithmetic_words_and_units_are_decided_without_a_worker() -> None:
    assert len(PAIRS) > 800
    undecided = [kind for kind, reference, answer, _ in PAIRS if compare(reference, answer) is None]
    assert set(KINDS) > PLAIN
    assert PLAIN.isdisjoint(undecided)
    assert len(undecided) < 210


@pytest.mark.parametrize(
    ("answer", "false"),
    [
        *((each, True) for each in ("2+2=5=34", "2+2=5", "34=35", "x=5=6")),
        *((each, False) for each in ("2+2=4", "x=5", "x+y=5", "x^2-1=(x-1)(x+1)", "1/3=0.333", "5")),
        ("1 \\text{ m}=100 \\text{ cm}", False),
    ],
)
def test_a_chain_of_equations_of_which_one_does_not_hold_is_false(answer: str, false: bool) -> None:
    assert is_falsehood(answer) is false


def test_any_text_is_read_or_refused_in_short_time_and_never_raises() -> None:
    """Pieces that answers are made of, in any order, and each of them many times over."""
    pieces = [*PIECES.split(), " ", ", ", "(1, 2), ", "1 and "]
    rng = random.Random(0)
    texts = ["".join(rng.choice(pieces) for _ in range(rng.randrange(1, 25))) for _ in range(5000)]
    texts += [before + piece * (500 // len(piece)) for piece in pieces for before in ("", "1", "x=")]
    for text in texts:
        started_s = time.process_time()
        assert compare(text, text) in (True, False, None)
        assert time.process_time() - started_s < 2.0, text
