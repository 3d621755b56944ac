"""The policy: its architecture, its Megatron-Core learner and its weights in other formats."""
