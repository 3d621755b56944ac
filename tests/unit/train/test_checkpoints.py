"""The checkpoints of an arm, with a learner whose state is a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import storage
from slipstream.learner.checkpoint import CheckpointError, CheckpointWriteError
from slipstream.train.checkpoints import Checkpoints
from tests.unit.sampled import accepted
from tests.unit.train.world import STEP, BareLearner

HISTORY = [replace(STEP, step=step, acceptance=accepted(10, 5), draft_version=0) for step in range(5)]


class FileLearner(BareLearner):
    """Notes what it loaded, and what lay beside a checkpoint as it began one; a slow one has written it at the next."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.loaded: list[str] = []
        self.seen: list[list[str]] = []
        self._is_slow = is_slow
        self._waiting: list[tuple[Path, dict[str, Any]]] = []

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        self.seen.append(names(path.parent))
        self.finish_checkpoint()
        self._waiting.append((path, extra))
        if not self._is_slow:
            self.finish_checkpoint()

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        while self._waiting:
            path, extra = self._waiting.pop()
            path.mkdir(parents=True)
            (path / "extra.json").write_text(json.dumps(extra))

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        self.loaded.append(path.name)
        if (path / "bits").exists():
            raise CheckpointError(f"{path.name} is damaged")
        return self.inspect_checkpoint(path)

    def inspect_checkpoint(self, path: Path) -> dict[str, Any]:
        if (path / "damaged").exists():
            raise CheckpointError(f"{path.name} is damaged")
        return json.loads((path / "extra.json").read_text())


def save(checkpoints: Checkpoints, *counts: int, learner: FileLearner | None = None, waits: bool = False) -> None:
    """Write checkpoints after so many steps each, with rollouts that wait or without."""
    for count in counts:
        pending = b"rollouts %d" % count if waits else None
        checkpoints.save(learner or FileLearner(), HISTORY[:count], pending=pending)


def saved(directory: Path, *counts: int, waits: bool = False, **settings: int) -> Checkpoints:
    checkpoints = Checkpoints(directory=directory, recipe="a recipe", **settings)
    save(checkpoints, *counts, waits=waits)
    return checkpoints


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def named(*counts: int, waits: bool = False) -> list[str]:
    """Names of these checkpoints, and of the rollouts beside them."""
    return [f"step-{count:06}{end}" for count in counts for end in ("", ".pending")[: 1 + waits]]


def damage(directory: Path, *counts: int) -> None:
    for name in named(*counts):
        (directory / name / "damaged").touch()


def test_the_newest_whole_one_comes_back_with_every_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, learner = saved(tmp_path), FileLearner()
    assert checkpoints.restore(learner) == ([], None)  # a run without checkpoints starts at the first step
    (tmp_path / "step-000009.part").mkdir()
    save(checkpoints, 2, 3)
    with caplog.at_level(logging.INFO):
        assert checkpoints.restore(learner) == (HISTORY[:3], None)
    assert learner.loaded == named(3)
    assert caplog.messages == ["train_grpo: resuming from step-000003, step 3"]
    assert "step-000009.part" in names(tmp_path)


def test_a_damaged_one_is_named_and_the_one_before_it_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, learner = saved(tmp_path, 2, 3), FileLearner()
    damage(tmp_path, 3)
    assert checkpoints.restore(learner) == (HISTORY[:2], None)
    assert learner.loaded == named(3, 2)
    assert caplog.messages[0] == "train_grpo: step-000003 is damaged; trying the one before it"
    damage(tmp_path, 2)  # and a run does not start anew over damaged ones
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(FileLearner())
    assert str(caught.value) == (
        "no checkpoint can be resumed from; remove them to start anew: step-000003 is damaged; step-000002 is damaged"
    )


def test_steps_of_another_recipe_are_not_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, learner = replace(saved(tmp_path, 2, 3), recipe="another"), FileLearner()
    damage(tmp_path, 3)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(learner)
    assert str(caught.value) == (
        f"checkpoint {tmp_path / 'step-000002'} must be of this run's recipe, got another one's: give the run another "
        "execution name, or the recipe that it was started with"
    )
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert learner.loaded == named(3, 2)


def test_a_step_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2)
    file = tmp_path / "step-000002" / "extra.json"
    extra = json.loads(file.read_text())
    extra["steps"][1]["reward_mean"] = "high"
    file.write_text(json.dumps(extra))
    with pytest.raises(ValueError, match=r"^steps\[1\]\.reward_mean must be of type float, got 'high'$"):
        checkpoints.restore(FileLearner())


@pytest.mark.parametrize("waits", [False, True])
def test_while_one_is_written_the_newest_two_whole_ones_stay(tmp_path: Path, waits: bool) -> None:
    """Rollouts that wait are there before their checkpoint is, and go with it."""
    checkpoints, learner = saved(tmp_path, 1, waits=waits), FileLearner(is_slow=True)
    with checkpoints.finished(learner):
        save(checkpoints, 2, 3, 4, learner=learner, waits=waits)
        assert names(tmp_path) == named(2, 3, waits=waits) + ["step-000004.pending"] * waits
    assert names(tmp_path) == named(3, 4, waits=waits)
    assert learner.seen[0] == named(1, waits=waits) + ["step-000002.pending"] * waits


def test_a_run_that_fails_while_one_is_written_keeps_it(tmp_path: Path) -> None:
    checkpoints, learner = saved(tmp_path), FileLearner(is_slow=True)
    with pytest.raises(ZeroDivisionError), checkpoints.finished(learner):
        save(checkpoints, 2, learner=learner)
        raise ZeroDivisionError
    assert names(tmp_path) == named(2)


@pytest.mark.parametrize(
    ("error", "timeouts"),
    [
        (None, [None]),  # at the end of a run a slow disk is no error
        (ZeroDivisionError, [60.0]),  # it may be the learner that hangs
        (KeyboardInterrupt, []),  # nobody waits for it
    ],
)
def test_a_last_checkpoint_that_cannot_be_written_is_an_error_but_for_the_runs_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Any, timeouts: list[float | None]
) -> None:
    waited: list[float | None] = []

    class Failing(FileLearner):
        def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
            waited.append(timeout_s)
            raise CheckpointWriteError("the disk is full")

    with pytest.raises(error or CheckpointWriteError), saved(tmp_path).finished(Failing()):
        if error is not None:
            raise error
    assert waited == timeouts
    lost = ["train_grpo: the checkpoint that was being written is lost"]
    assert caplog.messages == (lost if error is ZeroDivisionError else [])


@pytest.mark.parametrize("waits", [False, True])
def test_the_newest_two_are_kept_and_rollouts_come_back_with_their_checkpoint(tmp_path: Path, waits: bool) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3, waits=waits)
    assert names(tmp_path) == named(2, 3, waits=waits)
    assert checkpoints.restore(FileLearner()) == (HISTORY[:3], b"rollouts 3" if waits else None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(b"rollouts 4"), "must be those that were saved, got other bytes"),
        (lambda file: file.unlink(), "must have its rollouts beside it, got no step-000003.pending"),
    ],
    ids=["other bytes", "missing"],
)
def test_a_checkpoint_whose_rollouts_are_damaged_is_passed_over_and_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], message: str
) -> None:
    checkpoints = saved(tmp_path, 2, 3, waits=True)
    spoil(tmp_path / "step-000003.pending")
    assert checkpoints.restore(FileLearner()) == (HISTORY[:2], b"rollouts 2")
    assert message in caplog.messages[0]
    save(saved(tmp_path, keep=1), 4, learner=FileLearner(is_slow=True))
    assert {*named(2, waits=True), *named(3)} <= set(names(tmp_path))


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = replace(saved(tmp_path, 1, 2), keep=1)
    damage(tmp_path, 2)
    learner = FileLearner(is_slow=True)
    save(checkpoints, 3, learner=learner)  # is written while the whole one before it is all that there is
    assert names(tmp_path) == named(1, 2)
    save(checkpoints, 4, learner=learner)
    assert names(tmp_path) == named(3)  # and the damaged one goes with those that are older
    assert caplog.messages == ["train_grpo: step-000002 is damaged; it does not count among the 1 that are kept"]


def test_damage_that_only_a_resume_could_see_is_remembered_until_the_checkpoint_is_written_anew(tmp_path: Path) -> None:
    """As of bits that changed on the disk."""
    checkpoints = saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-000003" / "bits").touch()
    checkpoints = replace(checkpoints, keep=1)
    assert len(checkpoints.restore(FileLearner())[0]) == 2
    learner = FileLearner(is_slow=True)
    save(checkpoints, 4, learner=learner)
    assert names(tmp_path) == named(2, 3)
    learner.finish_checkpoint()
    save(checkpoints, 5)
    assert names(tmp_path) == named(5)


@pytest.mark.parametrize("is_newest", [True, False])
def test_what_is_only_called_like_a_checkpoint_stops_nothing_stays_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_newest: bool
) -> None:
    checkpoints = saved(tmp_path, 2)
    number = 9 if is_newest else 0
    note, directory, backup = (tmp_path / f"step-{each}" for each in (f"00000{number}", f"00001{number}", "backup"))
    note.write_text("a note")
    for each in (directory, backup):
        each.mkdir()
    (directory / "notes.txt").write_text("not ours")
    save(checkpoints, 3, 4)
    assert len(checkpoints.restore(FileLearner())[0]) == 4
    strays = {note, directory, backup}
    assert set(names(tmp_path)) == {*named(3, 4), *(path.name for path in strays)}
    assert sorted(message for message in caplog.messages if "is no checkpoint" in message) == sorted(
        f"train_grpo: {path} is no checkpoint, and is left alone" for path in strays
    )


def test_beyond_a_million_steps_checkpoints_are_still_found_in_their_order(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        FileLearner().save_checkpoint(tmp_path / f"step-{step}", {"recipe": "a recipe", "steps": []})
    learner = FileLearner()
    saved(tmp_path).restore(learner)
    assert learner.loaded == ["step-1000000"]


def test_what_a_process_that_was_killed_left_of_steps_before_the_oldest_goes(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2)
    for name in ("step-000001.partial", "step-000001.old", "step-000009.partial", "step-000001.txt"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000001.pending").write_bytes(b"rollouts")
    save(checkpoints, 3)
    assert names(tmp_path) == ["step-000001.txt", *named(2, 3), "step-000009.partial"]


def test_what_is_being_written_stays_whatever_lies_there(tmp_path: Path) -> None:
    saved(tmp_path, 4)  # a later step than the one that is saved below
    for name in ("step-000003.partial", "step-000008", "step-000009"):
        (tmp_path / name).mkdir()
    damage(tmp_path, 9)
    save(saved(tmp_path, keep=1), 3, learner=FileLearner(is_slow=True), waits=True)
    assert {"step-000003.partial", "step-000003.pending"} <= set(names(tmp_path))


def test_a_checkpoint_that_cannot_be_removed_stops_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 1, 2)

    def refuse(*_: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("the disk is gone")

    monkeypatch.setattr(storage.shutil, "rmtree", refuse)
    save(checkpoints, 3)
    assert names(tmp_path) == named(1, 2, 3)


def test_strays_alone_are_no_run_to_go_on_with(tmp_path: Path) -> None:
    (tmp_path / "step-000004").touch()
    (tmp_path / "step-000005").mkdir()
    (tmp_path / "step-000006").symlink_to(tmp_path / "nowhere")
    assert saved(tmp_path).restore(FileLearner()) == ([], None)
