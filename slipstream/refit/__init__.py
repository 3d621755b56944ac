"""Refit: sending the learner's weights into running engines, and proof of their arrival.

Modules in the order of a refit: `gate` starts and checks a refit, `channel` drives one of the ways, `snapshot` writes
files in shared memory, `stream` and `vllm` send from the learner, `slipstream.engine.weight_transfer` loads weights in
the engine, and `fingerprint` computes the numbers that both sides compare.
"""
