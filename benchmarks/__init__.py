"""Timings of Slipstream and of its parts; no test depends on a time."""
