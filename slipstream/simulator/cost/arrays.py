"""The one array type of the simulator; a suffix of a name says what its axes are."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
