"""Typed Flyte tasks: one file a stage, no logic."""
