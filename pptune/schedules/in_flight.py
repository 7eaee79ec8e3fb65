"""How much a rank holds at once, counted from its order."""

from typing import Any

import numpy as np

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled

FORWARD, BACKWARD_INPUT = int(Work.FORWARD), int(Work.BACKWARD_INPUT)


@compiled("float64[::1](int8[::1],int32[::1],int64[::1],float64[::1])")
def peak(works: Any, stages: Any, offsets: Any, bytes_per_stage: Any) -> Any:
    """The largest sum of `bytes_per_stage` over what each rank holds. Shape [num_ranks]."""
    num_ranks = offsets.size - 1
    peaks = np.zeros(num_ranks)
    for rank in range(num_ranks):
        held = 0.0
        highest = 0.0
        for at in range(offsets[rank], offsets[rank + 1]):
            if works[at] == FORWARD:
                held += bytes_per_stage[stages[at]]
                highest = max(highest, held)
            elif works[at] != BACKWARD_INPUT:
                held -= bytes_per_stage[stages[at]]
        peaks[rank] = highest
    return peaks
