"""Typed Flyte tasks, one file a stage, without logic of their own."""
