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
from slipstream.train.checkpoints import Checkpoints, Restored, _digest
from tests.unit.sampled import accepted
from tests.unit.train.world import STEP, BareLearner

HISTORY = [replace(STEP, step=step, acceptance=accepted(10, 5), draft_version=0) for step in range(4)]


class FileLearner(BareLearner):
    """Writes what it is given, and notes what it loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        path.mkdir(parents=True)
        (path / "extra.json").write_text(json.dumps(extra))

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        """Nothing is written in the background."""

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        self.loaded.append(path.name)
        if (path / "bits").exists():
            raise CheckpointError(f"{path.name} is damaged")
        return self.inspect_checkpoint(path)

    def inspect_checkpoint(self, path: Path) -> dict[str, Any]:
        if (path / "damaged").exists():
            raise CheckpointError(f"{path.name} is damaged")
        return json.loads((path / "extra.json").read_text())


def saved(directory: Path, *counts: int) -> Checkpoints:
    checkpoints = Checkpoints(directory=directory, recipe="a recipe")
    for count in counts:
        checkpoints.save(FileLearner(), HISTORY[:count])
    return checkpoints


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    assert names(tmp_path) == ["step-000001"]
    saved(tmp_path, 2, 3)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_a_half_written_one_is_neither_counted_nor_read(tmp_path: Path) -> None:
    (tmp_path / "step-000009.part").mkdir()
    checkpoints = saved(tmp_path, 1, 2)
    assert len(checkpoints.restore(FileLearner()).steps) == 2
    assert "step-000009.part" in names(tmp_path)


def test_the_newest_comes_back_with_every_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, learner = saved(tmp_path, 2, 3), FileLearner()
    with caplog.at_level(logging.INFO):
        assert checkpoints.restore(learner) == Restored(steps=HISTORY[:3])
    assert learner.loaded == ["step-000003"]
    assert caplog.messages == ["train_grpo: resuming from step-000003, step 3"]


def test_without_checkpoints_a_run_starts_at_the_first_step(tmp_path: Path) -> None:
    assert saved(tmp_path).restore(FileLearner()) == Restored(steps=[])


def test_a_damaged_one_is_named_and_the_one_before_it_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, learner = saved(tmp_path, 2, 3), FileLearner()
    (tmp_path / "step-000003" / "damaged").touch()
    assert checkpoints.restore(learner) == Restored(steps=HISTORY[:2])
    assert learner.loaded == ["step-000003", "step-000002"]
    assert caplog.messages[0] == "train_grpo: step-000003 is damaged; trying the one before it"


def test_a_run_does_not_start_anew_over_damaged_checkpoints(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, 3)
    for name in names(tmp_path):
        (tmp_path / name / "damaged").touch()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(FileLearner())
    assert str(caught.value) == (
        "no checkpoint can be resumed from; remove them to start anew: step-000003 is damaged; step-000002 is damaged"
    )


def test_steps_of_another_recipe_are_not_continued(tmp_path: Path) -> None:
    checkpoints = replace(saved(tmp_path, 2), recipe="another")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(FileLearner())
    assert str(caught.value) == (
        f"checkpoint {tmp_path / 'step-000002'} must be of this run's recipe, got another one's: give the run another "
        "execution name, or the recipe that it was started with"
    )


def test_a_step_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2)
    file = tmp_path / "step-000002" / "extra.json"
    extra = json.loads(file.read_text())
    extra["steps"][1]["reward_mean"] = "high"
    file.write_text(json.dumps(extra))
    with pytest.raises(ValueError, match=r"^steps\[1\]\.reward_mean must be of type float, got 'high'$"):
        checkpoints.restore(FileLearner())


class SlowLearner(FileLearner):
    """Its checkpoints are there when the next one begins, or at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Path, dict[str, Any]]] = []

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        self.finish_checkpoint()
        self.waiting.append((path, extra))

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        while self.waiting:
            super().save_checkpoint(*self.waiting.pop())


def test_while_one_is_written_the_newest_two_whole_ones_stay_and_at_the_end_the_newest_two(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    checkpoints, learner = Checkpoints(directory=tmp_path, recipe="a recipe"), SlowLearner()
    with checkpoints.finished(learner):
        for count in (2, 3, 4):
            checkpoints.save(learner, HISTORY[:count])
        assert names(tmp_path) == ["step-000002", "step-000003"]
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_a_run_that_fails_while_one_is_written_keeps_it(tmp_path: Path) -> None:
    checkpoints, learner = Checkpoints(directory=tmp_path, recipe="a recipe"), SlowLearner()
    with pytest.raises(ZeroDivisionError), checkpoints.finished(learner):
        checkpoints.save(learner, HISTORY[:2])
        raise ZeroDivisionError
    assert names(tmp_path) == ["step-000002"]


class FailingLearner(FileLearner):
    """Its disk is full."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        self.timeouts.append(timeout_s)
        raise CheckpointWriteError("the disk is full")


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    checkpoints, learner = Checkpoints(directory=tmp_path, recipe="a recipe"), FailingLearner()
    with pytest.raises(CheckpointWriteError, match="the disk is full"), checkpoints.finished(learner):
        pass
    assert learner.timeouts == [None]  # a slow disk is no error


def test_a_run_that_fails_and_loses_its_checkpoint_ends_with_its_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(directory=tmp_path, recipe="a recipe")
    learner = FailingLearner()
    with pytest.raises(ZeroDivisionError), checkpoints.finished(learner):
        raise ZeroDivisionError
    assert learner.timeouts == [60.0]  # it may be the learner that hangs
    assert caplog.messages == ["train_grpo: the checkpoint that was being written is lost"]


def test_rollouts_that_wait_come_back_with_their_checkpoint_and_go_with_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    for count in (1, 2, 3):
        checkpoints.save(FileLearner(), HISTORY[:count], pending=b"rollouts %d" % count)
    assert names(tmp_path) == ["step-000002", "step-000002.pending", "step-000003", "step-000003.pending"]
    assert checkpoints.restore(FileLearner()) == Restored(steps=HISTORY[:3], pending=b"rollouts 3")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(b"rollouts 4"), "must be those that were saved, got other bytes"),
        (lambda file: file.unlink(), "must have its rollouts beside it, got no step-000003.pending"),
    ],
    ids=["other bytes", "missing"],
)
def test_a_checkpoint_whose_rollouts_are_damaged_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], message: str
) -> None:
    checkpoints = saved(tmp_path)
    for count in (2, 3):
        checkpoints.save(FileLearner(), HISTORY[:count], pending=b"rollouts %d" % count)
    damage(tmp_path / "step-000003.pending")
    assert checkpoints.restore(FileLearner()) == Restored(steps=HISTORY[:2], pending=b"rollouts 2")
    assert message in caplog.messages[0]


class WatchingLearner(FileLearner):
    """Notes what lies beside a checkpoint when it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        self.seen.append(names(path.parent))
        super().save_checkpoint(path, extra)


def test_the_rollouts_are_there_before_their_checkpoint_is(tmp_path: Path) -> None:
    learner = WatchingLearner()
    saved(tmp_path).save(learner, HISTORY[:1], pending=b"rollouts")
    assert learner.seen == [["step-000001.pending"]]


def test_rollouts_of_a_checkpoint_that_is_still_written_stay_and_those_of_a_dropped_one_go(tmp_path: Path) -> None:
    checkpoints, learner = Checkpoints(directory=tmp_path, recipe="a recipe"), SlowLearner()
    with checkpoints.finished(learner):
        checkpoints.save(learner, HISTORY[:1], pending=b"rollouts 1")
        assert names(tmp_path) == ["step-000001.pending"]
        for count in (2, 3, 4):
            checkpoints.save(learner, HISTORY[:count], pending=b"rollouts %d" % count)
        kept = [f"step-00000{count}{end}" for count in (2, 3) for end in ("", ".pending")]
        assert names(tmp_path) == [*kept, "step-000004.pending"]
    assert names(tmp_path) == [f"step-00000{count}{end}" for count in (3, 4) for end in ("", ".pending")]


def test_of_another_recipe_not_even_the_checkpoint_before_a_damaged_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, learner = replace(saved(tmp_path, 2, 3), recipe="another"), FileLearner()
    (tmp_path / "step-000003" / "damaged").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint .*step-000002 must be of this run's recipe"):
        checkpoints.restore(learner)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert learner.loaded == ["step-000003", "step-000002"]


def test_a_run_that_is_interrupted_does_not_wait_for_its_checkpoint(tmp_path: Path) -> None:
    learner = FailingLearner()
    with pytest.raises(KeyboardInterrupt), Checkpoints(directory=tmp_path, recipe="a recipe").finished(learner):
        raise KeyboardInterrupt
    assert learner.timeouts == []


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = replace(saved(tmp_path, 1, 2), keep=1)
    (tmp_path / "step-000002" / "damaged").touch()
    learner = SlowLearner()
    checkpoints.save(learner, HISTORY[:3])  # is written while the whole one before it is all that there is
    assert names(tmp_path) == ["step-000001", "step-000002"]
    checkpoints.save(learner, HISTORY[:4])
    assert names(tmp_path) == ["step-000003"]  # and the damaged one goes with those that are older
    assert caplog.messages == ["train_grpo: step-000002 is damaged; it does not count among the 1 that are kept"]


def test_damage_that_only_a_resume_could_see_is_remembered_until_the_checkpoint_is_written_anew(tmp_path: Path) -> None:
    """As of bits that changed on the disk."""
    checkpoints = saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-000003" / "bits").touch()
    checkpoints = replace(checkpoints, keep=1)
    assert len(checkpoints.restore(FileLearner()).steps) == 2
    learner = SlowLearner()
    checkpoints.save(learner, HISTORY[:4])
    assert names(tmp_path) == ["step-000002", "step-000003"]
    learner.finish_checkpoint()
    checkpoints.save(FileLearner(), [*HISTORY, STEP])
    assert names(tmp_path) == ["step-000005"]


def test_without_its_rollouts_a_checkpoint_is_damaged(tmp_path: Path) -> None:
    checkpoints = replace(saved(tmp_path), keep=1)
    for count in (1, 2):
        checkpoints.save(SlowLearner(), HISTORY[:count], pending=b"rollouts")
        FileLearner().save_checkpoint(
            tmp_path / f"step-00000{count}", {"recipe": "a recipe", "steps": [], "pending": _digest(b"rollouts")}
        )
    (tmp_path / "step-000002.pending").unlink()
    checkpoints.save(SlowLearner(), HISTORY[:3])
    assert names(tmp_path) == ["step-000001", "step-000001.pending", "step-000002"]


@pytest.mark.parametrize("is_newest", [True, False])
def test_what_is_only_called_like_a_checkpoint_stops_nothing_stays_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_newest: bool
) -> None:
    checkpoints = saved(tmp_path, 2)
    number = 9 if is_newest else 0
    stray = [tmp_path / f"step-00000{number}", tmp_path / f"step-00001{number}", tmp_path / "step-backup"]
    stray[0].write_text("a note")
    stray[1].mkdir()
    (stray[1] / "notes.txt").write_text("not ours")
    stray[2].mkdir()
    for count in (3, 4):
        checkpoints.save(FileLearner(), HISTORY[:count])
    learner = FileLearner()
    assert len(checkpoints.restore(learner).steps) == 4
    assert set(names(tmp_path)) == {"step-000003", "step-000004", *(path.name for path in stray)}
    assert sorted(message for message in caplog.messages if "is no checkpoint" in message) == sorted(
        f"train_grpo: {path} is no checkpoint, and is left alone" for path in stray
    )


def test_strays_alone_are_no_run_to_go_on_with(tmp_path: Path) -> None:
    (tmp_path / "step-000004").touch()
    (tmp_path / "step-000005").mkdir()
    (tmp_path / "step-000006").symlink_to(tmp_path / "nowhere")
    checkpoints = Checkpoints(directory=tmp_path, recipe="a recipe")
    assert checkpoints.restore(FileLearner()) == Restored(steps=[])


def test_beyond_a_million_steps_checkpoints_are_still_found_in_their_order(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        FileLearner().save_checkpoint(tmp_path / f"step-{step}", {"recipe": "a recipe", "steps": []})
    learner = FileLearner()
    Checkpoints(directory=tmp_path, recipe="a recipe").restore(learner)
    assert learner.loaded == ["step-1000000"]


def test_what_a_process_that_was_killed_left_of_steps_before_the_oldest_goes(tmp_path: Path) -> None:
    checkpoints = replace(saved(tmp_path, 2), keep=2)
    for name in ("step-000001.partial", "step-000001.old", "step-000009.partial", "step-000001.txt"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000001.pending").write_bytes(b"rollouts")
    checkpoints.save(FileLearner(), HISTORY[:3])
    assert names(tmp_path) == ["step-000001.txt", "step-000002", "step-000003", "step-000009.partial"]


def test_what_is_being_written_stays_whatever_lies_there(tmp_path: Path) -> None:
    saved(tmp_path, 4)  # a later step than the one that is saved below
    for name in ("step-000003.partial", "step-000008", "step-000009"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000009" / "damaged").touch()
    Checkpoints(directory=tmp_path, recipe="a recipe", keep=1).save(SlowLearner(), HISTORY[:3], pending=b"rollouts")
    assert {"step-000003.partial", "step-000003.pending"} <= set(names(tmp_path))


def test_a_checkpoint_that_cannot_be_removed_stops_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 1, 2)

    def refuse(*_: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("the disk is gone")

    monkeypatch.setattr(storage.shutil, "rmtree", refuse)
    checkpoints.save(FileLearner(), HISTORY[:3])
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]
