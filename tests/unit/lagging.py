"""What makes a synchronous recipe an asynchronous one that needs nothing else."""

from typing import Any

ONE_STEP_OFF: dict[str, Any] = {
    "loop": {"mode": "one_step_off", "max_off_policy_steps": 1},
    "grpo": {"loss": {"correction": "none"}},
}
"""Overrides."""
