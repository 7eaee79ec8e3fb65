"""Where an executor posts the receives of an order, and where it waits for sends."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pptune.executors import WAITS, Executor, Receive
from pptune.schedules.action import Work
from pptune.schedules.order import (
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    WORK_MASK,
    Order,
    padded,
)
from pptune.simulator.arrays import NAME_SHIFT, NONE, NUM_KIND

_NO_STREAMS = np.empty((0, 0), np.int64)


class Posts(NamedTuple):
    """What the compiled loops need of an executor; message arrays as in arrays.py."""

    posted_after: NDArray[np.int32]
    """By message: position, in the receiver's list, of the action that its receive follows, or NONE
    where it is posted before the first."""
    waits: NDArray[np.int8]
    """By action, as in the order's codes: the Wait for its message."""
    ticks: NDArray[np.int32]
    """By action: its tick in torch's lowering. This and the next are empty for other executors."""
    produced_tick: NDArray[np.int32]
    """By message: tick of the action that produces it."""
    streams: NDArray[np.int64]
    """Names of the messages that each rank sends or receives, in the order in which it posts them,
    [num_ranks, most]; empty where that does not matter. For names see two_sided.py."""


def posts_of(order: Order, executor: Executor) -> Posts:
    """The posts of `order`; kept with the order."""
    if executor not in order.cache:
        order.cache[executor] = _make_posts(order, executor)
    posts: Posts = order.cache[executor]
    return posts


def _make_posts(order: Order, executor: Executor) -> Posts:
    rules = WAITS[executor]
    codes, width, lengths = order.coded
    stride = padded(order.num_microbatches)
    size = (2 * order.num_stages + 2) * stride
    posted_after = np.full(size, NONE, np.int32)
    waits = np.zeros(codes.size, np.int8)
    if rules.receive is Receive.LOWERED:
        from pptune.simulator.lowering import lower_torch

        ticks, produced_tick = np.zeros(codes.size, np.int32), np.full(size, NONE, np.int32)
        lower_torch(
            codes, width, lengths, order.num_microbatches, order.rank_of_stage, stride,
            posted_after, ticks, produced_tick,
        )  # fmt: skip
        streams = _streams(order, ticks) if rules.one_at_a_time else _NO_STREAMS
        return Posts(posted_after, waits, ticks, produced_tick, streams)
    from pptune.simulator.exchanges import place_exchanges

    place_exchanges(
        codes, width, lengths, order.num_stages, stride, rules.same_direction,
        rules.opposite_direction, NONE if rules.steady is None else rules.steady,
        rules.receive is Receive.AT_LAST_USE, posted_after, waits,
    )  # fmt: skip
    nothing = np.empty(0, np.int32)
    return Posts(posted_after, waits, nothing, nothing, _NO_STREAMS)


def _streams(order: Order, ticks: NDArray[np.int32]) -> NDArray[np.int64]:
    """A send and its receive are appended to both ranks' lists when the sender's tick comes, lowest
    rank first; that is one order for all."""
    codes, width, lengths = order.coded
    at = np.flatnonzero(np.tile(np.arange(width), order.num_ranks) < np.repeat(lengths, width))
    work, stage = codes[at] & WORK_MASK, codes[at] >> STAGE_SHIFT & STAGE_MASK
    target = np.where(work == Work.FORWARD, stage + 1, stage - 1)
    has_target = (work != Work.BACKWARD_WEIGHT) & (target >= 0) & (target < order.num_stages)
    at, target = at[has_target], target[has_target]
    sender, receiver = at // width, order.rank_of_stage[target]
    away = sender != receiver
    at, sender, receiver = at[away], sender[away], receiver[away]
    turn = np.lexsort((at, sender, ticks[at]))
    names = (
        codes & KIND_MASK
    ) * NUM_KIND << NAME_SHIFT | codes >> MICROBATCH_SHIFT & MICROBATCH_MASK
    rows = [
        names[at[turn][(sender[turn] == rank) | (receiver[turn] == rank)]]
        for rank in range(order.num_ranks)
    ]
    streams = np.full((order.num_ranks, max(map(len, rows)) + 1), NONE)
    for rank, row in enumerate(rows):
        streams[rank, : len(row)] = row
    return streams
