# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plays a step in which a message needs nobody to wait for it once it is sent.

Every rank in turn goes on until it needs a message that has not been sent. Each time is the latest
of some earlier ones plus a constant, so the order of the visits does not matter.
"""

from libc.stdint cimport int32_t, int64_t

from pptune.schedules.orders cimport kind_of, microbatch_of
from pptune.simulator.cuts cimport (
    next_cut, no_cut, same_clocks, same_messages, set_limits, skip_cycles,
)
from pptune.simulator.state cimport (
    DEADLOCK, DONE, GO_ON, NONE, Clock, Kind, Status, Step, Turn, rank_at,
)


cdef Status play_one_sided(Step* step, bint lowered) noexcept nogil:
    """Play on from where the step stands, to the end or to the last cut; how that went.

    With `lowered` receives, messages are started by the receiver and `sent` says when they can be;
    else by the sender, and `arrived` is known at once. `arrived` is filled as far as it is there.
    """
    cdef Status status = GO_ON
    cdef int64_t remaining, before, turn, rank
    cdef const Kind* last
    while status == GO_ON:
        remaining = set_limits(step)
        # The choice is made out here so that each gets a loop of its own.
        if step.turns != NULL:
            if lowered:
                take_turns(step, remaining, True, False)
            elif step.wired:
                take_turns(step, remaining, False, True)
            else:
                take_turns(step, remaining, False, False)
            remaining = 0
        before = remaining + 1
        while 0 < remaining < before:
            before = remaining
            for turn in range(step.num_ranks):
                rank = rank_at(turn, step.num_ranks)
                if lowered:
                    remaining -= go_on(step, rank, True, False)
                elif step.wired:
                    remaining -= go_on(step, rank, False, True)
                else:
                    remaining -= go_on(step, rank, False, False)
        if not step.cutting:
            for rank in range(step.num_ranks):
                last = &step.kinds[kind_of(step.codes[rank * step.width + step.lengths[rank] - 1])]
                step.clocks[rank].ended = step.clocks[rank].now - last.send
            return DONE if remaining == 0 else DEADLOCK
        if remaining > 0:
            status = no_cut(step)
        elif step.saved != NONE and has_come_back(step, lowered):
            status = skip_cycles(step)
        else:
            status = next_cut(step)
    return status


cdef bint has_come_back(const Step* step, bint lowered) noexcept nogil:
    """Whether the state is that of the saved cut, later by one shift."""
    return same_clocks(step) and same_messages(
        step, step.sent if lowered else step.arrived, lowered, lowered
    )


cdef inline void take_turns(
    Step* step, int64_t count, bint lowered, bint wired
) noexcept nogil:
    """Do the next `count` actions of the step's sequence, which are those before the limits."""
    cdef int64_t begin = 0, at, rank
    cdef const Turn* turn
    for rank in range(step.num_ranks):
        begin += step.places[rank]
        step.places[rank] = step.limits[rank]
    for at in range(begin, begin + count):
        turn = &step.turns[at]
        act(step, &step.kinds[turn.kind], &step.clocks[turn.rank], turn.input, turn.output,
            turn.posted, turn.done, lowered, wired)


cdef inline int64_t go_on(Step* step, int64_t rank, bint lowered, bint wired) noexcept nogil:
    """Let a rank do what it can before its limit; how many actions that was."""
    cdef const int64_t* codes = step.codes + rank * step.width
    cdef const double* times = step.sent if lowered else step.arrived
    cdef const int32_t* posted_after = step.posted_after
    cdef int64_t row = rank * (step.width + 1) + 1
    cdef int64_t begin = step.places[rank], at = begin, limit = step.limits[rank]
    cdef int64_t code, microbatch, input
    cdef const Kind* kind
    cdef Clock clock = step.clocks[rank]
    while at < limit:
        code = codes[at]
        kind = &step.kinds[kind_of(code)]
        microbatch = microbatch_of(code)
        input = kind.input + microbatch
        if times[input] < 0.0:
            break
        act(step, kind, &clock, input, kind.output + microbatch,
            row + posted_after[input] if lowered else 0, row + at, lowered, wired)
        at += 1
    step.places[rank] = at
    step.clocks[rank] = clock
    return at - begin


cdef inline void act(
    Step* step, const Kind* kind, Clock* clock, int64_t input, int64_t output, int64_t posted,
    int64_t done, bint lowered, bint wired,
) noexcept nogil:
    """Do an action whose input is there; the places are those of Turn."""
    cdef double arrived = step.sent[input] if lowered else step.arrived[input]
    cdef double lag = kind.input_lag, now = clock.now
    cdef double post, left, start
    if lowered:
        post = step.done[posted]
        left = arrived if arrived > post else post
        left = (left if left > step.free[kind.link] else step.free[kind.link]) + kind.wire
        step.free[kind.link] = left
        lag += left + kind.latency - arrived
        arrived = left + kind.latency
        if step.arrived != NULL:
            step.arrived[input] = arrived
    elif wired:
        lag = arrived - step.produced[input]
    start = now if now > arrived else arrived
    # Waiting is bubble until the producer had finished and exposed after that.
    clock.exposed += start - now if start - now < lag else lag
    now = start + kind.total
    clock.spent += kind.total
    clock.now = now
    if lowered:
        step.done[done] = step.sent[output] = now
    else:
        left = now
        if wired:
            step.produced[output] = now - kind.send
            left = (now if now > step.free[kind.link] else step.free[kind.link]) + kind.wire
            step.free[kind.link] = left
        step.arrived[output] = left + kind.latency
