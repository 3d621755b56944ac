"""Flyte workflows: they wire tasks."""
