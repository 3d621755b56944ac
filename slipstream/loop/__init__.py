"""The GRPO loop and the processes that it drives."""
