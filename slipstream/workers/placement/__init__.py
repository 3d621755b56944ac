"""Where a run's processes belong: which learner rank and which engine on which GPU, and whether their memory holds."""
