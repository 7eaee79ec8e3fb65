"""ZB-V: two stages per rank in a V, so that rank 0 has the first and the last (arXiv 2401.10241,
section 6), as torch's ScheduleZBVZeroBubble orders it.

No bubble inside the step when F = I = W. An order of fewer than 2 P - 1 micro-batches is the one of
2 P - 1 with the others left out.
"""

from typing import Any

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.order import MICROBATCH_SHIFT, STAGE_SHIFT, Codes, Cycle, Order, Shape
from pptune.schedules.sizes import need_chunks

_FORWARD = int(Work.FORWARD)
_INPUT = int(Work.BACKWARD_INPUT)
_WEIGHT = int(Work.BACKWARD_WEIGHT)


def order(shape: Shape) -> Order:
    need_chunks("zb-v", shape, exactly=2)
    num_ranks, _, num_microbatches, _ = shape

    def make() -> Codes:
        coded = Codes.empty(num_ranks, 6 * num_microbatches)
        _fill(num_ranks, num_microbatches, *coded)
        return coded

    return Order(
        num_ranks=num_ranks,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        placement="v",
        make=make,
        backwards="split",
        cycle=_cycle(num_ranks, num_microbatches),
        with_microbatches=lambda count: order(Shape(num_ranks, 2, count, 1)),
    )


def _cycle(num_ranks: int, num_microbatches: int) -> Cycle | None:
    """The stable phase: forward, input and weight part of either stage, once per micro-batch."""
    count, rest = divmod(num_microbatches - (2 * num_ranks - 1), num_ranks)
    if count < 1:
        return None
    # Warmup of rank r: 2 (P - r) - 1 forwards, r pairs of forwards, P - r triples.
    return Cycle(num_ranks, 6 * num_ranks, 5 * num_ranks - 1 + 6 * rest, -3, count)


@compiled("int64(int64[::1],int64,int64,int64,int64)", inner=True)
def _append(
    codes: Any, at: int, stage_and_work: int, microbatch: int, num_microbatches: int
) -> int:
    """Write an action unless its micro-batch doesn't exist; where the next one goes."""
    if microbatch >= num_microbatches:
        return at
    codes[at] = stage_and_work | microbatch << MICROBATCH_SHIFT
    return at + 1


@compiled("void(int64,int64,int64[::1],int64,int64[::1])")
def _fill(num_ranks: int, num_microbatches: int, codes: Any, width: int, lengths: Any) -> None:
    planned = max(num_microbatches, 2 * num_ranks - 1)
    for rank in range(num_ranks):
        at = rank * width
        down, up = rank << STAGE_SHIFT, (2 * num_ranks - 1 - rank) << STAGE_SHIFT
        # How many forwards, input and weight parts either stage has done.
        f_down, f_up, i_down, i_up, w_down, w_up = 0, 0, 0, 0, 0, 0
        for _ in range(2 * (num_ranks - rank) - 1):
            at = _append(codes, at, down | _FORWARD, f_down, num_microbatches)
            f_down += 1
        for _ in range(rank):
            at = _append(codes, at, up | _FORWARD, f_up, num_microbatches)
            at = _append(codes, at, down | _FORWARD, f_down, num_microbatches)
            f_up += 1
            f_down += 1
        for _ in range(num_ranks - rank):
            at = _append(codes, at, up | _FORWARD, f_up, num_microbatches)
            at = _append(codes, at, up | _INPUT, i_up, num_microbatches)
            at = _append(codes, at, up | _WEIGHT, i_up, num_microbatches)
            f_up += 1
            i_up += 1
        while f_up < planned:
            if f_down < planned:
                at = _append(codes, at, down | _FORWARD, f_down, num_microbatches)
                f_down += 1
            at = _append(codes, at, down | _INPUT, i_down, num_microbatches)
            at = _append(codes, at, down | _WEIGHT, i_down, num_microbatches)
            at = _append(codes, at, up | _FORWARD, f_up, num_microbatches)
            at = _append(codes, at, up | _INPUT, i_up, num_microbatches)
            at = _append(codes, at, up | _WEIGHT, i_up, num_microbatches)
            f_up += 1
            i_down += 1
            i_up += 1
        w_down, w_up = i_down, i_up
        for _ in range(rank):
            at = _append(codes, at, down | _INPUT, i_down, num_microbatches)
            at = _append(codes, at, up | _INPUT, i_up, num_microbatches)
            i_down += 1
            i_up += 1
        for _ in range(num_ranks - rank):
            at = _append(codes, at, down | _INPUT, i_down, num_microbatches)
            at = _append(codes, at, down | _WEIGHT, w_down, num_microbatches)
            i_down += 1
            w_down += 1
        for microbatch in range(w_up, i_up):
            at = _append(codes, at, up | _WEIGHT, microbatch, num_microbatches)
        for microbatch in range(w_down, i_down):
            at = _append(codes, at, down | _WEIGHT, microbatch, num_microbatches)
        lengths[rank] = at - rank * width
