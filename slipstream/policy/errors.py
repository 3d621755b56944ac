"""What a policy raises. Apart from it, so that catching it needs no Megatron import."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be resumed from: it is damaged, or of another run."""
