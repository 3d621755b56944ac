"""From the record of a run to what people read: an HTML page, a JSON summary, a table for the terminal.

Import from its modules: the page draws with matplotlib, which takes seconds to import and the tables do not need.
"""
