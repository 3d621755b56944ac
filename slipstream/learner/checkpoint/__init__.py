"""The learner's checkpoints: slices of logical tensors in safetensors files, JSON beside them, no pickle.

`boxes` describes the part of each logical tensor that a rank holds, `policy` lists the tensors of a model and its
optimizer, and `on_disk` writes, verifies and reads them. This module holds the errors, so that code that catches one
imports no Megatron.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to another run, so no run can resume from it."""


class CheckpointStorageError(OSError):
    """The learner's ranks do not see the same checkpoints, because their directory is not on shared storage."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the one before is unchanged."""
