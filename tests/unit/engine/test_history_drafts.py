"""History of answers by prompt: what follows the longest match, what is forgotten, what the proposer makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.history_drafts import Answers, History, HistoryProposer, told_vllm

STOP = 9
MATCHES = {"match_min": 2, "match_max": 3}
TOKENS = st.lists(st.integers(0, 2), max_size=12)


def draft(prompt: Sequence[int], earlier: Sequence[Sequence[int]], answer: Sequence[int], k: int) -> list[int]:
    answers = Answers(prompt, **MATCHES)
    for each in earlier:
        number = answers.begin()
        answers.extend(number, each)
        answers.end(number)
    number = answers.begin()
    answers.extend(number, answer)
    return answers.continuation(number, k)


def by_brute_force(prompt: Sequence[int], earlier: Sequence[Sequence[int]], answer: Sequence[int], k: int) -> list[int]:
    """Look at every place of every answer, for every length of a match; all sequences begin alike."""
    prompt = [-2] * MATCHES["match_max"] + list(prompt)
    answers, sequence = [*earlier, answer], [*prompt, *answer]
    for length in range(MATCHES["match_max"], MATCHES["match_min"] - 1, -1):
        places = [
            (number, offset)
            for number, each in enumerate(answers)
            for offset in range(len(each))
            if [*prompt, *each][len(prompt) + offset - length : len(prompt) + offset] == sequence[-length:]
        ]
        if not places:
            continue
        found: list[int] = []
        while len(found) < k:
            following = {
                (number, offset): answers[number][offset + len(found)]
                for number, offset in places
                if offset + len(found) < len(answers[number])
            }
            if not following:
                break
            tokens = list(following.values())
            best = max(
                set(tokens), key=lambda token: (tokens.count(token), max(p for p in following if following[p] == token))
            )
            found.append(best)
            places = [place for place, token in following.items() if token == best]
        return found
    return []


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    earlier=st.lists(TOKENS, max_size=4),
    answer=TOKENS,
    k=st.integers(1, 5),
)
def test_it_finds_what_a_search_finds(prompt: list[int], earlier: list[list[int]], answer: list[int], k: int) -> None:
    assert draft(prompt, earlier, answer, k) == by_brute_force(prompt, earlier, answer, k)


def test_the_first_tokens_match_with_the_end_of_the_prompt() -> None:
    assert draft([3, 4, 5], [[7, 8, 9]], [], 2) == [7, 8]
    assert draft([5], [[7, 8, 9]], [7], 2) == [8, 9]
    assert draft([5], [[7, 8, 9]], [8], 2) == []  # one token is less than a match


def test_an_answer_matches_its_own_tokens_and_those_that_are_being_generated() -> None:
    answers = Answers([0], **MATCHES)
    one, other = answers.begin(), answers.begin()
    answers.extend(one, [1, 2, 3, 1, 2])
    assert answers.continuation(one, 2) == [3, 1]
    answers.extend(other, [1, 2])
    assert answers.continuation(other, 9) == [3, 1, 2]


def remembered(history: History) -> list[bool]:
    """Of prompts 1, 2 and 3."""
    return [history.begin((prompt,)).answers.num_tokens > 0 for prompt in (1, 2, 3)]


def told(history: History, prompt: int, num_tokens: int) -> None:
    running = history.begin((prompt,))
    running.answers.extend(running.number, [1] * num_tokens)
    history.end(running)


def test_the_prompts_used_least_recently_are_forgotten_first() -> None:
    history = History(**MATCHES, max_tokens=5)
    told(history, 1, 2)
    told(history, 2, 2)
    told(history, 1, 1)  # five tokens in all
    told(history, 3, 1)
    assert remembered(history) == [True, False, True]


def test_a_prompt_with_rollouts_is_kept_until_they_end() -> None:
    history = History(**MATCHES, max_tokens=2)
    running = history.begin((1,))
    running.answers.extend(running.number, [1, 2, 3])
    told(history, 1, 4)
    assert remembered(history) == [True, False, False]
    history = History(**MATCHES, max_tokens=2)
    told(history, 1, 3)
    assert not any(remembered(history))


@given(st.lists(st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=3)), max_size=4))
def test_a_history_is_read_as_it_was_written_and_never_over_another(answers: list[tuple[list[int], Any]]) -> None:
    written = History(**MATCHES, max_tokens=10**6)
    for prompt, each in answers:
        for tokens in each:
            running = written.begin(tuple(prompt))
            running.answers.extend(running.number, tokens)
            written.end(running)
    data = written.to_bytes()
    read = History(**MATCHES, max_tokens=10**6)
    read.read(data)
    assert read.to_bytes() == data
    for prompt, _ in answers:  # an index of what was read finds what one of what was seen finds
        found = []
        for history in (written, read):
            running = history.begin(tuple(prompt))
            running.answers.extend(running.number, [0, 1])
            found.append(running.answers.continuation(running.number, 3))
            history.end(running)
        assert found[0] == found[1]
    later = read.to_bytes()
    read.read(b"")
    read.read(data)
    assert read.to_bytes() == (later if answers else data)


def test_of_a_larger_history_the_prompts_used_last_are_read() -> None:
    written = History(**MATCHES, max_tokens=10)
    for prompt in (1, 2, 3):
        told(written, prompt, 2)
    read = History(**MATCHES, max_tokens=5)
    read.read(written.to_bytes())
    assert remembered(read) == [False, True, True]


class Batch:
    """Stands in for vLLM's model runner and drives a proposer; each row is a prompt and the answer so far."""

    def __init__(self, **settings: int) -> None:
        self.input_batch, self.requests = SimpleNamespace(req_ids=[], num_prompt_tokens=[]), dict[str, object]()
        sizes = {"num_speculative_tokens": 3} | settings
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=sizes["num_speculative_tokens"]),
            model_config=SimpleNamespace(max_model_len=settings.get("max_model_len", 32)),
        )
        self.proposer = HistoryProposer(config)
        self.proposer.load_model(None)
        self.proposer.start(self, History(**MATCHES, max_tokens=100), [STOP])

    def step(self, rows: dict[str, tuple[list[int], list[int]]], *, computing: Sequence[str] = ()) -> list[list[int]]:
        self.input_batch.req_ids = list(rows)
        self.input_batch.num_prompt_tokens = np.array([len(prompt) for prompt, _ in rows.values()])
        self.requests |= dict.fromkeys(rows)
        lengths = np.array([len(prompt) + len(answer) for prompt, answer in rows.values()])
        tokens = np.full((len(rows), 32), 77, dtype=np.int32)
        for row, (prompt, answer) in enumerate(rows.values()):
            tokens[row, : lengths[row]] = prompt + answer
        return self.proposer.propose([[] if name in computing else [1] for name in rows], lengths, tokens)


def test_a_later_rollout_is_proposed_the_answer_of_an_earlier_one_to_the_same_prompt_alone() -> None:
    batch = Batch()
    assert batch.step({"a": ([1, 2], [3])}) == [[]]
    assert batch.step({"a": ([1, 2], [3, 4, 5, 6])}) == [[]]
    del batch.requests["a"]
    rows = {"b": ([1, 2], [3]), "c": ([8, 2], [3]), "d": ([1, 2], [])}
    assert batch.step(rows, computing=["d"]) == [[4, 5, 6], [], []]
    rows = {"b": ([1, 2], [3, 4]), "d": ([1, 2], [3])}
    assert batch.step(rows) == [[5, 6], [4, 5, 6]]


def test_siblings_side_by_side_read_one_anothers_tokens_of_the_same_step_in_any_order() -> None:
    rows = {"a": ([1, 2], [3]), "b": ([1, 2], [3, 4, 5])}
    assert Batch().step(rows) == [[4, 5], []]
    assert Batch().step(dict(reversed(rows.items()))) == [[], [4, 5]]


def test_an_answer_ends_with_its_stop_token() -> None:
    batch = Batch()
    assert batch.step({"a": ([1, 2], [3, 4, STOP, 1, 2])}) == [[]]
    del batch.requests["a"]
    assert batch.step({"b": ([1, 2], [3])}) == [[4, STOP]]


def test_a_rollout_that_leaves_the_batch_for_a_while_counts_once() -> None:
    batch = Batch()
    batch.step({"a": ([1, 2], [3, 4, 4])})
    batch.step({"b": ([1, 2], [3, 5, 5])})  # more recent
    batch.step({"a": ([1, 2], [3, 4, 4, 4])})
    assert batch.step({"c": ([1, 2], [3])}) == [[5, 5]]


def test_drafts_end_before_the_longest_sequence_does_and_are_no_longer_than_the_engine_verifies() -> None:
    for settings in ({"max_model_len": 6}, {"num_speculative_tokens": 2}):
        batch = Batch(**settings)
        batch.step({"a": ([1, 2], [3, 4, 5, 6])})
        assert batch.step({"b": ([1, 2], [3])}) == [[4, 5]]
    batch = Batch(max_model_len=6)
    batch.step({"a": ([1, 2], [3, 4, 5, 6])})
    assert batch.step({"b": ([1, 2], [3, 4, 5])}) == [[]]


def test_vllm_is_told_of_the_proposer_and_not_of_its_settings() -> None:
    given = {"method": "history", "num_speculative_tokens": 2, "match_min": 1, "match_max": 2, "max_tokens": 3}
    assert told_vllm(given) == {
        "method": "custom_class",
        "model": "slipstream.engine.history_drafts.HistoryProposer",
        "num_speculative_tokens": 2,
    }
