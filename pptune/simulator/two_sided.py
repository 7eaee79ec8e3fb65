"""Plays a step in which ranks wait for what they send, or messages overtake each other.

As play.py does, but every message is started by whichever end finds that both have posted it, in
the order in which the messages of a link were sent, and a rank may have to see a message of its own
arrive before it goes on.
"""

from typing import Any

import numpy as np

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
    NAME_SHIFT,
    NEXT,
    NONE,
    NOW,
    NUM_KIND,
    OUTPUT,
    PENDING,
    SAVED,
    SAVED_NOW,
    SPENT,
    STARTED,
    TOO_SHORT,
)
from pptune.simulator.cuts import moved, next_cut, same_posts, same_state, set_limits, skip_cycles

_NEVER, _AFTER_NEXT = int(Wait.NEVER), int(Wait.AFTER_NEXT)
_BEFORE_RECEIVE, _WITH_RECEIVE = int(Wait.BEFORE_RECEIVE), int(Wait.WITH_RECEIVE)
assert _NEVER < _AFTER_NEXT < min(_BEFORE_RECEIVE, _WITH_RECEIVE)
_MICROBATCH = (1 << NAME_SHIFT) - 1
_U = np.uint64


@compiled("int64(int64,int64[::1])", inner=True)
def _place(name: int, kinds: Any) -> Any:
    """Where the message is in the message arrays."""
    return kinds[(name >> NAME_SHIFT) + OUTPUT] + (name & _MICROBATCH)


@compiled("int64(int64,int64)", inner=True)
def _receiver(link: int, num_ranks: int) -> int:
    """The rank at the far end of a link."""
    return (link // 2 + (num_ranks - 1 if link % 2 else 1)) % num_ranks


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
    "int64[:,::1],int64[::1],int64[::1],int64[::1])"
)
def play_two_sided(
    codes: Any, width: int, lengths: Any, kinds: Any, floats: Any, stride: int,
    pairs_together: bool, clocks: Any, places: Any, sends: Any, sent: Any, arrived: Any,
    produced: Any, free: Any, done: Any, following: Any, queues: Any, waits: Any,
    posted_after: Any, ticks: Any, produced_tick: Any, streams: Any, cycle: Any, cuts: Any,
    limits: Any,
) -> int:  # fmt: skip
    """Play on from where the arrays stand, to the end or to the last cut; how that went. `limits`
    is room for a number per rank."""
    num_ranks = lengths.size
    no_input, no_link = sent.size - 2 * stride, 2 * num_ranks
    one_at_a_time = streams.size > 0
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
                pending, halfway = sends[rank, PENDING], sends[rank, HALFWAY]
                begin = at
                while at < limit:
                    code = codes[_U(row + at)]
                    kind = (code & KIND_MASK) * NUM_KIND
                    microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
                    wait = waits[_U(row + at - 1)] if pending != NONE else _NEVER
                    has_input = halfway == 0 and kinds[_U(kind + INPUT)] != no_input
                    source = kinds[_U(kind + INPUT)] + microbatch
                    own, release = now, now
                    # The rank's own message, if it waits for that, and then the one it needs.
                    for turn in range(2):
                        if turn == 0:
                            if wait == _NEVER:
                                continue
                            slot = _place(pending, kinds)
                            link = kinds[(pending >> NAME_SHIFT) + LINK]
                        else:
                            if not has_input:
                                continue
                            slot, link = source, kinds[_U(kind + INPUT_LINK)]
                        time = arrived[_U(slot)]
                        while time < 0.0 <= sent[_U(slot)]:
                            # Start what has to start first, if both of its ends have posted it.
                            first, lane = queues[link, NEXT], link
                            if one_at_a_time:
                                # What is next for one rank may come later for its peer; then the
                                # peer's next comes first, in the one order that all share.
                                party, peer = NONE, link // 2
                                while party == NONE or streams[peer, sends[peer, STARTED]] != first:
                                    party = peer
                                    first = streams[party, sends[party, STARTED]]
                                    lane = kinds[(first >> NAME_SHIFT) + LINK]
                                    peer = lane // 2
                                    if peer == party:
                                        peer = _receiver(lane, num_ranks)
                            sender, receiver = lane // 2, _receiver(lane, num_ranks)
                            place, maker = _place(first, kinds), first >> NAME_SHIFT
                            posted = done[receiver * (width + 1) + 1 + posted_after[_U(place)]]
                            if posted < 0.0 or sent[_U(place)] < 0.0:
                                break
                            start = max(sent[_U(place)], posted)
                            wire = floats[_U(maker + FLOAT_WIRE)]
                            latency = floats[_U(maker + FLOAT_LATENCY)]
                            if one_at_a_time:
                                start = max(start, max(free[0, sender], free[0, receiver]))
                                free[0, sender] = start + wire + latency
                                free[0, receiver] = start + wire + latency
                                sends[sender, STARTED] += 1
                                sends[receiver, STARTED] += 1
                            else:
                                start = max(start, free[0, lane])
                                free[0, lane] = start + wire
                                queues[lane, NEXT] = following[_U(place)]
                            arrived[_U(place)] = start + wire + latency
                            time = arrived[_U(slot)]
                        if turn == 1:
                            release = time
                            continue
                        own = time
                        if wait == _BEFORE_RECEIVE and own >= 0.0:
                            exposed += max(own - now, 0.0)
                            now = max(now, own)
                            own, release = now, now
                            done[_U(done_row + at - 1)] = now
                            wait, pending = _NEVER, NONE
                            progress = True
                    if release < 0.0 or (own < 0.0 and wait > _AFTER_NEXT):
                        break
                    output = kinds[_U(kind + OUTPUT)] + microbatch
                    if halfway == 0:
                        if wait == _WITH_RECEIVE:
                            release = max(release, own)
                            wait, pending = _NEVER, NONE
                        if release > now:
                            source_end = max(now, produced[_U(source)]) if has_input else now
                            exposed += release - min(source_end, release)
                            now = release
                        total = floats[_U(kind + FLOAT_TOTAL)]
                        now += total - floats[_U(kind + FLOAT_SEND)]
                        spent += total
                        produced[_U(output)] = now
                        clocks[rank, ENDED] = now
                        progress = True
                    if wait == _AFTER_NEXT:
                        if own < 0.0:
                            halfway = 1
                            break
                        exposed += max(own - now, 0.0)
                        now = max(now, own)
                        pending = NONE
                    halfway = 0
                    name = kind << NAME_SHIFT | microbatch
                    link = kinds[_U(kind + LINK)]
                    if pairs_together and code >> PAIR_SHIFT != 0:
                        sends[rank, HELD] = name if link != no_link else NONE
                    else:
                        held = sends[rank, HELD] if pairs_together else NONE
                        for message in (held, name if link != no_link else NONE):
                            if message == NONE:
                                continue
                            # Post it: put it behind the others of its link.
                            maker = message >> NAME_SHIFT
                            place, link = _place(message, kinds), kinds[_U(maker + LINK)]
                            now += floats[_U(maker + FLOAT_SEND)]
                            sent[_U(place)] = now
                            following[_U(place)] = NONE
                            if queues[link, NEXT] == NONE:
                                queues[link, NEXT] = message
                            else:
                                following[_place(queues[link, LAST], kinds)] = message
                            queues[link, LAST] = message
                            if message == name and waits[_U(row + at)] != _NEVER:
                                pending = name
                        if held != NONE:
                            sends[rank, HELD] = NONE
                    if pending == NONE or waits[_U(row + at)] != _BEFORE_RECEIVE:
                        done[_U(done_row + at)] = now
                    at += 1
                remaining -= at - begin
                places[rank] = at
                clocks[rank, NOW], clocks[rank, SPENT], clocks[rank, EXPOSED] = now, spent, exposed
                sends[rank, PENDING], sends[rank, HALFWAY] = pending, halfway
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
