"""An `in_flight` loop played through event by event: groups, slots, a trainer. It is what the closed form is held to.

Version v of the policy is its weights after v steps, P prompts a step. Groups under way or waiting to be trained on:

    submitted <= (version + lag + 1) P; with `Slots.GROUP` at most P x lag of them run at once.

Batch t takes P complete groups, and waits for every group that was started under version t - lag or before.
One engine stands for all; the sequences of a group run as soon as it does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.simulator import Array
from slipstream.simulator.rollout import Slots, Trace

_ALMOST_0_TOKENS = 1e-6


def step_starts(
    batches: Sequence[Array], seconds: Callable[[Trace], Array], *, lag: int, busy_s: float, slots: Slots
) -> Array:
    """When each step that `batches` allow begins to train, in seconds since the first groups were submitted.

    Args:
        batches: response tokens [P, G] of the groups in the order of their submission; the last `lag` only run beside.
        seconds: time of each span of a trace on the engine.
        busy_s: time of the trainer, a step.
    """
    play = _Play(batches=batches, seconds=seconds, lag=lag, busy_s=busy_s, slots=slots)
    while len(play.starts) < len(batches) - lag:
        play.submit()
        play.start_groups()
        if play.is_due():
            play.begin_training()
        else:
            play.advance()
    return np.array(play.starts)


@dataclass(kw_only=True, slots=True)
class _Sequence:
    group: int
    left: float  # tokens


@dataclass(kw_only=True, slots=True)
class _Play:
    batches: Sequence[Array]
    seconds: Callable[[Trace], Array]
    lag: int
    busy_s: float
    slots: Slots
    now_s: float = 0.0
    version: int = 0
    left_of_group: list[int] = field(default_factory=list)  # sequences that have not ended, of each submitted group
    unstarted: deque[int] = field(default_factory=deque)  # groups
    running: list[_Sequence] = field(default_factory=list)
    ends_training_s: float | None = None  # None: the trainer waits for its batch
    starts: list[float] = field(default_factory=list)

    @property
    def num_prompts(self) -> int:
        return len(self.batches[0])

    def submit(self) -> None:
        """Every group that the lag bound admits."""
        for index in range(len(self.left_of_group), (self.version + self.lag + 1) * self.num_prompts):
            self.left_of_group.append(len(self._lengths(index)))
            self.unstarted.append(index)

    def start_groups(self) -> None:
        """Groups as far as there are slots."""
        under_way = {sequence.group for sequence in self.running}
        cap = self.num_prompts * self.lag if self.slots is Slots.GROUP else len(self.left_of_group)
        while self.unstarted and len(under_way) < cap:
            index = self.unstarted.popleft()
            under_way.add(index)
            self.running += [_Sequence(group=index, left=length) for length in self._lengths(index).tolist()]

    def is_due(self) -> bool:
        """Whether the trainer waits, and its batch is there."""
        step = len(self.starts)
        complete = [left == 0 for left in self.left_of_group]
        # Groups of versions up to step - lag are all those that batches 0 to `step` can hold.
        must = (step + 1) * self.num_prompts if step >= self.lag else 0
        enough = sum(complete) >= (step + 1) * self.num_prompts
        return self.ends_training_s is None and enough and all(complete[:must])

    def begin_training(self) -> None:
        self.starts.append(self.now_s)
        self.ends_training_s = self.now_s + self.busy_s

    def advance(self) -> None:
        """To the end of the next sequence or of training, whichever is first."""
        tokens, span_s = self._next_end()
        until_s = self.ends_training_s
        if until_s is not None and until_s <= self.now_s + span_s:
            share = (until_s - self.now_s) / span_s if span_s > 0 and self.running else 0.0
            self._run(tokens * share)
            self.now_s, self.ends_training_s, self.version = until_s, None, self.version + 1
            return
        assert self.running, "the trainer waits for groups that nothing generates"
        self._run(tokens)
        self.now_s += span_s

    def _next_end(self) -> tuple[float, float]:
        """Tokens and seconds until a running sequence ends."""
        if not self.running:
            return 0.0, float("inf")
        tokens, batch = min(sequence.left for sequence in self.running), float(len(self.running))
        trace = Trace(tokens_S=np.array([tokens]), batch_S=np.array([batch]), context_S=np.zeros(1))
        return tokens, float(self.seconds(trace).sum())

    def _run(self, tokens: float) -> None:
        for sequence in self.running:
            sequence.left -= tokens
            if sequence.left <= _ALMOST_0_TOKENS:
                self.left_of_group[sequence.group] -= 1
        self.running = [sequence for sequence in self.running if sequence.left > _ALMOST_0_TOKENS]

    def _lengths(self, index: int) -> Array:
        return self.batches[index // self.num_prompts][index % self.num_prompts]
