"""Moving weights from the learner into running engines, and proving that they arrived.

In the order of the way: `channel` (how they travel; `snapshot` where that is a file in memory),
`slipstream.engine.weight_transfer` (the engine takes them), `fingerprint` (what both sides
compare), `gate` (decides whether the run goes on).
"""
