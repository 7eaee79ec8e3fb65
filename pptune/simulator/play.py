"""Plays a step in which a message needs nobody to wait for it once it is sent.

Every rank in turn goes on until it needs a message that has not been sent. Each time is the latest
of some earlier ones plus a constant, so the order of the visits does not matter.
"""

from typing import Any

import numpy as np

from pptune.schedules.compiled import compiled
from pptune.schedules.order import KIND_MASK, MICROBATCH_MASK, MICROBATCH_SHIFT
from pptune.simulator.arrays import (
    CUTTING,
    DEADLOCK,
    DONE,
    ENDED,
    EXPOSED,
    FLOAT_INPUT_LAG,
    FLOAT_LATENCY,
    FLOAT_SEND,
    FLOAT_TOTAL,
    FLOAT_WIRE,
    GO_ON,
    INPUT,
    LEFT_OUT,
    LINK,
    NONE,
    NOW,
    NUM_KIND,
    OUTPUT,
    SAVED,
    SPENT,
    TOO_SHORT,
)
from pptune.simulator.cuts import next_cut, same_posts, same_state, set_limits, skip_cycles

_U = np.uint64
"""Unsigned indices spare the inner loop a check for negative ones."""


@compiled(
    "int64(int64[::1],int64,int64[::1],int64[::1],float64[::1],int64,boolean,boolean,"
    "float64[:,::1],int64[::1],float64[::1],float64[::1],float64[:,::1],float64[::1],"
    "int32[::1],int32[::1],int32[::1],int64[::1],int64[::1],int64[::1])"
)
def play(
    codes: Any, width: int, lengths: Any, kinds: Any, floats: Any, stride: int, wired: bool,
    lowered: bool, clocks: Any, places: Any, times: Any, others: Any, free: Any, done: Any,
    posted_after: Any, ticks: Any, produced_tick: Any, cycle: Any, cuts: Any, limits: Any,
) -> int:  # fmt: skip
    """Play on from where the arrays stand, to the end or to the last cut; how that went.

    `times` says when each message arrives and `others`, where wires are occupied, when it was
    produced. With `lowered` receives, a message is started by the receiver: `times` then says when
    it was sent, `others` when it arrives, and `done` when a rank had done an action. `limits` is
    room for a number per rank.
    """
    num_ranks = lengths.size
    status = GO_ON
    while status == GO_ON:
        remaining = set_limits(lengths, places, cycle, cuts, limits)
        before = remaining + 1
        while 0 < remaining < before:
            before = remaining
            for rank in range(num_ranks):
                at, limit = places[rank], limits[rank]
                if at == limit:
                    continue
                row, done_row = rank * width, rank * (width + 1) + 1
                now, spent, exposed = clocks[rank, NOW], clocks[rank, SPENT], clocks[rank, EXPOSED]
                remaining += at
                while at < limit:
                    code = codes[_U(row + at)]
                    kind = (code & KIND_MASK) * NUM_KIND
                    microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
                    slot = _U(kinds[_U(kind + INPUT)] + microbatch)
                    arrived = times[slot]
                    if arrived < 0.0:
                        break
                    lag = floats[_U(kind + FLOAT_INPUT_LAG)]
                    if lowered:
                        produced = arrived - lag
                        posted = done[_U(done_row + posted_after[slot])]
                        link = _U(kinds[_U(kind + LINK)])
                        left = max(max(arrived, posted), free[0, link])
                        left += floats[_U(kind + FLOAT_WIRE)]
                        free[0, link] = left
                        arrived = left + floats[_U(kind + FLOAT_LATENCY)]
                        others[slot] = arrived
                        lag = arrived - produced
                    elif wired:
                        lag = arrived - others[slot]
                    start = max(now, arrived)
                    # Waiting is bubble until the producer had finished and exposed after that.
                    exposed += min(start - now, lag)
                    total = floats[_U(kind + FLOAT_TOTAL)]
                    now = start + total
                    spent += total
                    left = now
                    slot = _U(kinds[_U(kind + OUTPUT)] + microbatch)
                    if lowered:
                        done[_U(done_row + at)] = now
                        times[slot] = now
                    else:
                        if wired:
                            others[slot] = now - floats[_U(kind + FLOAT_SEND)]
                            link = _U(kinds[_U(kind + LINK)])
                            left = max(now, free[0, link]) + floats[_U(kind + FLOAT_WIRE)]
                            free[0, link] = left
                        times[slot] = left + floats[_U(kind + FLOAT_LATENCY)]
                    at += 1
                remaining -= at
                places[rank] = at
                clocks[rank, NOW], clocks[rank, SPENT], clocks[rank, EXPOSED] = now, spent, exposed
        if cuts[CUTTING] == 0:
            for rank in range(num_ranks):
                kind = (codes[rank * width + lengths[rank] - 1] & KIND_MASK) * NUM_KIND
                clocks[rank, ENDED] = clocks[rank, NOW] - floats[kind + FLOAT_SEND]
            return DONE if remaining == 0 else DEADLOCK
        if remaining > 0:
            # Some action before the cut needs one after it, so it is no cut.
            cuts[CUTTING] = 0
            status = GO_ON if cycle[LEFT_OUT] == 0 else TOO_SHORT
        elif (
            cuts[SAVED] != NONE
            and same_state(
                codes, width, lengths, places, kinds, clocks, free, times,
                times if lowered else others, stride, cycle, cuts,
            )
            and (
                not lowered
                or same_posts(
                    codes, width, lengths, places, kinds, clocks, times, done, posted_after, ticks,
                    produced_tick, stride, cycle, cuts,
                )
            )
        ):  # fmt: skip
            status = skip_cycles(clocks, cycle, cuts)
        else:
            status = next_cut(clocks, free, cycle, cuts)
    return status
