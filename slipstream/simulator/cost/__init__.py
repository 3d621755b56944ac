"""What an iteration, a rollout and a step cost: pure functions of a layout and of the cost model's parameters."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""The one array type of the simulator; a suffix of a name says what its axes are."""
