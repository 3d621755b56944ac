"""Times of an asynchronous loop's step: when each part worked, what training waited for, and what was hidden."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from slipstream.records.steps import Overlap
from slipstream.train.metrics import StageClock
from slipstream.train.pending import Scored

T = TypeVar("T")
Span = tuple[float, float]  # from and to, in seconds of one clock


class Activity:
    """Spans in which one part of the training worked. One thread works; another may ask meanwhile."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._since: float | None = None
        self._rest_s = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The block is work."""
        with self._lock:
            self._since = self._now_s()
        try:
            yield
        finally:
            with self._lock:
                assert self._since is not None
                self._spans.append((self._since, self._now_s()))
                self._since = None

    def rested(self, seconds: float) -> None:
        """Note that so much of the last work was none, for one of several engines had nothing to do."""
        with self._lock:
            self._rest_s += seconds

    def take_rest(self) -> float:
        """Seconds that were `rested` since the last call of this."""
        with self._lock:
            rest_s, self._rest_s = self._rest_s, 0.0
        return rest_s

    def between(self, start_s: float, end_s: float) -> list[Span]:
        """The work between two times, that which goes on included."""
        with self._lock:
            going_on = [] if self._since is None else [(self._since, self._now_s())]
            found = [_cut(span, start_s, end_s) for span in (*self._spans, *going_on)]
        return [span for span in found if span[1] > span[0]]

    def forget(self, end_s: float) -> None:
        """Drop what lies before this time."""
        with self._lock:
            self._spans = [span for span in self._spans if span[1] > end_s]


def total_s(spans: Sequence[Span]) -> float:
    """Their lengths together."""
    return sum(end - start for start, end in spans)


def common_s(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """How long both went on at once."""
    cuts = [_cut(span, *other) for span in spans for other in others]
    return sum(max(0.0, end - start) for start, end in cuts)


def _cut(span: Span, start_s: float, end_s: float) -> Span:
    return max(span[0], start_s), min(span[1], end_s)


class Stopwatch:
    """The work of engines, scorer and learner, and the trainer's waits; `overlap` gives a step's and starts the next.

    Publishing weights has a learner's part (`exporting`) and an engines' part (`delivery`), and so costs training time
    in two ways, which `waited` tells from the time that rollouts take to be generated. Once the rollouts of a step are
    there, what is left of the learner's part is a wait. And while training waits for rollouts, it waits for the
    engines' part too, which came before them: without it they would have been there that much sooner.

    All but the activities is called by the trainer alone, which counts rollouts into `num_awaited`, `num_restarted` and
    `num_regenerated`.
    """

    def __init__(self, *, num_regenerated: int = 0, now_s: Callable[[], float] = time.perf_counter) -> None:
        """Begin; `num_regenerated` rollouts are made again, for they were lost with a process."""
        self.engine, self.learner, self.score = Activity(now_s), Activity(now_s), Activity(now_s)
        self.delivery = Activity(now_s)
        self._now_s = now_s
        self._since_s = now_s()
        self._accounted_s = self._since_s  # what was delivered until then is accounted for
        self._export: Span | None = None  # of the step, until its rollouts are there
        self._export_s = self._exposed_publish_s = self._exposed_score_s = 0.0
        self.num_regenerated = num_regenerated
        self.num_awaited = self.num_restarted = 0

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """The block does the learner's part, as the first thing in a step."""
        start_s = self._now_s()
        yield
        self._export = start_s, self._now_s()
        self._export_s += total_s([self._export])

    def waited(self, clock: StageClock, wait: Callable[[], Sequence[Scored]]) -> Sequence[Scored]:
        """What the trainer waits for; with it the step's export, if there was one just before, is divided into stages.

        It counts as generation until the engines had the rollouts, but for what publication held those up, and as data
        afterwards, for they were scored; publication is `prepare`. What was there already costs nothing.
        """
        now_s = self._now_s()
        export = self._export or (now_s, now_s)
        self._export = None
        start_s, exported_s = export
        scored = wait()
        end_s = self._now_s()
        generated_s = min(max((each.generated_s for each in scored), default=start_s), end_s)
        waited_s = max(0.0, generated_s - start_s)
        held_up_s = min(waited_s, self._publishing_s(export, generated_s)) if waited_s else 0.0
        exposed_s = held_up_s + max(0.0, exported_s - max(start_s, generated_s))
        score_s = end_s - max(exported_s, generated_s)
        clock.add("prepare", exposed_s)
        clock.add("generation", waited_s - held_up_s)
        clock.add("data", score_s)
        self._exposed_publish_s += exposed_s
        self._exposed_score_s += score_s
        self._accounted_s = max(generated_s, self._accounted_s)
        return scored

    def delivered(self, clock: StageClock, wait: Callable[[], T]) -> T:
        """What the trainer waits for until the engines have its weights: `prepare`, but while they still generated."""
        start_s = self._now_s()
        found = wait()
        waited = start_s, self._now_s()
        generation_s = common_s([waited], self.engine.between(*waited))
        exposed_s = max(0.0, total_s([waited]) - generation_s)
        clock.add("generation", generation_s)
        clock.add("prepare", exposed_s)
        self._exposed_publish_s += exposed_s
        self._accounted_s = waited[1]
        return found

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
            exposed_score_s=self._exposed_score_s,
            publish_s=self._export_s + total_s(self.delivery.between(start_s, end_s)),
            exposed_publish_s=self._exposed_publish_s,
            num_awaited=self.num_awaited,
            num_restarted=self.num_restarted,
            num_regenerated=self.num_regenerated,
        )
        for each in (self.engine, self.learner, self.score):
            each.forget(end_s)
        self.delivery.forget(self._accounted_s)
        self._since_s = end_s
        self._export_s = self._exposed_publish_s = self._exposed_score_s = 0.0
        self.num_awaited = self.num_regenerated = self.num_restarted = 0
        return found

    def _publishing_s(self, export: Span, end_s: float) -> float:
        """How long engines took weights, or stood still while the learner wrote them, since the rollouts before."""
        delivery = self.delivery.between(self._accounted_s, end_s)
        written = max(export[0], self._accounted_s), min(export[1], end_s)
        if written[1] <= written[0]:
            return total_s(delivery)
        busy_s = common_s([written], [*delivery, *self.engine.between(*written)])
        return total_s(delivery) + max(0.0, total_s([written]) - busy_s)
