"""Measurements of each stage of the chain: plain, frozen records that tasks hand on as JSON and the report reads.

Seconds are wall time. Rates and fractions lie in [0, 1]. Nothing projected is ever put into these records.
"""
