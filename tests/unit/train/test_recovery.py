"""A lost engine: replaced, refitted, and asked again, so that the step is the one it would have been."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import RefitCheck
from slipstream.refit.gate import Export
from slipstream.train.recovery import LastingEngines, WeightsLostError
from slipstream.types import Prompt
from slipstream.workers.calls import LostWorkerError, Worker
from tests.unit.train.asynchronous.world import export_of

ENGINES = (Worker(None, "engine 0", "10.77.0.11"), Worker(None, "engine 1", "10.77.0.12"))
RANK = Worker(None, "learner rank 1", "10.77.0.12")
SAMPLING = SamplingConfig(max_response_tokens=8)
PROMPT = Prompt(id="0", text="", token_ids=(1,), answer="")


class Run:
    """Engines and their gate; `losses` says who is lost at which call, counted over both."""

    def __init__(self, losses: dict[int, Sequence[Worker]], *, keeps_weights: bool = True) -> None:
        self.engines = ENGINES
        self.calls: list[Any] = []
        self.keeps_weights = keeps_weights
        self._losses = losses
        self._num_asked = 0

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        self._asked(("generate", seed))
        return GenerationResult(groups=(), acceptance=None, generation_s=1.0)

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        self._asked(("refit", version, draft_version))
        return RefitCheck(num_tensors=1, elapsed_s=0.0)

    def export(self, version: int, *, draft_version: int | None) -> Export:
        self._asked(("export", version, draft_version))
        return export_of(version, draft_version=draft_version)

    def deliver(self, export: Export) -> RefitCheck:
        self._asked(("deliver", export.version))
        return RefitCheck(num_tensors=1, elapsed_s=0.0)

    def replace(self, lost: Sequence[Worker]) -> None:
        self.calls.append(("replace", [engine.name for engine in lost]))

    def deliver_again(self, version: int) -> bool:
        self._asked(("again", version))
        return self.keeps_weights

    def engines_changed(self) -> None:
        self._asked("changed")

    def _asked(self, call: Any) -> None:
        self.calls.append(call)
        self._num_asked += 1
        if self._num_asked in self._losses:
            raise LostWorkerError("engine died", self._losses[self._num_asked])


def steps(run: Run, *, num: int = 1, max_restarts: int = 3, is_beside_training: bool = False) -> list[int]:
    """Restarts in the results of so many steps."""
    lasting = LastingEngines(run, run, max_restarts=max_restarts, is_beside_training=is_beside_training)
    found = []
    for step in range(num):
        lasting.refit(step, draft_version=10 * step)
        result = lasting.generate([PROMPT], sampling=SAMPLING, group_size=2, seed=70 + step)
        found.append(result.num_engine_restarts)
    return found


def test_an_engine_lost_while_it_generates_is_refitted_and_the_generation_repeated_from_its_seed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run({2: [ENGINES[1]]})

    assert steps(run, num=2) == [1, 0]
    assert run.calls == [
        ("refit", 0, 0),
        ("generate", 70),
        ("replace", ["engine 1"]),
        "changed",
        ("refit", 0, 0),
        ("generate", 70),
        ("refit", 1, 10),
        ("generate", 71),
    ]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.messages == ["engine died; restart 1 of at most 3 in this run"]


def test_an_engine_lost_in_a_refit_is_replaced_and_the_refit_repeated() -> None:
    run = Run({1: [ENGINES[0]]})

    assert steps(run) == [1]
    assert run.calls == [("refit", 0, 0), ("replace", ["engine 0"]), "changed", ("refit", 0, 0), ("generate", 70)]


def test_an_engine_lost_while_it_takes_weights_gets_the_same_ones_though_the_learner_has_moved_on() -> None:
    run = Run({2: [ENGINES[0]]})
    lasting = LastingEngines(run, run, max_restarts=3, is_beside_training=True)

    assert lasting.deliver(lasting.export(4, draft_version=2)).num_tensors == 1
    assert run.calls == [("export", 4, 2), ("deliver", 4), ("replace", ["engine 0"]), "changed", ("deliver", 4)]
    run.calls.clear()
    lasting.generate([PROMPT], sampling=SAMPLING, group_size=2, seed=70)
    assert run.calls == [("generate", 70)]


def test_an_engine_lost_right_after_another_was_replaced_is_replaced_too() -> None:
    run = Run({2: [ENGINES[1]], 4: [ENGINES[0]]})

    assert steps(run) == [2]
    assert run.calls[-2:] == [("refit", 0, 0), ("generate", 70)]


def test_an_engine_lost_while_the_others_join_its_substitute_is_replaced_too() -> None:
    run = Run({1: [ENGINES[0]], 2: [ENGINES[1]]})

    assert steps(run) == [2]
    assert run.calls == [
        ("refit", 0, 0),
        ("replace", ["engine 0"]),
        "changed",
        ("replace", ["engine 1"]),
        "changed",
        ("refit", 0, 0),
        ("generate", 70),
    ]


def test_a_substitute_that_is_lost_counts_like_any_other() -> None:
    run = Run({call: [ENGINES[0]] for call in range(1, 9)})

    with pytest.raises(LostWorkerError, match="engine died"):
        steps(run)
    assert run.calls.count(("replace", ["engine 0"])) == 3


def test_more_losses_than_allowed_end_the_run() -> None:
    run = Run({2: [ENGINES[1]], 5: [ENGINES[1]]})

    with pytest.raises(LostWorkerError, match="engine died"):
        steps(run, max_restarts=1)
    assert run.calls.count(("replace", ["engine 1"])) == 1


@pytest.mark.parametrize("lost", [[RANK], [ENGINES[0], RANK]])
def test_a_lost_rank_of_the_learner_is_not_an_engines_loss(lost: list[Worker]) -> None:
    run = Run({1: lost})

    with pytest.raises(LostWorkerError):
        steps(run)
    assert run.calls == [("refit", 0, 0)]


def test_an_engine_lost_beside_training_gets_the_weights_that_were_sent_last_without_the_learner() -> None:
    run = Run({2: [ENGINES[1]]})

    assert steps(run, is_beside_training=True) == [1]
    assert run.calls == [
        ("refit", 0, 0),
        ("generate", 70),
        ("replace", ["engine 1"]),
        "changed",
        ("again", 0),
        ("generate", 70),
    ]


def test_an_engine_lost_beside_training_whose_weights_nobody_keeps_is_replaced_and_ends_the_attempt() -> None:
    run = Run({2: [ENGINES[1]]}, keeps_weights=False)

    with pytest.raises(WeightsLostError, match="no engine can be given policy version 0 again"):
        steps(run, is_beside_training=True)
    assert run.calls[-3:] == [("replace", ["engine 1"]), "changed", ("again", 0)]


def test_an_engine_lost_in_a_refit_beside_training_is_refitted_by_the_learner_which_is_at_rest() -> None:
    run = Run({1: [ENGINES[0]]})

    assert steps(run, is_beside_training=True) == [1]
    assert run.calls == [("refit", 0, 0), ("replace", ["engine 0"]), "changed", ("refit", 0, 0), ("generate", 70)]


class Generated(Run):
    """Notes all that a generation is asked with."""

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
        self._asked((list(prompts), how))
        return GenerationResult(groups=(), acceptance=None, generation_s=1.0)


def test_a_repeated_generation_is_asked_for_the_same_and_its_rollouts_count_as_made_again() -> None:
    """Of three prompts with two rollouts each, in a second and a third try: 12 rollouts."""
    run = Generated({1: [ENGINES[0]], 4: [ENGINES[1]]})
    lasting = LastingEngines(run, run, max_restarts=2)

    result = lasting.generate([PROMPT] * 3, sampling=SAMPLING, group_size=2, seed=70)

    asked = ([PROMPT] * 3, {"sampling": SAMPLING, "group_size": 2, "seed": 70})
    assert [call for call in run.calls if isinstance(call[0], list)] == [asked] * 3
    assert (result.num_regenerated, result.num_engine_restarts) == (12, 2)
    again = lasting.generate([PROMPT], sampling=SAMPLING, group_size=2, seed=71)
    assert (again.num_regenerated, again.num_engine_restarts) == (0, 0)


def test_engines_that_were_never_refitted_hold_the_first_version_and_no_trained_draft() -> None:
    run = Run({1: [ENGINES[0]]})
    LastingEngines(run, run, max_restarts=1).generate([PROMPT], sampling=SAMPLING, group_size=2, seed=70)
    assert run.calls[-2:] == [("refit", 0, None), ("generate", 70)]


def test_the_draft_that_was_delivered_is_brought_to_a_new_engine_too() -> None:
    run = Run({3: [ENGINES[0]]})
    lasting = LastingEngines(run, run, max_restarts=1)
    lasting.deliver(lasting.export(4, draft_version=2))
    lasting.generate([PROMPT], sampling=SAMPLING, group_size=2, seed=70)
    assert run.calls[-2:] == [("refit", 4, 2), ("generate", 70)]
