"""How much every rank holds at once, counted from its order."""

from typing import Any

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.order import STAGE_MASK, STAGE_SHIFT, WORK_MASK

_FORWARD, _INPUT = int(Work.FORWARD), int(Work.BACKWARD_INPUT)


@compiled("void(int64[::1],int64,int64[::1],float64[::1],float64[::1])")
def fill_peaks(codes: Any, width: int, lengths: Any, bytes_per_stage: Any, peaks: Any) -> None:
    """Write the largest sum of `bytes_per_stage` over what each rank holds to `peaks`, [num_ranks].

    A stage's micro-batch is held from its forward until its full backward or weight part.
    """
    for rank in range(lengths.size):
        held = 0.0
        highest = 0.0
        for at in range(rank * width, rank * width + lengths[rank]):
            code = codes[at]
            work = code & WORK_MASK
            num_bytes = bytes_per_stage[code >> STAGE_SHIFT & STAGE_MASK]
            if work == _FORWARD:
                held += num_bytes
                highest = max(highest, held)
            elif work != _INPUT:
                held -= num_bytes
        peaks[rank] = highest
