"""What a policy raises. Apart from it, so that catching it needs no Megatron import."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be resumed from: it is damaged, or of another run."""


class CheckpointStorageError(OSError):
    """The learner's ranks do not see the same checkpoints: their directory is not on shared storage."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the one before it is as it was."""
