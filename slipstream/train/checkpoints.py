"""Checkpoints of one arm: written while it trains, found again by a resumed attempt."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import from_mapping
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.files import write_atomic
from slipstream.records.steps import StepRecord
from slipstream.storage import existing_directory, remove, step_directories, step_directory, step_of
from slipstream.train.loop import Learner

logger = logging.getLogger(__name__)

_PENDING = ".pending"
_REMAINS = (_PENDING, ".partial", ".old")
_GRACE_S = 60.0  # after an error the learner itself may hang


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Directory of checkpoints, each with the learner's whole state and the records of all steps so far.

    A file beside a checkpoint holds `pending` rollouts, which are not trained on; it is written before the checkpoint
    and removed after it. Other files with such names are left alone, and logged once. `recipe` is the recipe's
    fingerprint, because steps of one recipe must not be continued with another.
    """

    directory: Path
    recipe: str
    keep: int = 2
    _told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _damaged: set[tuple[str, int]] = field(default_factory=set, init=False, repr=False, compare=False)

    def save(self, learner: Learner, history: Sequence[StepRecord], pending: bytes | None = None) -> None:
        """Write the checkpoint after `len(history)` steps, then remove all but the newest `keep` whole ones.

        A checkpoint that is written in the background counts once it is whole, and a damaged one never.
        """
        path = step_directory(self.directory, len(history))
        extra: dict[str, Any] = {"recipe": self.recipe, "steps": [asdict(record) for record in history]}
        if pending is not None:
            write_atomic(path.with_suffix(_PENDING), pending)
            extra["pending"] = _digest(pending)
        learner.save_checkpoint(path, extra)
        self._drop_oldest(learner, writing=path)

    @contextmanager
    def finished(self, learner: Learner) -> Iterator[None]:
        """Finish writing the last checkpoint when the block ends, also if the block fails and the learner lives."""
        try:
            yield
        except Exception:
            try:
                learner.finish_checkpoint(timeout_s=_GRACE_S)
            except Exception:
                logger.exception("train_grpo: the checkpoint that was being written is lost")
            raise
        learner.finish_checkpoint()
        self._drop_oldest(learner)

    def restore(self, learner: Learner) -> tuple[list[StepRecord], bytes | None]:
        """Load the newest whole checkpoint into the learner, if there is one; return its steps and `pending`.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest belongs to another recipe.
        """
        damaged: list[str] = []
        for path in reversed(self._paths()):
            try:
                extra = learner.load_checkpoint(path)
                pending = _pending(path, extra)
            except FileNotFoundError:
                self._tell_of_stray(path)
                continue
            except CheckpointError as error:
                damaged.append(_last_line(error))
                self._damaged.add(_identity(path))
                logger.error("train_grpo: %s; trying the one before it", damaged[-1])
                continue
            if extra["recipe"] != self.recipe:
                raise CheckpointError(
                    f"checkpoint {path} must be of this run's recipe, got another one's: give the run another "
                    "execution name, or the recipe that it was started with"
                )
            history = [from_mapping(StepRecord, step, f"steps[{i}]") for i, step in enumerate(extra["steps"])]
            logger.info("train_grpo: resuming from %s, step %d", path.name, len(history))
            return history, pending
        if damaged:
            raise CheckpointError(f"no checkpoint can be resumed from; remove them to start anew: {'; '.join(damaged)}")
        return [], None

    def _drop_oldest(self, learner: Learner, *, writing: Path | None = None) -> None:
        kept: list[Path] = []
        for path in reversed(self._paths()):
            is_whole = self._is_whole(learner, path)
            if len(kept) < self.keep:
                if is_whole:
                    kept.append(path)
            elif is_whole is not None:
                remove(path)
                if path.exists():
                    self._tell(path, f"{path} cannot be removed")
        if len(kept) == self.keep:
            self._drop_remains(kept[-1], writing)

    def _drop_remains(self, oldest: Path, writing: Path | None) -> None:
        """Remove what a killed process left of steps before the oldest checkpoint that is kept."""
        first = step_of(oldest)
        assert first is not None
        for path in self.directory.glob("step-*.*"):
            own = path.with_name(path.name.partition(".")[0])
            step = step_of(own)
            is_left = path.suffix in _REMAINS and own != writing and not own.exists()
            if step is not None and step < first and is_left:
                remove(path)

    def _is_whole(self, learner: Learner, path: Path) -> bool | None:
        """Return True if a run could resume from it, and None if it is no checkpoint."""
        try:
            _pending(path, learner.inspect_checkpoint(path))
        except FileNotFoundError:
            self._tell_of_stray(path)
            return None
        except CheckpointError as error:
            self._tell(path, f"{_last_line(error)}; it does not count among the {self.keep} that are kept")
            return False
        return _identity(path) not in self._damaged

    def _paths(self) -> list[Path]:
        """Paths of complete checkpoints, oldest first."""
        paths, strays = step_directories(self.directory)
        for path in strays:
            self._tell_of_stray(path)
        return paths

    def _tell_of_stray(self, path: Path) -> None:
        self._tell(path, f"{path} is no checkpoint, and is left alone")

    def _tell(self, path: Path, words: str) -> None:
        if path.name not in self._told:
            self._told.add(path.name)
            logger.warning("train_grpo: %s", words)


def _identity(path: Path) -> tuple[str, int]:
    """Name and inode of a checkpoint; writing it again changes the inode."""
    return path.name, existing_directory(path).stat().st_ino


def _last_line(error: Exception) -> str:
    """Last line of an error, which arrives from another process with its whole traceback."""
    return str(error).strip().splitlines()[-1]


def _pending(path: Path, extra: Mapping[str, Any]) -> bytes | None:
    """Rollouts that were saved with a checkpoint, after a check of their digest; None if none were saved."""
    if "pending" not in extra:
        return None
    file = path.with_suffix(_PENDING)
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} must have its rollouts beside it, got no {file.name}")
    data = file.read_bytes()
    if _digest(data) != extra["pending"]:
        raise CheckpointError(f"the rollouts of checkpoint {path} must be those that were saved, got other bytes")
    return data


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
