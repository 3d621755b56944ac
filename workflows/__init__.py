"""Flyte workflows, which wire tasks."""
