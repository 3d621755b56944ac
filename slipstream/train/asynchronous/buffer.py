"""Scored rollouts on their way from generation to training: the one buffer of an asynchronous loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.engine.protocol import GenerationResult
from slipstream.rewards.verifier import RewardResult
from slipstream.train.asynchronous.activity import Activity
from slipstream.train.asynchronous.meeting import Handover, Meeting
from slipstream.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """What comes out of the engines at once: a whole batch, or one group."""

    index: int  # of the batch, or of the group, over the whole training
    result: GenerationResult
    ended_s: float  # on this process's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The same with a reward for each rollout."""

    generated: Generated
    rewards: RewardResult

    @property
    def index(self) -> int:
        """Of the batch, or of the group."""
        return self.generated.index

    @property
    def num_groups(self) -> int:
        """How much of the buffer it takes."""
        return len(self.generated.result.groups)


class Buffer:
    """Scored groups that nobody has trained on yet, in the order in which they came.

    The lag bounds it: no more than `max_groups` can be under way at once, so that a put that finds it full is a
    mistake, and nobody has to wait for room.
    """

    def __init__(self, meeting: Meeting, *, max_groups: int, waiting: Sequence[Scored] = ()) -> None:
        """Begin with what is `waiting`."""
        self._meeting = meeting
        self._max_groups = max_groups
        self._waiting = list(waiting)

    @property
    def waiting(self) -> tuple[Scored, ...]:
        """All of them; for what runs under the meeting's lock."""
        return tuple(self._waiting)

    def put(self, scored: Scored) -> None:
        """Add something. Raises `Over`."""

        def add() -> None:
            self._waiting.append(scored)
            num_groups = sum(each.num_groups for each in self._waiting)
            assert num_groups <= self._max_groups, f"{num_groups} groups in a buffer of {self._max_groups}"

        self._meeting.change(add)

    def take(self, choose: Callable[[Sequence[Scored]], Sequence[Scored] | None]) -> list[Scored]:
        """Take out what `choose` picks of those that wait, once it picks anything. Raises `Over`."""

        def picked() -> list[Scored] | None:
            chosen = choose(tuple(self._waiting))
            if chosen is None:
                return None
            taken = {each.index for each in chosen}
            self._waiting = [each for each in self._waiting if each.index not in taken]
            return list(chosen)

        return self._meeting.wait(picked)

    def wait_for(self, count: int) -> tuple[Scored, ...]:
        """All that wait, once they are at least so many; they stay. Raises `Over`."""
        return self._meeting.wait(lambda: (tuple(self._waiting),) if len(self._waiting) >= count else None)[0]


def score_all(
    generated: Handover[Generated],
    buffer: Buffer,
    score: Callable[[Sequence[RolloutGroup]], RewardResult],
    activity: Activity,
) -> None:
    """The loop that scores. Consumes what `produce` generated and puts it, with its rewards, into the buffer.

    Waits for: something that was generated. Unblocked by: `produce`, or the end of the training.
    """
    while True:
        each = generated.take()
        with activity.busy():
            rewards = score(each.result.groups)
        buffer.put(Scored(generated=each, rewards=rewards))
