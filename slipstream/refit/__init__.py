"""Moving weights from the learner into running engines, and proving that they arrived.

In the order of the way: `snapshot` (the learner writes), `engine_transfer` and `engine_weights` (the engine reads),
`fingerprint` (what both sides compare), `gate` (decides whether the run goes on).
"""
