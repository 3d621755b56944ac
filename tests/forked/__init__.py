"""Processes of tests, forked from servers that have imported what they import, as `workers.forked_workers` has it."""
