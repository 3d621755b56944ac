"""Moving weights from the learner into running engines, and proving that they arrived.

In the order of the way: `channel` (which way they take, as the driver holds it), `snapshot` (a file in memory that both
sides see) or `stream` with `vllm` (what the learner sends), `slipstream.engine.weight_transfer` (the engine
takes them), `fingerprint` (what both sides compare), `gate` (decides whether the run goes on).
"""
