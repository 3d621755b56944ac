"""Placement of a run's processes: learner ranks and engines on GPUs, and an estimate of the GPUs' memory."""
