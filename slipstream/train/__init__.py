"""GRPO: the loops, one arm from its start or last checkpoint to its end, and the guards around it."""
