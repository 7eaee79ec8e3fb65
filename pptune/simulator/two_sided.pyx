# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plays a step in which ranks wait for what they send, or messages overtake each other.

As one_sided.pyx does, but every message is started by whichever end finds that both have posted it,
in the order in which the messages of a link were sent, and a rank may have to see a message of its
own arrive before it goes on.
"""

from libc.stdint cimport int8_t, int64_t

from pptune.schedules.orders cimport is_paired, kind_of
from pptune.simulator.cuts cimport (
    moved, next_cut, no_cut, same_clocks, same_messages, set_limits, shift_of, skip_cycles,
)
from pptune.simulator.state cimport (
    AFTER_NEXT, BEFORE_RECEIVE, DEADLOCK, DONE, GO_ON, NEVER, NONE, UNKNOWN, WITH_RECEIVE, Clock,
    Kind, Queue, Sends, Status, Step, input_of, maker_of, name_of, no_input, output_of, place_of,
    rank_at,
)


cdef Status play_two_sided(Step* step) noexcept nogil:
    """Play on from where the step stands, to the end or to the last cut; how that went."""
    cdef Status status = GO_ON
    cdef int64_t turn, rank
    cdef bint progress, reached
    while status == GO_ON:
        set_limits(step)
        progress, reached = True, False
        while progress and not reached:
            progress, reached = False, True
            for turn in range(step.num_ranks):
                rank = rank_at(turn, step.num_ranks)
                progress = go_on(step, rank) or progress
                reached = reached and step.places[rank] == step.limits[rank]
        if not step.cutting:
            if not reached:
                return DEADLOCK
            see_arrive(step)
            return DONE
        if not reached:
            status = no_cut(step)
        elif step.saved != NONE and has_come_back(step):
            status = skip_cycles(step)
        else:
            status = next_cut(step)
    return status


cdef inline int64_t receiver_of(const Step* step, int64_t link) noexcept nogil:
    """The rank at the far end of a link."""
    cdef int64_t rank = (link >> 1) + (step.num_ranks - 1 if link & 1 else 1)
    return rank - step.num_ranks if rank >= step.num_ranks else rank


cdef bint go_on(Step* step, int64_t rank) noexcept nogil:
    """Let a rank do what it can before its limit; whether that was anything."""
    cdef const int64_t* codes = step.codes + rank * step.width
    cdef const int8_t* waits = step.waits + rank * step.width
    cdef double* done = step.done + rank * (step.width + 1) + 1
    cdef Clock* clock = &step.clocks[rank]
    cdef Sends* sends = &step.sends[rank]
    cdef int64_t at = step.places[rank]
    cdef int64_t code, source, name
    cdef const Kind* kind
    cdef int8_t wait
    cdef bint has_input, progress = False
    cdef double own, release, source_end
    while at < step.limits[rank]:
        code = codes[at]
        kind = &step.kinds[kind_of(code)]
        source = input_of(step, code)
        has_input = not sends.halfway and kind.input != no_input(step)
        wait = waits[at - 1] if sends.pending != NONE else NEVER
        # The rank's own message, if it waits for that, and then the one it needs.
        own = release = clock.now
        if wait != NEVER:
            own = arrival(
                step, place_of(step, sends.pending), step.kinds[maker_of(sends.pending)].link
            )
            if wait == BEFORE_RECEIVE and own >= 0.0:
                wait_until(clock, own)
                done[at - 1] = own = release = clock.now
                wait, sends.pending = NEVER, NONE
                progress = True
        if has_input:
            release = arrival(step, source, kind.input_link)
        if release < 0.0 or (own < 0.0 and wait > AFTER_NEXT):
            break
        if not sends.halfway:
            if wait == WITH_RECEIVE:
                release = max(release, own)
                wait, sends.pending = NEVER, NONE
            if release > clock.now:
                source_end = max(clock.now, step.produced[source]) if has_input else clock.now
                clock.exposed += release - min(source_end, release)
                clock.now = release
            clock.now += kind.total - kind.send
            clock.spent += kind.total
            clock.ended = step.produced[output_of(step, code)] = clock.now
            progress = True
        if wait == AFTER_NEXT:
            if own < 0.0:
                sends.halfway = True
                break
            wait_until(clock, own)
            sends.pending = NONE
        sends.halfway = False
        name = name_of(code)
        if kind.link == 2 * step.num_ranks:
            name = NONE  # Nobody receives it.
        if step.pairs_together and is_paired(code):
            sends.held = name
        else:
            if sends.held != NONE:
                post(step, clock, sends.held)
                sends.held = NONE
            if name != NONE:
                post(step, clock, name)
                if waits[at] != NEVER:
                    sends.pending = name
        if sends.pending == NONE or waits[at] != BEFORE_RECEIVE:
            done[at] = clock.now
        progress = True
        at += 1
    step.places[rank] = at
    return progress


cdef inline void wait_until(Clock* clock, double time) noexcept nogil:
    """See a message of the rank's own arrive."""
    clock.exposed += max(time - clock.now, 0.0)
    clock.now = max(clock.now, time)


cdef void post(Step* step, Clock* clock, int64_t name) noexcept nogil:
    """Post a message: put it behind the others of its link."""
    cdef const Kind* maker = &step.kinds[maker_of(name)]
    cdef Queue* queue = &step.queues[maker.link]
    cdef int64_t place = place_of(step, name)
    clock.now += maker.send
    step.sent[place] = clock.now
    step.following[place] = NONE
    if queue.next == NONE:
        queue.next = name
    else:
        step.following[place_of(step, queue.last)] = name
    queue.last = name


cdef double arrival(Step* step, int64_t place, int64_t link) noexcept nogil:
    """When the message at `place` arrives over `link`, or UNKNOWN: starts what has to start first
    as far as both of its ends have posted it."""
    while step.arrived[place] < 0.0 and step.sent[place] >= 0.0:
        if not (start_first(step, link) if step.streams == NULL else start_in_turn(step, link)):
            break
    return step.arrived[place]


cdef bint start_first(Step* step, int64_t link) noexcept nogil:
    """Start the first message of `link`, if both of its ends have posted it."""
    cdef Queue* queue = &step.queues[link]
    cdef int64_t place = place_of(step, queue.next)
    cdef const Kind* maker = &step.kinds[maker_of(queue.next)]
    cdef double start = start_of(step, place, link)
    if start < 0.0:
        return False
    start = max(start, step.free[link])
    step.free[link] = start + maker.wire
    step.arrived[place] = start + maker.wire + maker.latency
    queue.next = step.following[place]
    return True


cdef bint start_in_turn(Step* step, int64_t link) noexcept nogil:
    """The same where each rank's messages take turns. What is next for one rank may come later for
    its peer; then the peer's next comes first, in the one order that all share."""
    cdef int64_t party = NONE, peer = link // 2
    cdef int64_t first = NONE
    cdef int64_t place, sender, receiver
    cdef const Kind* maker = NULL
    cdef double start, end
    while party == NONE or next_of(step, peer) != first:
        party = peer
        first = next_of(step, party)
        maker = &step.kinds[maker_of(first)]
        peer = maker.link // 2
        if peer == party:
            peer = receiver_of(step, maker.link)
    place = place_of(step, first)
    start = start_of(step, place, maker.link)
    if start < 0.0:
        return False
    sender, receiver = maker.link // 2, receiver_of(step, maker.link)
    end = max(start, max(step.free[sender], step.free[receiver])) + maker.wire + maker.latency
    step.arrived[place] = step.free[sender] = step.free[receiver] = end
    step.sends[sender].started += 1
    step.sends[receiver].started += 1
    return True


cdef inline int64_t next_of(const Step* step, int64_t rank) noexcept nogil:
    """The name of the rank's next message, where they take turns."""
    return step.streams[rank * step.stream_width + step.sends[rank].started]


cdef double start_of(const Step* step, int64_t place, int64_t link) noexcept nogil:
    """When both ends have posted a message, or UNKNOWN."""
    cdef double posted = step.done[
        receiver_of(step, link) * (step.width + 1) + 1 + step.posted_after[place]
    ]
    if posted < 0.0 or step.sent[place] < 0.0:
        return UNKNOWN
    return max(step.sent[place], posted)


cdef bint has_come_back(const Step* step) noexcept nogil:
    """Whether the state is that of the saved cut, later by one shift."""
    return same_clocks(step) and same_messages(step, step.sent, True, False) and same_pending(step)


cdef bint same_pending(const Step* step) noexcept nogil:
    """Whether messages that ranks wait to see arrive are those of the saved cut, moved."""
    cdef double shift = shift_of(step)
    cdef int64_t back = (step.cut - step.saved) * step.cycle_microbatches
    cdef int64_t rank, place
    for rank in range(step.num_ranks):
        if step.sends[rank].pending != NONE:
            place = place_of(step, step.sends[rank].pending)
            if not moved(step.arrived[place], step.arrived[place - back], shift):
                return False
    return True


cdef void see_arrive(Step* step) noexcept nogil:
    """Let ranks wait for their last messages."""
    cdef int64_t rank
    for rank in range(step.num_ranks):
        if step.sends[rank].pending != NONE:
            wait_until(&step.clocks[rank], step.arrived[place_of(step, step.sends[rank].pending)])
