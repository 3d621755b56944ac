"""Refit: sending the learner's weights into running engines, and proof of their arrival.

Modules in the order of a refit: `gate` starts and checks a refit in the driver, `channel` drives one of the channels,
`stream` and `vllm` are the learner's half, `slipstream.engine.weight_transfer` is the engine's half, and `fingerprint`
computes the numbers that both sides compare.
"""
