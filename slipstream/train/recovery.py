"""Engines as the loops see them: lost engines are replaced, memory is shared with the learner, an autopilot drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from slipstream.drafts.length import PATIENCE_STEPS, Decision, constant, decide
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult, GroupRequest, Portion
from slipstream.records.steps import AutopilotStep, RefitCheck, ScheduleEntry
from slipstream.refit.gate import Export, RefitGate
from slipstream.types import Prompt
from slipstream.workers.calls import LostWorkerError, Worker
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.learners import RemoteLearner

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WeightsLostError(RuntimeError):
    """Replaced engines need weights that no process holds any more."""


class Autopilot:
    """Switch that turns drafting off where it measurably loses; `drafts.length` decides before each generation.

    A step's record holds its decision, so a resumed run continues from the `steps` so far.
    """

    def __init__(self, schedule: Sequence[ScheduleEntry], steps: Iterable[AutopilotStep | None] = ()) -> None:
        self._schedule = tuple(schedule)
        self._steps = [step for step in steps if step is not None]

    @property
    def schedule(self) -> tuple[ScheduleEntry, ...]:
        """Schedule of the next generation."""
        return self._schedule if decide(self._steps).speculates else constant(0)

    def noted(self, result: GenerationResult) -> GenerationResult:
        """Count a generation that drafted by `schedule`; a result without drafts gets no acceptance."""
        decision = decide(self._steps)
        num_tokens = sum(len(rollout.token_ids) for group in result.groups for rollout in group.rollouts)
        step = AutopilotStep(
            speculates=decision.speculates,
            is_probe=decision.is_probe,
            token_ms=1e3 * result.generation_s / num_tokens,
            has_switched=decision.has_switched,
        )
        if decision.has_switched:
            _announce(decision)
        self._steps.append(step)
        return replace(result, autopilot=step, acceptance=result.acceptance if decision.speculates else None)


@dataclass
class FaultTolerantEngines:
    """Engines and their refit gate as one: a loop sees no lost engine until more than `max_restarts` were lost.

    A lost engine is replaced and refitted, and the call is repeated. All engines sample a batch again, from the same
    seed and weights, so the step equals an undisturbed one. In flight the other engines continue, and each group of a
    lost engine is sampled again as a whole, from its seeds and the present weights. A lost rank of the learner is not
    recovered here, because its weights are gone.

    Where learner and engines share GPUs, a step has this order: the learner offloads its gradients and optimizer state,
    engines are refitted and generate, they sleep without their caches, the learner trains. Each wakes by itself when it
    is called. The learner offloads before the refit, not after: an engine that is lost in a refit restarts, and
    measures the free memory.
    """

    engines: RemoteEngine
    gate: RefitGate
    sampling: SamplingConfig
    max_restarts: int
    is_beside_training: bool = False  # the learner may hold other weights than the engines while these generate
    memory_sharer: RemoteLearner | None = None  # the learner, if it shares GPUs with the engines
    autopilot: Autopilot | None = None  # a generation that failed does not count
    _num_restarts: int = field(default=0, init=False)
    _num_reported: int = field(default=0, init=False)
    _num_regenerated: int = field(default=0, init=False)  # in flight, not reported in a portion yet
    _version: int = field(default=0, init=False)
    _draft_version: int | None = field(default=None, init=False)

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        """Refit all engines to the learner's present weights.

        Raises:
            LostWorkerError: more than `max_restarts` engines were lost, or a rank of the learner.
        """
        self._version, self._draft_version = version, draft_version
        return self._recovered(self._refit, is_refit=True)

    def export(self, version: int, *, draft_version: int | None) -> Export:
        """Do the learner's part of `refit`, in which no engine takes part."""
        self._offload_learner()
        return self.gate.export(version, draft_version=draft_version)

    def deliver(self, export: Export) -> RefitCheck:
        """Do the engines' part of `refit`, again with the same weights if an engine was lost; errors as in `refit`."""
        self._version, self._draft_version = export.version, export.draft_version
        return self._recovered(lambda: self.gate.deliver(export), is_refit=True)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample whole groups, as `Engines.generate` does; errors as in `refit`.

        Raises:
            WeightsLostError: an engine was replaced while the learner trained, and the channel keeps no weights.
        """
        num_asked = 0

        def generate() -> GenerationResult:
            nonlocal num_asked
            num_asked += 1
            if self.autopilot is not None:
                self.engines.draft_by(self.autopilot.schedule)
            found = self.engines.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)
            if self.memory_sharer is not None:
                self.engines.sleep()
            return found if self.autopilot is None else self.autopilot.noted(found)

        result = self._recovered(generate)
        num_regenerated = (num_asked - 1) * len(prompts) * group_size
        return replace(result, num_engine_restarts=self._new_restarts(), num_regenerated=num_regenerated)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let `generate` sample in this block with the weights that the engines hold, outside any step.

        Neither the autopilot nor the distribution of prompts learns from it.
        """
        kept = self.autopilot, self.is_beside_training, self._num_reported
        self.autopilot, self.is_beside_training = None, True
        try:
            self._offload_learner()
            with self.engines.unnoted():
                yield
        finally:
            self.autopilot, self.is_beside_training, self._num_reported = kept

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        """Submitted groups that `advance` has not returned."""
        return self.engines.under_way

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue these groups in flight, each on the least loaded engine; errors as in `generate`."""
        self._recovered(lambda: None, requests=requests)

    def advance(self, *, max_s: float) -> Portion:
        """Run all engines until a group is complete, for about `max_s` seconds; errors as in `generate`."""
        portion = self._recovered(lambda: self.engines.advance(max_s=max_s))
        num, self._num_regenerated = self._num_regenerated, 0
        return replace(portion, num_engine_restarts=self._new_restarts(), num_regenerated=num)

    def _new_restarts(self) -> int:
        """Count the restarts since the last call."""
        num, self._num_reported = self._num_restarts - self._num_reported, self._num_restarts
        return num

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        """Restart the unfinished rollouts of these groups, return their number; errors as in `generate`."""
        return self._recovered(lambda: self.engines.restart(indices, seeds=seeds))

    def _refit(self) -> RefitCheck:
        self._offload_learner()
        return self.gate.refit(self._version, draft_version=self._draft_version)

    def _offload_learner(self) -> None:
        if self.memory_sharer is not None:
            self.memory_sharer.offload()

    def _refit_again(self) -> None:
        if not self.is_beside_training:
            self._refit()
        elif not self.gate.deliver_again(self._version):
            raise WeightsLostError(
                f"no engine can be given policy version {self._version} again: the learner has left it"
            )

    def _recovered(self, call: Callable[[], T], *, is_refit: bool = False, requests: Sequence[GroupRequest] = ()) -> T:
        """Submit `requests` and make a call; if an engine is lost, replace it, submit its groups and call again.

        A refit comes before what is to be submitted.
        """
        lost: Sequence[Worker] = ()
        to_submit = list(requests)
        while True:
            try:
                if lost:
                    stranded = self.engines.take_lost([worker.name for worker in lost])
                    self._num_regenerated += sum(len(request.seeds) for request in stranded)
                    to_submit += stranded
                    self.engines.replace(lost)
                    self.gate.engines_changed()
                    if not is_refit:
                        self._refit_again()
                if is_refit:
                    result = call()
                    self._submit_all(to_submit)
                    return result
                self._submit_all(to_submit)
                return call()
            except LostWorkerError as error:  # a replacement may be lost too
                lost = self._replaceable(error)

    def _submit_all(self, requests: list[GroupRequest]) -> None:
        """Submit and clear `requests`: if an engine is lost in this call, they count as its own."""
        taken, requests[:] = requests[:], []
        if taken:
            self.engines.submit(taken, sampling=self.sampling)

    def _replaceable(self, error: LostWorkerError) -> Sequence[Worker]:
        """Count and return the lost engines; raise the error if they may not be replaced."""
        running = [engine.name for engine in self.engines.workers]
        lost = [worker for worker in error.workers if worker.name in running]
        if len(lost) < len(error.workers) or self._num_restarts + len(lost) > self.max_restarts:
            raise error
        self._num_restarts += len(lost)
        logger.error("%s; restart %d of at most %d in this run", error, self._num_restarts, self.max_restarts)
        return lost


def _announce(decision: Decision) -> None:
    own, other = (f"{cost:.3f} ms a token" for cost in (decision.own_ms or 0.0, decision.other_ms or 0.0))
    if decision.speculates:
        logger.warning("speculation is on again: probes of it took %s, generation without it %s", other, own)
    else:
        logger.warning(
            "speculation is off: for %d steps it lost, %s with it and %s without; it is probed from time to time",
            PATIENCE_STEPS,
            own,
            other,
        )
