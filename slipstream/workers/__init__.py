"""The processes of a run, as Ray actors: engines and learner ranks. The only place that imports Ray."""
