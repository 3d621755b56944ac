"""What a step of an asynchronous loop took: what training waited for, and what went on beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slipstream.records import Overlap
from slipstream.train.asynchronous.activity import Activity, common_s, total_s
from slipstream.train.asynchronous.buffer import Scored
from slipstream.train.metrics import StageClock


class Stopwatch:
    """The work of engines, scorer and learner, and the trainer's waits; `overlap` gives a step's and starts the next.

    All but the activities of others is called by the trainer alone, which counts rollouts into `num_restarted` and
    `num_regenerated`.
    """

    def __init__(self, *, num_regenerated: int = 0, now_s: Callable[[], float] = time.perf_counter) -> None:
        """Begin; `num_regenerated` rollouts are made again, for they were lost with a process."""
        self.engine, self.learner, self.score = Activity(now_s), Activity(now_s), Activity(now_s)
        self._now_s = now_s
        self._since_s = now_s()
        self._publish_s = 0.0
        self.num_regenerated, self.num_restarted = num_regenerated, 0

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """The block waits until the engines have new weights."""
        start_s = self._now_s()
        yield
        self._publish_s += self._now_s() - start_s

    def waited(self, clock: StageClock, wait: Callable[[], Sequence[Scored]]) -> Sequence[Scored]:
        """What the trainer waits for: counted as generation until the engines had it, then as data, for it was scored.

        Both are what is exposed of them: what was there already costs nothing.
        """
        start_s = self._now_s()
        scored = wait()
        end_s = self._now_s()
        generated_s = max((each.generated.ended_s for each in scored), default=start_s)
        split_s = min(max(generated_s, start_s), end_s)
        clock.add("generation", split_s - start_s)
        clock.add("data", end_s - split_s)
        return scored

    def generated_s(self) -> float:
        """How long the engines have worked since the last call of `overlap`."""
        return total_s(self.engine.between(self._since_s, self._now_s()))

    def overlap(self) -> Overlap:
        """What went on since the last call of this, or the beginning."""
        start_s, end_s = self._since_s, self._now_s()
        engine, learner, score = (each.between(start_s, end_s) for each in (self.engine, self.learner, self.score))
        elapsed_s = max(end_s - start_s, 1e-9)
        worked_s = max(0.0, total_s(engine) - self.engine.take_rest())
        found = Overlap(
            generation_s=total_s(engine),
            hidden_s=common_s(engine, learner),
            engine_idle_fraction=max(0.0, 1.0 - worked_s / elapsed_s),
            learner_idle_fraction=max(0.0, 1.0 - total_s(learner) / elapsed_s),
            score_s=total_s(score),
            publish_s=self._publish_s,
            num_restarted=self.num_restarted,
            num_regenerated=self.num_regenerated,
        )
        for each in (self.engine, self.learner, self.score):
            each.forget(end_s)
        self._since_s, self._publish_s = end_s, 0.0
        self.num_regenerated = self.num_restarted = 0
        return found
