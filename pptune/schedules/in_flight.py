"""How much every rank holds at once, counted from its order."""

from typing import Any

import numpy as np

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.order import STAGE_MASK, STAGE_SHIFT, WORK_MASK

_FORWARD, _INPUT = int(Work.FORWARD), int(Work.BACKWARD_INPUT)


@compiled("float64[::1](int64[:,::1],int64[::1],float64[::1])")
def peak(codes: Any, lengths: Any, bytes_per_stage: Any) -> Any:
    """The largest sum of `bytes_per_stage` over what each rank holds. Shape [num_ranks].

    A stage's micro-batch is held from its forward until its full backward or weight part.
    """
    peaks = np.zeros(lengths.size)
    for rank in range(lengths.size):
        held = 0.0
        highest = 0.0
        for code in codes[rank, : lengths[rank]]:
            work = code & WORK_MASK
            num_bytes = bytes_per_stage[code >> STAGE_SHIFT & STAGE_MASK]
            if work == _FORWARD:
                held += num_bytes
                highest = max(highest, held)
            elif work != _INPUT:
                held -= num_bytes
        peaks[rank] = highest
    return peaks
