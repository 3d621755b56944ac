"""The learner's checkpoints: slices of logical tensors in safetensors files, JSON beside them, no pickle.

`boxes` describes the part of each logical tensor that a rank holds, `policy` lists the tensors of a model and its
optimizer, and `on_disk` writes, verifies and reads them. This module holds the errors, so that code that catches one
imports no Megatron.

Torch's `distributed.checkpoint` is not used. Its default storage, and Megatron's checkpoints on top of it, read
metadata from a pickle. Its safetensors storage (`HuggingFaceStorageWriter`) keys slices by tensor name alone: where a
distributed optimizer cuts a row, a rank has several slices of one tensor, and all but the last are lost without an
error. A flipped bit loads without an error too. A storage of our own under its planners takes more code than this
package: digests, the atomic rename and errors that name rank and file have to be written either way.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to another run, so no run can resume from it."""


class CheckpointStorageError(OSError):
    """The learner's ranks do not see the same checkpoints, because their directory is not on shared storage."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the one before is unchanged."""
