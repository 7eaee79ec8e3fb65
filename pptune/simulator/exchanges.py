"""Where ranks post receives and wait for sends whose runtime steps from action to action."""

from typing import Any

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.order import (
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    WORK_MASK,
)
from pptune.simulator.arrays import NONE

_FORWARD, _WEIGHT = int(Work.FORWARD), int(Work.BACKWARD_WEIGHT)


@compiled(
    "void(int64[::1],int64,int64[::1],int64,int64,int64,int64,int64,boolean,int32[::1],int8[::1])"
)
def place_exchanges(
    codes: Any, width: int, lengths: Any, num_stages: int, stride: int, same_direction: int,
    opposite_direction: int, steady: int, ahead: bool, posted_after: Any, waits: Any,
) -> None:  # fmt: skip
    """Fill `posted_after` (by message: position of the action that its receive follows, or NONE for
    the start of the step) and `waits` (by action: the Wait for its message).

    `steady` is the Wait from the action before a rank's first backward to its last forward, or NONE
    for no such phase; with `ahead`, receives are posted there one exchange ahead.
    """
    for rank in range(lengths.size):
        row, length = rank * width, lengths[rank]
        first_backward, last_forward = length, 0
        for at in range(length):
            if codes[row + at] & WORK_MASK == _FORWARD:
                last_forward = at
            else:
                first_backward = min(first_backward, at)
        # Where the last forward and the last backward before this action were; the first backward
        # is received with the exchange before the steady phase.
        previous_forward, previous_backward = NONE, max(first_backward - 2, NONE)
        for at in range(length):
            code = codes[row + at]
            work = code & WORK_MASK
            wait = same_direction
            if at + 1 < length:
                following = codes[row + at + 1] & WORK_MASK
                if (following == _FORWARD) != (work == _FORWARD):
                    wait = opposite_direction
            in_steady = first_backward - 1 <= at <= last_forward
            waits[row + at] = steady if steady != NONE and in_steady else wait
            if work == _WEIGHT:
                continue
            previous = previous_forward if work == _FORWARD else previous_backward
            early = first_backward - 1 <= previous <= last_forward or at == first_backward
            stage = code >> STAGE_SHIFT & STAGE_MASK
            source = stage - 1 if work == _FORWARD else num_stages + stage + 1
            if (work == _FORWARD and stage > 0) or (work != _FORWARD and stage + 1 < num_stages):
                microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
                post = previous if ahead and early else at - 1
                posted_after[source * stride + microbatch] = post
            if work == _FORWARD:
                previous_forward = at
            else:
                previous_backward = at
