"""Plays a step in which ranks wait for what they send, or messages overtake each other.

As play.py does, but every message is started by whichever end finds that both have posted it, in
the order in which the messages of a link were sent, and a rank may have to see a message of its own
arrive before it goes on.
"""

from typing import Any

from pptune.executors import Wait
from pptune.schedules.compiled import compiled
from pptune.schedules.order import KIND_MASK, MICROBATCH_MASK, MICROBATCH_SHIFT, PAIR_SHIFT
from pptune.simulator.arrays import (
    CUT,
    CUTTING,
    CYCLE_MICROBATCHES,
    DEADLOCK,
    DONE,
    ENDED,
    EXPOSED,
    FLOAT_LATENCY,
    FLOAT_SEND,
    FLOAT_TOTAL,
    FLOAT_WIRE,
    GO_ON,
    HALFWAY,
    HELD,
    INPUT,
    INPUT_LINK,
    LAST,
    LEFT_OUT,
    LINK,
    NEXT,
    NONE,
    NOW,
    NUM_KIND,
    OUTPUT,
    PENDING,
    SAVED,
    SAVED_NOW,
    SPENT,
    TOO_SHORT,
    UNKNOWN,
)
from pptune.simulator.cuts import moved, next_cut, same_posts, same_state, set_limits, skip_cycles

_NEVER, _AFTER_NEXT = int(Wait.NEVER), int(Wait.AFTER_NEXT)
_BEFORE_RECEIVE, _WITH_RECEIVE = int(Wait.BEFORE_RECEIVE), int(Wait.WITH_RECEIVE)
_KIND_SHIFT = 32
_MICROBATCH = (1 << _KIND_SHIFT) - 1
"""A message's name: where the kind of its producer begins << 32 | its micro-batch."""


@compiled("int64(int64,int64[::1])", inner=True)
def _place(name: int, kinds: Any) -> Any:
    """Where the message is in the message arrays."""
    return kinds[(name >> _KIND_SHIFT) + OUTPUT] + (name & _MICROBATCH)


@compiled(
    "float64(int64,int64,int64[::1],float64[::1],float64[::1],float64[::1],float64[:,::1],"
    "float64[::1],int64,int32[::1],int64[::1],int64[:,::1])",
    inner=True,
)
def _arrival(
    slot: int, link: int, kinds: Any, floats: Any, sent: Any, arrived: Any, free: Any, done: Any,
    width: int, posted_after: Any, following: Any, queues: Any,
) -> Any:  # fmt: skip
    """When the message arrives, or UNKNOWN while it, or one sent before it on its link, is not
    posted at both ends. Starts what can start."""
    if arrived[slot] >= 0.0 or sent[slot] < 0.0:
        return arrived[slot]
    num_ranks = done.size // (width + 1)
    receiver = (link // 2 + (1 if link % 2 == 0 else num_ranks - 1)) % num_ranks
    row = receiver * (width + 1) + 1
    while True:
        first = queues[link, NEXT]
        at, kind = _place(first, kinds), first >> _KIND_SHIFT
        posted = done[row + posted_after[at]]
        if posted < 0.0:
            return UNKNOWN
        left = max(max(sent[at], posted), free[0, link]) + floats[kind + FLOAT_WIRE]
        free[0, link] = left
        arrived[at] = left + floats[kind + FLOAT_LATENCY]
        queues[link, NEXT] = following[at]
        if at == slot:
            return arrived[at]


@compiled("void(int64,float64,int64[::1],float64[::1],int64[::1],int64[:,::1])", inner=True)
def _send(name: int, now: float, kinds: Any, sent: Any, following: Any, queues: Any) -> None:
    """Post a message: put it behind the others of its link."""
    slot, link = _place(name, kinds), kinds[(name >> _KIND_SHIFT) + LINK]
    sent[slot] = now
    following[slot] = NONE
    if queues[link, NEXT] == NONE:
        queues[link, NEXT] = name
    else:
        following[_place(queues[link, LAST], kinds)] = name
    queues[link, LAST] = name


@compiled(
    "boolean(float64[:,::1],int64[:,::1],int64[::1],float64[::1],int64[::1],int64[::1])", inner=True
)
def _same_pending(clocks: Any, sends: Any, kinds: Any, arrived: Any, cycle: Any, cuts: Any) -> bool:
    """Whether messages that ranks wait to see arrive are those of the saved cut, moved."""
    shift = clocks[0, NOW] - clocks[0, SAVED_NOW]
    back = (cuts[CUT] - cuts[SAVED]) * cycle[CYCLE_MICROBATCHES]
    for rank in range(clocks.shape[0]):
        if sends[rank, PENDING] != NONE:
            slot = _place(sends[rank, PENDING], kinds)
            if not moved(arrived[slot], arrived[slot - back], shift):
                return False
    return True


@compiled(
    "int64(int64[::1],int64,int64[::1],int64[::1],float64[::1],int64,boolean,"
    "float64[:,::1],int64[::1],int64[:,::1],float64[::1],float64[::1],float64[::1],float64[:,::1],"
    "float64[::1],int64[::1],int64[:,::1],int8[::1],int32[::1],int32[::1],int32[::1],"
    "int64[::1],int64[::1],int64[::1])"
)
def play_two_sided(
    codes: Any, width: int, lengths: Any, kinds: Any, floats: Any, stride: int,
    pairs_together: bool, clocks: Any, places: Any, sends: Any, sent: Any, arrived: Any,
    produced: Any, free: Any, done: Any, following: Any, queues: Any, waits: Any,
    posted_after: Any, ticks: Any, produced_tick: Any, cycle: Any, cuts: Any, limits: Any,
) -> int:  # fmt: skip
    """Play on from where the arrays stand, to the end or to the last cut; how that went. `limits`
    is room for a number per rank."""
    num_ranks = lengths.size
    no_input, no_link = sent.size - 2 * stride, 2 * num_ranks
    status = GO_ON
    while status == GO_ON:
        remaining = set_limits(lengths, places, cycle, cuts, limits)
        progress = True
        while remaining > 0 and progress:
            progress = False
            for rank in range(num_ranks):
                at, limit = places[rank], limits[rank]
                now, spent, exposed = clocks[rank, NOW], clocks[rank, SPENT], clocks[rank, EXPOSED]
                row, done_row = rank * width, rank * (width + 1) + 1
                begin = at
                while at < limit:
                    code = codes[row + at]
                    kind = (code & KIND_MASK) * NUM_KIND
                    microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
                    pending = sends[rank, PENDING]
                    wait, own = _NEVER, 0.0
                    if pending != NONE:
                        wait = waits[row + at - 1]
                        own = _arrival(
                            _place(pending, kinds), kinds[(pending >> _KIND_SHIFT) + LINK], kinds,
                            floats, sent, arrived, free, done, width, posted_after, following,
                            queues,
                        )  # fmt: skip
                    output = kinds[kind + OUTPUT] + microbatch
                    if sends[rank, HALFWAY] == 0:
                        if wait == _BEFORE_RECEIVE:
                            if own < 0.0:
                                break
                            exposed += max(own - now, 0.0)
                            now = max(now, own)
                            done[done_row + at - 1] = now
                            sends[rank, PENDING] = NONE
                            progress = True
                        release, source_end = now, now
                        slot = kinds[kind + INPUT] + microbatch
                        if kinds[kind + INPUT] != no_input:
                            release = _arrival(
                                slot, kinds[kind + INPUT_LINK], kinds, floats, sent, arrived, free,
                                done, width, posted_after, following, queues,
                            )  # fmt: skip
                            if release < 0.0:
                                break
                            source_end = produced[slot]
                        if wait == _WITH_RECEIVE:
                            if own < 0.0:
                                break
                            release = max(release, own)
                            sends[rank, PENDING] = NONE
                        if release > now:
                            exposed += release - min(max(now, source_end), release)
                            now = release
                        total = floats[kind + FLOAT_TOTAL]
                        now += total - floats[kind + FLOAT_SEND]
                        spent += total
                        produced[output] = now
                        clocks[rank, ENDED] = now
                        progress = True
                    if wait == _AFTER_NEXT:
                        if own < 0.0:
                            sends[rank, HALFWAY] = 1
                            break
                        exposed += max(own - now, 0.0)
                        now = max(now, own)
                        sends[rank, PENDING] = NONE
                    sends[rank, HALFWAY] = 0
                    name = kind << _KIND_SHIFT | microbatch
                    if pairs_together and code >> PAIR_SHIFT != 0:
                        if kinds[kind + LINK] != no_link:
                            sends[rank, HELD] = name
                    else:
                        held = sends[rank, HELD]
                        if held != NONE:
                            now += floats[(held >> _KIND_SHIFT) + FLOAT_SEND]
                            _send(held, now, kinds, sent, following, queues)
                            sends[rank, HELD] = NONE
                        if kinds[kind + LINK] != no_link:
                            now += floats[kind + FLOAT_SEND]
                            _send(name, now, kinds, sent, following, queues)
                            if waits[row + at] != _NEVER:
                                sends[rank, PENDING] = name
                    if sends[rank, PENDING] == NONE or waits[row + at] != _BEFORE_RECEIVE:
                        done[done_row + at] = now
                    at += 1
                remaining -= at - begin
                progress = progress or at > begin
                places[rank] = at
                clocks[rank, NOW], clocks[rank, SPENT], clocks[rank, EXPOSED] = now, spent, exposed
        if cuts[CUTTING] == 0:
            if remaining > 0:
                return DEADLOCK
            for rank in range(num_ranks):
                pending = sends[rank, PENDING]
                if pending != NONE:
                    own = arrived[_place(pending, kinds)]
                    clocks[rank, EXPOSED] += max(own - clocks[rank, NOW], 0.0)
                    clocks[rank, NOW] = max(own, clocks[rank, NOW])
            return DONE
        if remaining > 0:
            cuts[CUTTING] = 0
            status = GO_ON if cycle[LEFT_OUT] == 0 else TOO_SHORT
        elif (
            cuts[SAVED] != NONE
            and same_state(
                codes, width, lengths, places, kinds, clocks, free, sent, arrived, stride, cycle,
                cuts,
            )
            and same_state(
                codes, width, lengths, places, kinds, clocks, free, sent, produced, stride, cycle,
                cuts,
            )
            and same_posts(
                codes, width, lengths, places, kinds, clocks, sent, done, posted_after, ticks,
                produced_tick, stride, cycle, cuts,
            )
            and _same_pending(clocks, sends, kinds, arrived, cycle, cuts)
        ):  # fmt: skip
            status = skip_cycles(clocks, cycle, cuts)
        else:
            status = next_cut(clocks, free, cycle, cuts)
    return status
