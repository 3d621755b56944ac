"""Rewards: extraction and comparison of answers, with sympy in killable worker processes."""
