"""Rewards: what an answer is, and whether it is right, by text or by math-verify in processes that may be killed."""
