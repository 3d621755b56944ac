"""The ways that weights travel from the learner to the engines, behind one protocol.

- `choice`: which channel fits where learner and engines run, and which the hosts cannot do.
- `driver`: `WeightChannel`, what the refit gate asks: `send` brings policy and draft to every engine.
- `source`, `buckets`: weights as a stream that nobody holds whole, and the bytes of it in buckets.
- `sender`: the learner's half; `gloo` over the network between CPUs, `vllm` by vLLM's own NCCL and CUDA IPC engines.

The engines' half is `slipstream.engine.weight_transfer`; shared memory is `slipstream.refit.snapshot`.
"""
