"""Rollout engines: the protocol, vLLM behind it, and acceptance arithmetic."""
