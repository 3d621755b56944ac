"""Refit: sending the learner's weights into running engines, and proof of their arrival.

In the driver `gate` starts and checks a refit, and `channel` drives the transfer. `stream` and `vllm` are the learner's
half of a transfer, and `slipstream.engine.weight_transfer` is the engine's half. `fingerprint` computes the numbers
that both sides compare.
"""
