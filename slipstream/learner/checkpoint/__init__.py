"""The learner's checkpoints: slices of logical tensors in safetensors files, JSON beside them, nothing unpickled.

`boxes` says which part of which logical tensor a rank holds, `policy` what a model and its optimizer consist of,
`on_disk` how all ranks write that in the background, verify it and read it under any layout. The errors are here, so
that catching one needs no Megatron import.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be resumed from: it is damaged, or of another run."""


class CheckpointStorageError(OSError):
    """The learner's ranks do not see the same checkpoints: their directory is not on shared storage."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the one before it is as it was."""
