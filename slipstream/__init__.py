"""Slipstream: RL post-training with speculative rollouts, faster and with the same distribution."""

__version__ = "0.1.0"
