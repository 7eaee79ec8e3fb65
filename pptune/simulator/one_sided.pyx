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
    DEADLOCK, DONE, GO_ON, NONE, Clock, Kind, Status, Step, rank_at,
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
        before = remaining + 1
        while 0 < remaining < before:
            before = remaining
            # The choice is made out here so that each gets a loop of its own.
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
        step, step.sent if lowered else step.arrived, lowered
    )


cdef inline int64_t go_on(Step* step, int64_t rank, bint lowered, bint wired) noexcept nogil:
    """Let a rank do what it can before its limit; how many actions that was."""
    cdef const int64_t* codes = step.codes + rank * step.width
    cdef const Kind* kinds = step.kinds
    cdef double* done = step.done + rank * (step.width + 1) + 1
    cdef double* sent = step.sent
    cdef double* arrivals = step.arrived
    cdef double* produced = step.produced
    cdef double* free = step.free
    cdef const int32_t* posted_after = step.posted_after
    cdef Clock* clock = &step.clocks[rank]
    cdef double now = clock.now, spent = clock.spent, exposed = clock.exposed
    cdef int64_t begin = step.places[rank], at = begin, limit = step.limits[rank]
    cdef int64_t code, microbatch, slot
    cdef const Kind* kind
    cdef double arrived, posted, left, start, lag
    while at < limit:
        code = codes[at]
        kind = &kinds[kind_of(code)]
        microbatch = microbatch_of(code)
        slot = kind.input + microbatch
        arrived = sent[slot] if lowered else arrivals[slot]
        if arrived < 0.0:
            break
        lag = kind.input_lag
        if lowered:
            posted = done[posted_after[slot]]
            left = arrived if arrived > posted else posted
            left = (left if left > free[kind.link] else free[kind.link]) + kind.wire
            free[kind.link] = left
            lag += left + kind.latency - arrived
            arrived = left + kind.latency
            if arrivals != NULL:
                arrivals[slot] = arrived
        elif wired:
            lag = arrived - produced[slot]
        start = now if now > arrived else arrived
        # Waiting is bubble until the producer had finished and exposed after that.
        exposed += start - now if start - now < lag else lag
        now = start + kind.total
        spent += kind.total
        slot = kind.output + microbatch
        if lowered:
            done[at] = sent[slot] = now
        else:
            left = now
            if wired:
                produced[slot] = now - kind.send
                left = (now if now > free[kind.link] else free[kind.link]) + kind.wire
                free[kind.link] = left
            arrivals[slot] = left + kind.latency
        at += 1
    step.places[rank] = at
    clock.now, clock.spent, clock.exposed = now, spent, exposed
    return at - begin
