# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Where an executor posts the receives of an order, and where it waits for sends."""

from libc.stdint cimport int8_t, int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

import numpy as np

from pptune.executors import WAITS, Receive, Wait
from pptune.schedules.orders cimport (
    BACKWARD, BACKWARD_WEIGHT, FORWARD, Codes, address_of, is_paired, kind_of, microbatch_of,
    padded, stage_of, work_of,
)
from pptune.simulator.state cimport (
    AFTER_NEXT, BEFORE_RECEIVE, NEVER, NONE, WITH_RECEIVE, name_of,
)

cdef dict WAIT_CODES = {
    Wait.NEVER: NEVER,
    Wait.AFTER_NEXT: AFTER_NEXT,
    Wait.BEFORE_RECEIVE: BEFORE_RECEIVE,
    Wait.WITH_RECEIVE: WITH_RECEIVE,
}


cdef class Posts:
    """The posts and waits of an order; message arrays as in state.pxd."""

    def __dealloc__(self):
        free(self.posted_after)
        free(self.waits)
        free(self.ticks)
        free(self.produced_tick)

    def posted_after_rows(self):
        """`posted_after` for readers; int32[2 num_stages + 2, micro-batches and padding]."""
        rows = np.empty((self.num_rows, self.stride), np.int32)
        memcpy(address_of(rows), self.posted_after, rows.nbytes)
        return rows


def posts_of(Codes codes, ranks, int64_t num_microbatches, executor):
    """The posts of an order whose stages live on `ranks`, int64[num_stages]; kept with its codes.
    """
    cdef Posts posts = codes.kept.get(executor)
    if posts is not None:
        return posts
    rules = WAITS[executor]
    posts = Posts()
    cdef int64_t num_stages = len(ranks)
    posts.num_rows = 2 * num_stages + 2
    posts.stride = padded(num_microbatches)
    cdef int64_t num_messages = posts.num_rows * posts.stride
    cdef int64_t num_codes = codes.num_ranks * codes.width
    cdef bint lowered = rules.receive is Receive.LOWERED
    posts.posted_after = <int32_t*> malloc(num_messages * sizeof(int32_t))
    posts.waits = <int8_t*> calloc(num_codes, sizeof(int8_t))
    if posts.posted_after == NULL or posts.waits == NULL:
        raise MemoryError
    memset(posts.posted_after, 0xFF, num_messages * sizeof(int32_t))  # NONE everywhere.
    if lowered:
        posts.ticks = <int32_t*> calloc(num_codes, sizeof(int32_t))
        posts.produced_tick = <int32_t*> malloc(num_messages * sizeof(int32_t))
        if posts.ticks == NULL or posts.produced_tick == NULL:
            raise MemoryError
        memset(posts.produced_tick, 0xFF, num_messages * sizeof(int32_t))
        lower_torch(codes, ranks, num_microbatches, posts)
        if rules.one_at_a_time:
            make_streams(codes, ranks, posts)
    else:
        place_exchanges(
            codes, num_stages, WAIT_CODES[rules.same_direction],
            WAIT_CODES[rules.opposite_direction],
            NONE if rules.steady is None else WAIT_CODES[rules.steady],
            rules.receive is Receive.AT_LAST_USE, posts,
        )
    codes.kept[executor] = posts
    return posts


cdef place_exchanges(
    Codes codes, int64_t num_stages, int same_direction, int opposite_direction, int steady,
    bint ahead, Posts posts,
):
    """Where ranks post receives and wait for sends whose runtime steps from action to action.

    `steady` is the Wait from the action before a rank's first backward to its last forward, or NONE
    for no such phase; with `ahead`, receives are posted there one exchange ahead.
    """
    cdef int64_t rank, row, length, first_backward, last_forward, at, code, work, stage, source
    cdef int64_t previous_forward, previous_backward, previous
    cdef int wait
    cdef bint forward, in_steady, early
    for rank in range(codes.num_ranks):
        row, length = rank * codes.width, codes.lengths[rank]
        first_backward, last_forward = length, 0
        for at in range(length):
            if work_of(codes.codes[row + at]) == FORWARD:
                last_forward = at
            else:
                first_backward = min(first_backward, at)
        # Where the last forward and the last backward before this action were; the first backward
        # is received with the exchange before the steady phase.
        previous_forward, previous_backward = NONE, max(first_backward - 2, <int64_t> NONE)
        for at in range(length):
            code = codes.codes[row + at]
            work, stage = work_of(code), stage_of(code)
            forward = work == FORWARD
            wait = same_direction
            if at + 1 < length and (work_of(codes.codes[row + at + 1]) == FORWARD) != forward:
                wait = opposite_direction
            in_steady = first_backward - 1 <= at <= last_forward
            posts.waits[row + at] = steady if steady != NONE and in_steady else wait
            if work == BACKWARD_WEIGHT:
                continue
            previous = previous_forward if forward else previous_backward
            early = first_backward - 1 <= previous <= last_forward or at == first_backward
            source = stage - 1 if forward else stage + 1
            if 0 <= source < num_stages:
                source += 0 if forward else num_stages
                posts.posted_after[source * posts.stride + microbatch_of(code)] = (
                    previous if ahead and early else at - 1
                )
            if forward:
                previous_forward = at
            else:
                previous_backward = at


# Where torch's schedule runtime posts its receives.
#
# torch lowers a compute-only order to one with sends and receives (schedules.py:
# _add_unshard_reshard, _add_reduce_grad, _add_send_recv) by walking all ranks in step. In every
# tick each rank, lowest first, does its next entry if what that needs is there; when an entry
# sends, its receive is appended to the receiver's list, behind what that rank has done by then.
# Entries are actions, an overlapped pair counting as one, and what torch adds for sharded
# parameters and gradient reduction; those take a tick whether or not they do anything.

cdef struct Entry:
    # By kind of action; NONE for no.
    int64_t input       # Where the messages it needs begin.
    int64_t input_turn  # Whether their sender's turn in a tick comes after its own.
    int64_t output      # Where the messages it makes begin.
    int64_t receiver    # Who receives them.


cdef void fill_entries(
    const int64_t* ranks, int64_t num_stages, int64_t stride, Entry* entries
) noexcept nogil:
    cdef int64_t stage, work, step, row, source, target, rank
    cdef Entry* entry
    for stage in range(num_stages):
        rank = ranks[stage]
        for work in range(4):
            entry = &entries[4 * stage + work]
            entry.input = entry.input_turn = entry.output = entry.receiver = NONE
            if work == BACKWARD_WEIGHT:
                continue
            step = 1 if work == FORWARD else -1
            row = 0 if work == FORWARD else num_stages
            source, target = stage - step, stage + step
            entry.output = (row + stage) * stride
            if 0 <= source < num_stages and ranks[source] != rank:
                entry.input = (row + source) * stride
                entry.input_turn = ranks[source] > rank
            if 0 <= target < num_stages and ranks[target] != rank:
                entry.receiver = ranks[target]


cdef void count_extra(Codes codes, int32_t* extra) noexcept:
    """Ticks that torch spends before every action on sharded parameters.

    Those of the next three stages of a rank's list are kept gathered: a stage that leaves that set
    costs an entry, and so does one that joins it.
    """
    cdef int64_t rank, begin, at, stage, first, second, third
    cdef int32_t entries
    for rank in range(codes.num_ranks):
        begin = rank * codes.width
        first = second = third = NONE
        for at in range(begin + codes.lengths[rank] - 1, begin - 1, -1):
            stage = stage_of(codes.codes[at])
            entries = 0
            if stage != first:
                if stage == second:
                    first, second = stage, first
                else:
                    if stage != third:
                        entries = 1 if third == NONE else 2
                    first, second, third = stage, first, second
            # What goes before the next action; nothing is asked for after the last one.
            extra[at + 1] = entries
        extra[begin] = (first != NONE) + (second != NONE) + (third != NONE)


cdef lower_torch(Codes codes, ranks, int64_t num_microbatches, Posts posts):
    """Fill `posted_after`, `ticks` and `produced_tick`. Where the order deadlocks, the rest stays
    as it is."""
    cdef int64_t num_ranks = codes.num_ranks, width = codes.width, num_stages = len(ranks)
    cdef Entry* entries = <Entry*> malloc(4 * num_stages * sizeof(Entry))
    cdef int32_t* extra = <int32_t*> malloc((num_ranks * width + 1) * sizeof(int32_t))
    cdef int64_t* num_done = <int64_t*> calloc(num_stages, sizeof(int64_t))
    cdef int64_t* places = <int64_t*> calloc(num_ranks, sizeof(int64_t))
    cdef int64_t* free_from = <int64_t*> calloc(num_ranks, sizeof(int64_t))
    cdef int64_t rank, row, at, begin, following, tick, member, size, needed, work, code
    cdef const Entry* entry
    cdef bint progress = True, ready
    try:
        if (
            entries == NULL or extra == NULL or num_done == NULL or places == NULL
            or free_from == NULL
        ):
            raise MemoryError
        fill_entries(<const int64_t*> address_of(ranks), num_stages, posts.stride, entries)
        count_extra(codes, extra)
        while progress:
            progress = False
            for rank in range(num_ranks):
                row, at, following = rank * width, places[rank], free_from[rank]
                begin = at
                while at < codes.lengths[rank]:
                    # A pair is one entry, which needs the inputs of both.
                    size = 1 + is_paired(codes.codes[row + at])
                    tick = following + extra[row + at]
                    ready = True
                    for member in range(row + at, row + at + size):
                        code = codes.codes[member]
                        entry = &entries[kind_of(code)]
                        if entry.input != NONE:
                            needed = posts.produced_tick[entry.input + microbatch_of(code)]
                            ready = ready and needed != NONE
                            tick = max(tick, needed + entry.input_turn)
                    if not ready:
                        break
                    following = tick + 1
                    for member in range(row + at, row + at + size):
                        code = codes.codes[member]
                        entry = &entries[kind_of(code)]
                        posts.ticks[member] = tick
                        if entry.output != NONE:
                            posts.produced_tick[entry.output + microbatch_of(code)] = tick
                        work = work_of(code)
                        if work == BACKWARD or work == BACKWARD_WEIGHT:
                            # A stage's gradients are reduced after its last backward.
                            num_done[stage_of(code)] += 1
                            following += num_done[stage_of(code)] == num_microbatches
                    if size == 2:
                        following += extra[row + at + 1]  # Nothing goes between the two.
                    at += size
                progress = progress or at > begin
                places[rank], free_from[rank] = at, following
        place_receives(codes, entries, places, posts)
    finally:
        free(entries)
        free(extra)
        free(num_done)
        free(places)
        free(free_from)


cdef void place_receives(
    Codes codes, const Entry* entries, const int64_t* places, Posts posts
) noexcept:
    """Ticks only grow along a list, so one pass over each receiver's list is enough."""
    cdef int64_t num_ranks = codes.num_ranks
    cdef int64_t rank, at, code, receiver, until, position, next_position, previous_position
    cdef const Entry* entry
    cdef const int32_t* listed
    cdef bint to_next
    for rank in range(num_ranks):
        next_position = previous_position = 0
        for at in range(rank * codes.width, rank * codes.width + places[rank]):
            code = codes.codes[at]
            entry = &entries[kind_of(code)]
            receiver = entry.receiver
            if receiver == NONE:
                continue
            # What the receiver has done by then, in the same tick only if it is the lower rank.
            until = posts.ticks[at] + (receiver < rank)
            to_next = receiver == rank + 1 or receiver + num_ranks == rank + 1
            position = next_position if to_next else previous_position
            listed = posts.ticks + receiver * codes.width
            while position < places[receiver] and listed[position] < until:
                position += 1
            if to_next:
                next_position = position
            else:
                previous_position = position
            posts.posted_after[entry.output + microbatch_of(code)] = position - 1


cdef make_streams(Codes codes, ranks, Posts posts):
    """Fill `streams`. A send and its receive are appended to both ranks' lists when the sender's
    tick comes, lowest rank first; that is one order for all."""
    found = np.empty((4, codes.num_ranks * codes.width), np.int64)
    cdef int64_t* ticks = <int64_t*> address_of(found[0])
    cdef int64_t* names = <int64_t*> address_of(found[1])
    cdef int64_t* senders = <int64_t*> address_of(found[2])
    cdef int64_t* receivers = <int64_t*> address_of(found[3])
    cdef const int64_t* rank_of = <const int64_t*> address_of(ranks)
    cdef int64_t rank, at, code, target, count = 0, num_stages = len(ranks)
    for rank in range(codes.num_ranks):
        for at in range(rank * codes.width, rank * codes.width + codes.lengths[rank]):
            code = codes.codes[at]
            target = stage_of(code) + (1 if work_of(code) == FORWARD else -1)
            if work_of(code) == BACKWARD_WEIGHT or not 0 <= target < num_stages:
                continue
            if rank_of[target] == rank:
                continue
            ticks[count] = posts.ticks[at]
            names[count] = name_of(code)
            senders[count] = rank
            receivers[count] = rank_of[target]
            count += 1
    turn = np.argsort(found[0, :count], kind="stable")
    _, name, sender, receiver = found[:, turn]
    rows = [name[(sender == rank) | (receiver == rank)] for rank in range(codes.num_ranks)]
    posts.stream_width = max(map(len, rows)) + 1
    posts.stream_array = np.full((codes.num_ranks, posts.stream_width), NONE, np.int64)
    for rank, row in enumerate(rows):
        posts.stream_array[rank, : len(row)] = row
    posts.streams = <const int64_t*> address_of(posts.stream_array)
