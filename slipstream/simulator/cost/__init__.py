"""What an iteration, a rollout and a step cost: pure functions of a layout and of the cost model's parameters."""
