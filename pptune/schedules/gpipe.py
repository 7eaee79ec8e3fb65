"""GPipe: all forwards, then all backwards (arXiv 1811.06965)."""

from typing import Any

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled

F, B = int(Work.FORWARD), int(Work.BACKWARD)


@compiled("void(int64,int64,int64,int64,int8[::1],int32[::1],int32[::1],int64[::1])")
def fill(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int,
    works: Any,
    stages: Any,
    microbatches: Any,
    offsets: Any,
) -> None:
    at = 0
    for rank in range(num_ranks):
        offsets[rank] = at
        for work in (F, B):
            for microbatch in range(num_microbatches):
                works[at] = work
                stages[at] = rank
                microbatches[at] = microbatch
                at += 1
    offsets[num_ranks] = at
