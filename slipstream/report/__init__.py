"""Reports: an HTML page, a JSON summary and a table for the terminal, from the record of a run.

Import the modules themselves: the page imports matplotlib, which takes seconds and which tables do not need.
"""
