"""An open, calibrated simulator of speculative RL steps: numpy and plain Python only. docs/simulator.md derives it."""
