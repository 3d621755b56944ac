"""Calibrated simulator of speculative RL steps; docs/simulator.md derives the model."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""Array type of the simulator; the suffix of an array's name lists its axes."""
