"""What a verifier is handed of rollouts: their text, with the thought that their prompt has opened, and their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from slipstream.records.steps import StepRecord
from slipstream.rewards.config import RewardConfig
from slipstream.rewards.verifier import RewardResult, Verifier
from slipstream.train.arm import score
from slipstream.types import FinishReason, RolloutGroup
from tests.unit.train.asynchronous.world import (
    GROUP_SIZE,
    NUM_STEPS,
    PROMPTS,
    STREAM,
    FlightWorld,
    drawn,
    in_flight,
    one_step_off,
    synchronous,
)

GUESS = "so \\boxed{7}? Let me check"


def decode(prompt: Sequence[int], response: Sequence[int]) -> str:
    """A guess at the answer; the template has opened a thought in prompts of odd numbers."""
    assert response
    return "<think>" * (prompt[1] % 2) + GUESS


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(RewardConfig()) as verifier:
        yield verifier


class NotingVerifier(Verifier):
    """Notes what it was handed."""

    def __init__(self) -> None:
        super().__init__(RewardConfig())
        self.handed: list[tuple[list[str], list[str], list[bool]]] = []

    def score(
        self, responses: Sequence[str], references: Sequence[str], *, cut_off: Sequence[bool] = ()
    ) -> RewardResult:
        self.handed.append((list(responses), list(references), list(cut_off)))
        return super().score(responses, references, cut_off=cut_off)


def test_a_verifier_gets_each_rollouts_text_reference_and_whether_it_was_cut_off() -> None:
    groups = [drawn(prompt, "weights", "0", (0, None), 2) for prompt in PROMPTS[:2]]
    cut = replace(groups[1].rollouts[1], finish_reason=FinishReason.LENGTH)
    groups[1] = replace(groups[1], rollouts=(groups[1].rollouts[0], cut))
    noting = NotingVerifier()
    assert score(groups, noting, decode).rewards == (1.0, 1.0, 0.0, 0.0)
    texts = [GUESS, GUESS, "<think>" + GUESS, "<think>" + GUESS]
    assert noting.handed == [(texts, ["7"] * 4, [False, False, False, True])]


@dataclass
class ScoringWorld(FlightWorld):
    """It scores as an arm does, and notes prompts and rewards."""

    verifier: Verifier | None = None
    rewards: list[tuple[str, float]] = field(default_factory=list)

    def score(self, groups: Sequence[RolloutGroup]) -> RewardResult:
        assert self.verifier is not None
        result = score(groups, self.verifier, decode)
        prompts = [group.prompt.id for group in groups for _ in group.rollouts]
        self.rewards += zip(prompts, result.rewards, strict=True)
        return result


LOOPS: dict[str, Callable[[ScoringWorld], list[StepRecord]]] = {
    "synchronous": synchronous,
    "one step off": lambda world: one_step_off(world, 1),
    "in flight": lambda world: in_flight(world, 1),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_in_every_loop_a_guess_in_a_thought_that_the_prompt_opened_is_not_rewarded(
    verifier: Verifier, loop: str
) -> None:
    world = ScoringWorld(verifier=verifier)
    records = LOOPS[loop](world)
    trained = [prompt.id for step in range(NUM_STEPS) for prompt in STREAM.batch(step) for _ in range(GROUP_SIZE)]
    assert sorted(world.rewards) == sorted((prompt, float(int(prompt) % 2 == 0)) for prompt in trained)
    means = [record.reward_mean for record in records]
    assert sum(means) / NUM_STEPS == sum(int(prompt) % 2 == 0 for prompt in trained) / len(trained)
