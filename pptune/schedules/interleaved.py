"""Interleaved 1F1B (arXiv 2104.04473, section 2.2.2) with a settable micro-batch group size."""

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
    total = num_chunks * num_microbatches
    for rank in range(num_ranks):
        offsets[rank] = at
        num_warmup = min((num_chunks - 1) * group + 2 * (num_ranks - 1 - rank), total)
        f_first = 0
        f_size = min(group, num_microbatches)
        f_chunk = 0
        f_at = 0
        b_first = 0
        b_size = f_size
        b_chunk = num_chunks - 1
        b_at = 0
        for slot in range(total + num_warmup):
            if slot < total:
                works[at] = F
                stages[at] = f_chunk * num_ranks + rank
                microbatches[at] = f_first + f_at
                at += 1
                f_at += 1
                if f_at == f_size:
                    f_at = 0
                    f_chunk += 1
                    if f_chunk == num_chunks:
                        f_chunk = 0
                        f_first += f_size
                        f_size = min(group, num_microbatches - f_first)
            if slot >= num_warmup:
                works[at] = B
                stages[at] = b_chunk * num_ranks + rank
                microbatches[at] = b_first + b_at
                at += 1
                b_at += 1
                if b_at == b_size:
                    b_at = 0
                    b_chunk -= 1
                    if b_chunk < 0:
                        b_chunk = num_chunks - 1
                        b_first += b_size
                        b_size = min(group, num_microbatches - b_first)
    offsets[num_ranks] = at
