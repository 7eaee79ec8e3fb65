"""1F1B (PipeDream-Flush, arXiv 2006.09503): one forward, one backward in turn."""

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
        num_warmup = min(num_ranks - 1 - rank, num_microbatches)
        for slot in range(num_microbatches + num_warmup):
            if slot < num_microbatches:
                works[at] = F
                stages[at] = rank
                microbatches[at] = slot
                at += 1
            if slot >= num_warmup:
                works[at] = B
                stages[at] = rank
                microbatches[at] = slot - num_warmup
                at += 1
    offsets[num_ranks] = at
