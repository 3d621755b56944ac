"""GRPO: the loop, one arm of it from start or checkpoint to end, and what watches over it."""
