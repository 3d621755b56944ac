"""Check of a machine's GPUs: `slipstream gpu-check` proves, in stages, what tests on CPUs cannot."""
