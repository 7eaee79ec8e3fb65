import numpy as np
from numpy.typing import NDArray

def stage_sums(
    per_layer: NDArray[np.float64], layers_per_stage: tuple[int, ...]
) -> NDArray[np.float64]: ...
