"""Drafts looked up in earlier answers to the same prompt: vLLM's proposer of `draft.method: history`.

In RL a prompt is answered by the rollouts of its group side by side, and again in later epochs. A rollout's draft is
what most often followed the longest match of its last tokens in the answers to its prompt: those of before, those that
are being generated, and its own.

Answers are indexed by the `match_max` tokens before each of their tokens, nearest first, as bytes in a sorted list. All
places with the same last n tokens are neighbours there, for every n, so two bisections find them. Only prompts with
running rollouts have an index; the answers of the others take 4 bytes a token.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

HISTORY = "history"
"""Name of the method in settings of speculation; vLLM has a custom class instead."""

_SETTINGS = ("match_min", "match_max", "max_tokens")  # of the history, among vLLM's settings of speculation

_INT = "i"
_WIDTH = array(_INT).itemsize
_BEFORE = -2  # stands for the tokens before a prompt's first, which are alike in all answers
_LAST = b"\xff" * _WIDTH  # sorts behind the bytes of any token and of `_BEFORE`

Place = tuple[int, int]  # number of an answer, and offset of a token in it; later places are larger


class Answers:
    """Answers to one prompt, and their index while rollouts of the prompt run."""

    def __init__(
        self, prompt: Sequence[int], answers: Iterable[array[int]] = (), /, *, match_min: int, match_max: int
    ) -> None:
        self._match_min, self._match_max = match_min, match_max
        last = list(prompt[-match_max:])
        self._prompt = array(_INT, [_BEFORE] * (match_max - len(last)) + last)
        self.tokens = list(answers)  # of each answer; those that run may not be whole
        self._places: dict[bytes, list[Place]] = {}  # by the tokens before them
        self._contexts: list[bytes] = []  # keys of `_places`, sorted
        self.num_running = 0

    def begin(self) -> int:
        """Begin an answer and return its number; the first one that runs makes the index."""
        if not self.num_running:
            for number in range(len(self.tokens)):
                self._index(number, 0)
            self._contexts = sorted(self._places)
        self.num_running += 1
        self.tokens.append(array(_INT))
        return len(self.tokens) - 1

    def extend(self, number: int, tokens: Iterable[int]) -> None:
        """Add tokens to an answer that runs."""
        start = len(self.tokens[number])
        self.tokens[number].extend(tokens)
        for context in self._index(number, start):
            insort(self._contexts, context)

    def end(self, number: int) -> int:
        """End an answer and return its number of tokens; the index goes with the last one that ran."""
        self.num_running -= 1
        if not self.num_running:
            self._places, self._contexts = {}, []
        return len(self.tokens[number])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(map(len, self.tokens))

    def continuation(self, number: int, num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens that most often followed the longest match of an answer's last tokens.

        Each token is the most frequent one at the places that agree with the tokens before it. Of equally frequent ones
        it is that of the latest place.
        """
        context, contexts = self._before(number, len(self.tokens[number])), self._contexts
        for length in range(self._match_max, self._match_min - 1, -1):
            match = context[: length * _WIDTH]
            low = bisect_left(contexts, match)
            if low < len(contexts) and contexts[low].startswith(match):
                high = bisect_left(contexts, match + _LAST, low)
                places = chain.from_iterable(map(self._places.__getitem__, contexts[low:high]))
                return self._most_frequent(places, num_tokens)
        return []

    def _most_frequent(self, places: Iterable[Place], num_tokens: int) -> list[int]:
        found: list[int] = []
        agreeing = list(places)
        while len(found) < num_tokens:
            by_token: dict[int, list[Place]] = {}
            for number, offset in agreeing:
                following = self.tokens[number][offset + len(found) : offset + len(found) + 1]
                for token in following:  # none at the answer's end
                    by_token.setdefault(token, []).append((number, offset))
            if not by_token:
                break
            found.append(max(by_token, key=lambda token: (len(by_token[token]), max(by_token[token]))))
            agreeing = by_token[found[-1]]
        return found

    def _index(self, number: int, start: int) -> list[bytes]:
        """Note the places of an answer from `start` on; returns the new keys, which are not in `_contexts`."""
        answer, new = self.tokens[number], []
        behind = self._before(number, len(answer), len(answer) - start)
        for offset in range(start, len(answer)):
            skipped = (len(answer) - offset) * _WIDTH
            context = behind[skipped : skipped + self._match_max * _WIDTH]
            if context not in self._places:
                self._places[context] = []
                new.append(context)
            self._places[context].append((number, offset))
        return new

    def _before(self, number: int, offset: int, num_more: int = 0) -> bytes:
        """Return the bytes of the `match_max + num_more` tokens before a place, nearest first."""
        num = self._match_max + num_more
        tokens = self.tokens[number][max(0, offset - num) : offset]
        if len(tokens) < num:
            tokens = self._prompt[len(tokens) - num :] + tokens
        tokens.reverse()
        return tokens.tobytes()


class History:
    """Answers by prompt, of which at most about `max_tokens` tokens are kept: least recently used prompts go first.

    Prompts with running rollouts are kept in any case.
    """

    def __init__(self, *, match_min: int, match_max: int, max_tokens: int) -> None:
        self._matches = {"match_min": match_min, "match_max": match_max}
        self._max_tokens = max_tokens
        self._prompts: OrderedDict[tuple[int, ...], Answers] = OrderedDict()
        self._num_tokens = 0  # of answers that do not run

    def begin(self, prompt: tuple[int, ...]) -> Running:
        """Begin an answer."""
        answers = self._prompts.setdefault(prompt, Answers(prompt, (), **self._matches))
        self._prompts.move_to_end(prompt)
        return Running(answers=answers, number=answers.begin(), num_seen=len(prompt))

    def end(self, running: Running) -> None:
        """End an answer, and forget prompts that are beyond the bound."""
        self._num_tokens += running.answers.end(running.number)
        self._forget()

    def to_bytes(self) -> bytes:
        """Serialize all prompts with their answers, as far as those are known, the least recently used prompt first."""
        flat = array(_INT)
        for prompt, answers in self._prompts.items():
            flat.extend((len(prompt), len(answers.tokens), *map(len, answers.tokens), *prompt))
            for answer in answers.tokens:
                flat.extend(answer)
        return flat.tobytes()

    def read(self, data: bytes) -> None:
        """Take over what `to_bytes` returned, unless there are answers already, which are newer."""
        flat = iter(() if self._prompts else array(_INT, data))
        for num_prompt, num_answers in zip(flat, flat):  # noqa: B905  # one iterator, taken from in turn
            lengths = tuple(islice(flat, num_answers))
            prompt = tuple(islice(flat, num_prompt))
            answers = [array(_INT, islice(flat, length)) for length in lengths]
            self._prompts[prompt] = Answers(prompt, answers, **self._matches)
            self._num_tokens += sum(lengths)
        self._forget()

    def _forget(self) -> None:
        for prompt, answers in list(self._prompts.items()):
            if self._num_tokens <= self._max_tokens:
                return
            if not answers.num_running:
                self._num_tokens -= answers.num_tokens
                del self._prompts[prompt]


@dataclass(slots=True)
class Running:
    """An answer that runs."""

    answers: Answers
    number: int
    num_seen: int  # tokens of its sequence that were looked at, with the prompt's
    is_over: bool = False  # True after a stop token


def history_settings(speculative_config: dict[str, Any] | None) -> dict[str, int] | None:
    """Return the arguments of `History` among the settings of speculation; None for another method."""
    if speculative_config is None or speculative_config["method"] != HISTORY:
        return None
    return {name: speculative_config[name] for name in _SETTINGS}


def told_vllm(speculative_config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of speculation as vLLM gets them for `HistoryProposer`."""
    own = {name: value for name, value in speculative_config.items() if name not in _SETTINGS}
    return {**own, "method": "custom_class", "model": f"{__name__}.{HistoryProposer.__name__}"}


class HistoryProposer:
    """Proposer of vLLM's first model runner, its `custom_class`; its drafts are certain, as those of n-grams are.

    Each rank of a tensor-parallel engine sees the same tokens and has a history of its own.

    Source: vLLM 0.32, `v1/spec_decode/custom_class_proposer.py` and `v1/worker/gpu_model_runner.py`.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._running: dict[str, Running] = {}  # by vLLM's request id

    def load_model(self, model: Any) -> None:
        """Load nothing; vLLM calls it for every proposer."""

    def start(self, runner: Any, history: History, stop_token_ids: Collection[int]) -> None:
        """Set the history, and vLLM's model runner, whose batch says which prompt a row answers."""
        self._running.clear()
        self._runner, self.history, self._stop_token_ids = runner, history, frozenset(stop_token_ids)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Propose tokens for each row of the batch; none without a match, and none while its prompt is being computed.

        Args:
            sampled_token_ids: tokens of this step by row.
            num_tokens_no_spec: [rows], tokens of each sequence, this step's included.
            token_ids_cpu: [rows, positions], the sequences.
        """
        del slot_mappings
        for name in self._running.keys() - self._runner.requests.keys():
            self.history.end(self._running.pop(name))
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        for row in rows:  # all of them first, so that no draft depends on the order of the rows
            self._note(row, token_ids_cpu[row, : num_tokens_no_spec[row]])
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row in rows:
            running = self._running[self._runner.input_batch.req_ids[row]]
            room = min(self._num_speculative_tokens, self._max_model_len - running.num_seen - 1)
            if not running.is_over and room > 0:
                drafts[row] = running.answers.continuation(running.number, room)
        return drafts

    def _note(self, row: int, sequence: Any) -> None:
        """Add the new tokens of a row to its answer, up to a stop token."""
        batch = self._runner.input_batch
        name = batch.req_ids[row]
        if name not in self._running:
            self._running[name] = self.history.begin(tuple(sequence[: batch.num_prompt_tokens[row]].tolist()))
        running = self._running[name]
        new = sequence[running.num_seen :].tolist()
        running.num_seen = len(sequence)
        stop = next((i for i, token in enumerate(new) if token in self._stop_token_ids), None)
        if not running.is_over:
            running.answers.extend(running.number, new if stop is None else new[: stop + 1])
        running.is_over |= stop is not None
