"""Where torch's schedule runtime posts its receives.

torch lowers a compute-only order to one with sends and receives (schedules.py:
_add_unshard_reshard, _add_reduce_grad, _add_send_recv) by walking all ranks in step. In every tick
each rank, lowest first, does its next entry if what that needs is there; when an entry sends, its
receive is appended to the receiver's list, behind what that rank has done by then. Entries are
actions, an overlapped pair counting as one, and what torch adds for sharded parameters and gradient
reduction; those take a tick whether or not they do anything.
"""

from typing import Any

import numpy as np

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.order import (
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    PAIR_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    WORK_MASK,
)
from pptune.simulator.arrays import NONE

_FORWARD = int(Work.FORWARD)
_BACKWARD = int(Work.BACKWARD)
_WEIGHT = int(Work.BACKWARD_WEIGHT)


@compiled("void(int64[::1],int64,int64[::1],int64,int64[::1],int32[::1])", inner=True)
def _count_extra(
    codes: Any, width: int, lengths: Any, num_microbatches: int, done: Any, extra: Any
) -> None:
    """Ticks that torch's own entries take before every action.

    Parameters of the next three stages of a rank's list are kept gathered: a stage that leaves that
    set costs an entry, and so does one that joins it. A stage's last backward is followed by one to
    reduce its gradients.
    """
    for rank in range(lengths.size):
        begin, end = rank * width, rank * width + lengths[rank]
        recent = (NONE, NONE, NONE)
        for at in range(end - 1, begin - 1, -1):
            stage = codes[at] >> STAGE_SHIFT & STAGE_MASK
            # What the next action needs gathered or let go; after the last one nothing is asked.
            entries = 0
            if stage == recent[1]:
                recent = (stage, recent[0], recent[2])
            elif stage == recent[2]:
                recent = (stage, recent[0], recent[1])
            elif stage != recent[0]:
                entries = 1 if recent[2] == NONE else 2
                recent = (stage, recent[0], recent[1])
            if at + 1 < end:
                extra[at + 1] = entries
        extra[begin] = 0
        for stage in recent:
            extra[begin] += stage != NONE
    done[:] = 0
    for rank in range(lengths.size):
        carried = 0
        for at in range(rank * width, rank * width + lengths[rank]):
            code = codes[at]
            extra[at] += carried
            carried = 0
            work, stage = code & WORK_MASK, code >> STAGE_SHIFT & STAGE_MASK
            if work in (_BACKWARD, _WEIGHT):
                done[stage] += 1
                carried += done[stage] == num_microbatches
            if code >> PAIR_SHIFT != 0:
                # Nothing goes between the two of a pair.
                carried += extra[at + 1]
                extra[at + 1] = 0


@compiled(
    "void(int64[::1],int64,int64[::1],int64,int64[::1],int64,int32[::1],int32[::1],int32[::1])"
)
def lower_torch(
    codes: Any, width: int, lengths: Any, num_microbatches: int, rank_of: Any, stride: int,
    posted_after: Any, ticks: Any, produced_tick: Any,
) -> None:  # fmt: skip
    """Fill `posted_after`, `ticks` and `produced_tick` (see posts.py). Where the order deadlocks,
    the rest stays as it is."""
    num_ranks, num_stages = lengths.size, rank_of.size
    extra = np.empty(codes.size, np.int32)
    _count_extra(codes, width, lengths, num_microbatches, np.empty(num_stages, np.int64), extra)
    places, free_from = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    progress = True
    while progress:
        progress = False
        for rank in range(num_ranks):
            row, at = rank * width, places[rank]
            while at < lengths[rank]:
                # A pair is one entry, which needs the inputs of both.
                size = 1 + (codes[row + at] >> PAIR_SHIFT != 0)
                tick = free_from[rank] + extra[row + at]
                ready = True
                for member in range(at, at + size):
                    code = codes[row + member]
                    work, stage = code & WORK_MASK, code >> STAGE_SHIFT & STAGE_MASK
                    source = stage - 1 if work == _FORWARD else stage + 1
                    if work == _WEIGHT or not 0 <= source < num_stages or rank_of[source] == rank:
                        continue
                    message = source if work == _FORWARD else num_stages + source
                    microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
                    needed = produced_tick[message * stride + microbatch]
                    ready = ready and needed != NONE
                    # A lower rank goes first in a tick.
                    tick = max(tick, needed + (rank_of[source] > rank))
                if not ready:
                    break
                for member in range(at, at + size):
                    code = codes[row + member]
                    work, stage = code & WORK_MASK, code >> STAGE_SHIFT & STAGE_MASK
                    ticks[row + member] = tick
                    if work != _WEIGHT:
                        message = stage if work == _FORWARD else num_stages + stage
                        microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
                        produced_tick[message * stride + microbatch] = tick
                free_from[rank] = tick + 1
                at += size
                progress = True
            places[rank] = at
    following = np.empty(2, np.int64)
    for rank in range(num_ranks):
        # Ticks only grow along a list, so one pass over each receiver's list is enough.
        following[:] = 0
        for at in range(places[rank]):
            code = codes[rank * width + at]
            work, stage = code & WORK_MASK, code >> STAGE_SHIFT & STAGE_MASK
            target = stage + 1 if work == _FORWARD else stage - 1
            if work == _WEIGHT or not 0 <= target < num_stages or rank_of[target] == rank:
                continue
            receiver = rank_of[target]
            link = 0 if (receiver - rank) % num_ranks == 1 else 1
            # What the receiver has done by then, in the same tick only if it is the lower rank.
            until = ticks[rank * width + at] + (receiver < rank)
            position = following[link]
            while position < places[receiver] and ticks[receiver * width + position] < until:
                position += 1
            following[link] = position
            message = stage if work == _FORWARD else num_stages + stage
            microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
            posted_after[message * stride + microbatch] = position - 1
