"""The learner: a policy in Megatron-Core, its architecture, updates, checkpoints and export."""
