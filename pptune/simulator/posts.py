"""Where an executor posts the receives of an order, and where it waits for sends."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pptune.executors import WAITS, Executor, Receive
from pptune.schedules.order import Order, padded
from pptune.simulator.arrays import NONE


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
        return Posts(posted_after, waits, ticks, produced_tick)
    from pptune.simulator.exchanges import place_exchanges

    place_exchanges(
        codes, width, lengths, order.num_stages, stride, rules.same_direction,
        rules.opposite_direction, NONE if rules.steady is None else rules.steady,
        rules.receive is Receive.AT_LAST_USE, posted_after, waits,
    )  # fmt: skip
    return Posts(posted_after, waits, np.empty(0, np.int32), np.empty(0, np.int32))
