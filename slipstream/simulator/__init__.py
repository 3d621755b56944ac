"""An open, calibrated simulator of speculative RL steps, in numpy but for the fits. docs/simulator.md derives it."""
