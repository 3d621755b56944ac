"""An open, calibrated simulator of speculative RL steps, in numpy but for the fits. docs/simulator.md derives it."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""The one array type of the simulator; a suffix of a name says what its axes are."""
