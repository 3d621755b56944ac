"""What is drawn for the certificate, on an engine that records what it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Trace
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.sampling import Sample, draw, lengths_by_position, positions
from slipstream.types import Prompt
from tests.unit.sampled import trace

SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, max_response_tokens=20)
PROMPTS = [Prompt(id=str(i), text="", token_ids=(i,), answer="") for i in range(5)]
CONFIG = LosslessnessConfig(num_tokens=10, num_repeated_prompts=2, num_repeats=3, num_greedy_prompts=4)


class Engine:
    """Answers every prompt with two tokens, the second of them the number of the call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], SamplingConfig, int, int]] = []

    def trace(self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int) -> list[Trace]:
        self.calls.append(([prompt.id for prompt in prompts], sampling, group_size, seed))
        return [trace(prompt.token_ids, (9, len(self.calls))) for prompt in prompts for _ in range(group_size)]


def drawn(engine: Engine, *, num_tokens: int = 10, batch: int = 3, **how: Any) -> Sample:
    """What is drawn of the engine for so many tokens in responses of two."""
    config = replace(CONFIG, num_tokens=num_tokens)
    return draw(engine, how.pop("prompts", PROMPTS), config=config, sampling=SAMPLING, batch=batch, seed=7, **how)


def test_an_engine_is_asked_for_batches_until_the_tokens_suffice_then_for_pairs_and_greedy_responses() -> None:
    engine, told = Engine(), list[int]()
    sample = drawn(engine, on_drawn=told.append)
    assert told == [6, 4]
    # Two tokens a response, three responses a batch: the second batch takes the next prompts, and two of them suffice.
    greedy = replace(SAMPLING, temperature=0.0, top_p=1.0, top_k=0)
    assert engine.calls == [
        (["0", "1", "2"], SAMPLING, 1, 8),
        (["3", "4", "0"], SAMPLING, 1, 9),
        (["0", "1"], replace(SAMPLING, max_response_tokens=2), 3, 7),
        (["0", "1", "2", "3"], greedy, 1, 7),
    ]
    assert sample.num_tokens == 10
    assert [trace.token_ids[1] for trace in sample.traces] == [1, 1, 1, 2, 2]
    assert [trace.prompt_token_ids for trace in sample.traces] == [(0,), (1,), (2,), (3,), (4,)]
    assert [[trace.prompt_token_ids for trace in traces] for traces in sample.repeats] == [[(0,)] * 3, [(1,)] * 3]
    assert [trace.token_ids[1] for trace in sample.greedy] == [4] * 4


def test_as_many_tokens_as_asked_for_are_enough_and_a_response_is_taken_as_a_whole() -> None:
    for num_tokens, seeds, num_taken in ((3, [8], 4), (12, [8, 9], 12), (13, [8, 9, 10], 14)):
        engine = Engine()
        assert drawn(engine, num_tokens=num_tokens).num_tokens == num_taken
        assert [seed for _, _, _, seed in engine.calls[:-2]] == seeds


class Silent(Engine):
    def trace(self, prompts: Sequence[Prompt], **how: Any) -> list[Trace]:
        return [replace(trace, token_ids=(), window_lengths=()) for trace in super().trace(prompts, **how)]


def test_an_engine_that_answers_nothing_is_asked_no_more_often_than_tokens_are_wanted() -> None:
    engine = Silent()
    assert drawn(engine, batch=1).num_tokens == 0
    assert len(engine.calls) == 10 + 2


def test_an_engine_that_is_refitted_while_it_draws_gives_the_long_responses_alone() -> None:
    engine, refitted = Engine(), Engine()
    drawn(engine, batch=5, across=refitted.trace)
    assert refitted.calls == [(["0", "1", "2", "3", "4"], SAMPLING, 1, 8)]
    assert [group_size for _, _, group_size, _ in engine.calls] == [3, 1]


def test_nothing_is_drawn_without_prompts() -> None:
    with pytest.raises(ConfigError, match="losslessness must have prompts, got 0"):
        drawn(Engine(), prompts=[])
    assert drawn(Engine(), prompts=PROMPTS[:1]).num_tokens == 10


def test_positions_count_from_one_in_each_window_after_the_prefill() -> None:
    assert positions(trace((1,), (5, 6, 7, 8, 9), (1, 3, 1))) == [0, 1, 2, 3, 1]


def test_lengths_by_position_are_of_whole_windows_by_where_they_begin() -> None:
    """Windows begin at 61, 62 | 66 of one rollout and at 128 | 131, 135 of the other; their ends are cut."""
    lengths = ((61, (1, 4, 2)), (127, (1, 3, 4, 1)))
    traces = [trace((0,) * prompt, (0,) * sum(windows), windows) for prompt, windows in lengths]
    assert lengths_by_position(traces) == {"0-63": 4.0, "128-255": 3.5}
    assert lengths_by_position([]) == {}
