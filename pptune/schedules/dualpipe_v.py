"""DualPipeV: two stages per rank in a V, forwards overlapped with backwards, as torch's
ScheduleDualPipeV orders it (after github.com/deepseek-ai/DualPipe; arXiv 2412.19437, section 3.2).

An overlapped pair is a forward followed by a full backward; the trainer may run them at once, and
neither sends before both are done.
"""

from typing import Any

import numpy as np

from pptune.errors import PlanError
from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.order import (
    MICROBATCH_SHIFT,
    PAIR_SHIFT,
    STAGE_SHIFT,
    Codes,
    Cycle,
    Order,
    Shape,
)
from pptune.schedules.sizes import need_chunks

_FORWARD = int(Work.FORWARD)
_BACKWARD = int(Work.BACKWARD)
_INPUT = int(Work.BACKWARD_INPUT)
_WEIGHT = int(Work.BACKWARD_WEIGHT)
_PAIR = 1 << PAIR_SHIFT

_DOWN, _UP = 0, 1
"""The stage on the way down the V and the one on the way back up."""
_OWED = 2
"""Counters [side, kind]: the next forward and backward of either side; in column _OWED how many
weight parts were done (row _DOWN) and how many were owed in all (row _UP)."""


def order(shape: Shape) -> Order:
    need_chunks("dualpipe-v", shape, exactly=2)
    num_ranks, _, num_microbatches, _ = shape
    if num_microbatches < 2 * num_ranks:
        raise PlanError(
            f"dualpipe-v needs at least as many micro-batches as stages, but there are "
            f"{num_microbatches} and {2 * num_ranks}; use {2 * num_ranks} or more"
        )

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
        backwards="mixed",
        cycle=_cycle(num_ranks, num_microbatches),
        with_microbatches=lambda count: order(Shape(num_ranks, 2, count, 1)),
    )


def _cycle(num_ranks: int, num_microbatches: int) -> Cycle | None:
    """The main step's pairs, forward down with backward up and forward up with backward down; from
    the second on, because the last rank's first pair is not overlapped."""
    count, rest = divmod(num_microbatches - 2 * num_ranks, num_ranks)
    if count < 1:
        return None
    # Before it rank r does 5 (P - 1 - r) + 2 (r + 1) actions and the first 4 of the main step.
    first = 5 * (num_ranks - 1) + 2 + 4 * (1 + rest)
    return Cycle(num_ranks, 4 * num_ranks, first, -3, count)


@compiled(
    "int64(int64[::1],int64,int64,int64,int64,int64,int64,int64[:,::1],int64[::1])", inner=True
)
def _do(
    codes: Any,
    at: int,
    side: int,
    work: int,
    pair: int,
    rank: int,
    num_ranks: int,
    following: Any,
    owed: Any,
) -> int:
    """Write the side's next forward or backward; an input part owes its weight part."""
    stage = rank if side == _DOWN else 2 * num_ranks - 1 - rank
    kind = 0 if work == _FORWARD else 1
    code = following[side, kind] << MICROBATCH_SHIFT | stage << STAGE_SHIFT
    following[side, kind] += 1
    if work == _INPUT:
        owed[following[_UP, _OWED]] = code | _WEIGHT
        following[_UP, _OWED] += 1
    codes[at] = code | work | pair
    return at + 1


@compiled("int64(int64[::1],int64,int64[:,::1],int64[::1])", inner=True)
def _do_owed(codes: Any, at: int, following: Any, owed: Any) -> int:
    """Write the weight part that has been owed longest, if any."""
    if following[_DOWN, _OWED] == following[_UP, _OWED]:
        return at
    codes[at] = owed[following[_DOWN, _OWED]]
    following[_DOWN, _OWED] += 1
    return at + 1


@compiled("void(int64,int64,int64[::1],int64,int64[::1])")
def _fill(num_ranks: int, num_microbatches: int, codes: Any, width: int, lengths: Any) -> None:
    following = np.empty((2, 3), np.int64)
    owed = np.empty(2 * num_microbatches, np.int64)
    for rank in range(num_ranks):
        following[:] = 0
        after = num_ranks - 1 - rank
        at = rank * width
        for _ in range(2 * after):
            at = _do(codes, at, _DOWN, _FORWARD, 0, rank, num_ranks, following, owed)
        for _ in range(rank + 1):
            at = _do(codes, at, _DOWN, _FORWARD, 0, rank, num_ranks, following, owed)
            at = _do(codes, at, _UP, _FORWARD, 0, rank, num_ranks, following, owed)
        for _ in range(after):
            at = _do(codes, at, _UP, _INPUT, 0, rank, num_ranks, following, owed)
            at = _do_owed(codes, at, following, owed)
            at = _do(codes, at, _UP, _FORWARD, 0, rank, num_ranks, following, owed)
        for turn in range(num_microbatches - 2 * num_ranks + rank + 1):
            # The last rank's first pair is not overlapped, which shortens the bubble.
            pair = 0 if turn == 0 and after == 0 else _PAIR
            at = _do(codes, at, _DOWN, _FORWARD, pair, rank, num_ranks, following, owed)
            at = _do(codes, at, _UP, _BACKWARD, 0, rank, num_ranks, following, owed)
            at = _do(codes, at, _UP, _FORWARD, _PAIR, rank, num_ranks, following, owed)
            at = _do(codes, at, _DOWN, _BACKWARD, 0, rank, num_ranks, following, owed)
        for _ in range(after):
            at = _do(codes, at, _UP, _BACKWARD, 0, rank, num_ranks, following, owed)
            at = _do(codes, at, _UP, _FORWARD, _PAIR, rank, num_ranks, following, owed)
            at = _do(codes, at, _DOWN, _BACKWARD, 0, rank, num_ranks, following, owed)
        # Half way through the next step backwards are split: after the middle turn's backward up
        # on even ranks, before it on odd ones.
        first_split = 2 * ((rank + 1) // 2) + 1 - rank % 2
        backwards = 0
        for _ in range(rank + 1):
            for side in (_UP, _DOWN):
                work = _INPUT if backwards >= first_split else _BACKWARD
                at = _do(codes, at, side, work, 0, rank, num_ranks, following, owed)
                backwards += 1
        for _ in range(after):
            at = _do_owed(codes, at, following, owed)
            at = _do(codes, at, _DOWN, work, 0, rank, num_ranks, following, owed)
        for _ in range(rank + 1):
            at = _do_owed(codes, at, following, owed)
        lengths[rank] = at - rank * width
