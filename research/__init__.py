"""One-off studies of drafts and draft lengths, and the log of what was tried."""
