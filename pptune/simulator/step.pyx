# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plays a step in one call, as little of its order as its repetition allows."""

from cpython.buffer cimport (
    PyBUF_RECORDS_RO, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from libc.math cimport INFINITY, NAN
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

import numpy as np

from pptune.executors import WAITS, Receive
from pptune.schedules.orders cimport (
    BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Codes, address_of, is_paired, kind_of,
    padded, stage_of, work_of,
)
from pptune.simulator.one_sided cimport play_one_sided
from pptune.simulator.posts cimport Posts
from pptune.simulator.posts import posts_of
from pptune.simulator.sequence cimport Sequence, sequence_of
from pptune.simulator.state cimport (
    AFTER_NEXT, BY_EITHER, BY_RECEIVER, BY_SENDER, DEADLOCK, DONE, NEVER, NONE, UNALIGNED, UNKNOWN,
    Clock, Kind, Queue, Sends, StartedBy, Status, Step, input_of, maker_of, no_input,
    output_of,
)
from pptune.simulator.two_sided cimport play_two_sided

cdef enum:
    # Rows of Player.costs.
    FORWARD_HOPS = 4
    BACKWARD_HOPS = 8
    NUM_ROWS = 12

cdef enum:
    # Of a hop.
    LATENCY
    WIRE
    SEND
    RECEIVE

cdef enum:
    # Rows of a result [NUM_RESULTS, num_ranks].
    BUSY
    BUBBLE
    EXPOSED_TRANSFER
    OVERHEAD
    WARMUP
    STEADY
    COOLDOWN
    NUM_RESULTS


cdef class Played:
    """How a step went."""

    cdef readonly double step_time_s
    cdef readonly double longest_rank_span_s
    cdef readonly bint extrapolated
    # float64[7, num_ranks]: busy, bubble, exposed transfer, overhead, warmup, steady, cooldown.
    cdef readonly object result
    # float64[4, num_actions], rank after rank, or None: start and end of each action, and when the
    # message it needed left its sender and arrived, NaN where it needs none.
    cdef readonly object spans


class Stuck(Exception):
    """The ranks wait for each other without end."""

    def __init__(self, places, pending, takes_turns):
        super().__init__()
        self.places = places
        """How many actions each rank has done."""
        self.pending = pending
        """Stage, work and micro-batch of the rank's own message that it waits for, or None."""
        self.takes_turns = takes_turns
        """Whether messages are received in the order of sending."""


def play(order, costs, executor, bint spans):
    """The step that `order` takes under `costs`, which are for as many stages; with `spans`, every
    action of it.

    Raises Stuck for a deadlock and UsageError for impossible costs.
    """
    return Player(order, costs, executor, spans).play()


cdef class Player:
    """A step that is being played, and the memory it takes."""

    cdef object order
    cdef object executor
    cdef bint spans
    cdef StartedBy started_by
    cdef bint one_at_a_time
    # Stage times by work, then the parts of a hop, forward and backward [NUM_ROWS, num_stages];
    # see Costs.rows.
    cdef double* costs
    # By work.
    cdef double[4] overhead
    # What holds the memory of the part of the order that is played, and its size.
    cdef Codes codes
    cdef Posts posts
    cdef object room
    cdef int64_t num_microbatches
    cdef Step step

    def __cinit__(self, order, costs, executor, bint spans):
        cdef Step* step = &self.step
        cdef int64_t num_ranks = order.num_ranks, rank, stage, link
        rules = WAITS[executor]
        self.order, self.executor, self.spans = order, executor, spans
        self.one_at_a_time = rules.one_at_a_time
        self.started_by = started_by(order, rules)
        step.num_ranks, step.num_stages = num_ranks, order.num_stages
        step.pairs_together = rules.pairs_send_together
        step.saved = NONE
        self.costs = <double*> calloc(NUM_ROWS * step.num_stages, sizeof(double))
        step.ranks = <const int64_t*> address_of(order.rank_of_stage)
        step.kinds = <Kind*> malloc(4 * step.num_stages * sizeof(Kind))
        step.clocks = <Clock*> calloc(num_ranks, sizeof(Clock))
        step.places = <int64_t*> calloc(num_ranks, sizeof(int64_t))
        step.limits = <int64_t*> malloc(num_ranks * sizeof(int64_t))
        step.sends = <Sends*> malloc(num_ranks * sizeof(Sends))
        step.free = <double*> calloc(2 * num_ranks + 1, sizeof(double))
        step.saved_free = <double*> malloc(2 * num_ranks * sizeof(double))
        step.queues = <Queue*> malloc(2 * num_ranks * sizeof(Queue))
        if (
            self.costs == NULL or step.kinds == NULL
            or step.clocks == NULL or step.places == NULL
            or step.limits == NULL or step.sends == NULL or step.free == NULL
            or step.saved_free == NULL or step.queues == NULL
        ):
            raise MemoryError
        self.read(costs)
        step.wired = any_wire(step.num_stages, self.costs)
        for rank in range(num_ranks):
            step.sends[rank] = Sends(pending=NONE, held=NONE, started=0, halfway=False)
        for link in range(2 * num_ranks):
            step.queues[link] = Queue(NONE, NONE)

    def __dealloc__(self):
        free(self.costs)
        free(self.step.kinds)
        free(self.step.clocks)
        free(self.step.places)
        free(self.step.limits)
        free(self.step.sends)
        free(self.step.free)
        free(self.step.saved_free)
        free(self.step.queues)

    cdef read(self, costs):
        """Copy `costs`. Raises UsageError where they are impossible."""
        cdef int64_t num_stages = self.step.num_stages, row = 0
        cdef bint possible = True
        for seconds in costs.rows():
            if seconds is not None:
                possible = possible and copied(
                    seconds, self.costs + row * num_stages, num_stages - (row >= FORWARD_HOPS)
                )
            row += 1
        if not (possible and copied(costs.overhead_s, self.overhead, 4)):
            costs.refuse()

    cdef Played play(self):
        try:
            self.play_on()
            return self.result()
        finally:
            give_back(self.room)

    cdef play_on(self):
        """Play to the end. Raises Stuck."""
        cdef Step* step = &self.step
        cdef Status status
        cdef int64_t count = self.first_count(), total = 0
        if count:
            total = self.order.cycle.num_cycles
        step.cutting = count > 0
        while True:
            self.make_room(count, total)
            with nogil:
                if self.started_by == BY_EITHER:
                    status = play_two_sided(step)
                else:
                    status = play_one_sided(step, self.started_by == BY_RECEIVER)
            if status == DONE:
                return
            if status == DEADLOCK:
                raise self.stuck()
            if status == UNALIGNED:
                # The cycles left out must be a whole number of periods.
                count += (total - count) % (step.cut - step.saved)
            else:
                count = longer(count, total) if step.cutting else total
            step.cutting = step.cutting and count < total

    cdef int64_t first_count(self):
        """Cycles to play before the order is made longer, or 0 to play it whole."""
        cdef int64_t count
        cycle = self.order.cycle
        # Which messages have started is no state that cuts compare.
        if self.spans or self.one_at_a_time or cycle is None:
            return 0
        # Where waits look ahead, the last cut cannot be compared.
        count = cycle.num_settling + (self.started_by != BY_SENDER)
        return count if count < cycle.num_cycles else 0

    cdef make_room(self, int64_t count, int64_t total):
        """Set up the order with `count` of its `total` cycles, or all of it for 0, keeping what was
        played."""
        cdef Step* step = &self.step
        cdef Step before = step[0]
        self.num_microbatches = self.order.num_microbatches
        if count:
            cycle = self.order.cycle
            step.cycle_microbatches, step.cycle_actions = cycle.num_microbatches, cycle.num_actions
            step.first_start, step.start_per_rank = cycle.first_start, cycle.start_per_rank
            step.left_out = total - count
            # What a rank posts at a cut looks one cycle ahead: at the last cut, into the cooldown.
            step.last_cut = count - (self.started_by != BY_SENDER)
            self.num_microbatches -= step.left_out * step.cycle_microbatches
        self.codes = self.order.codes(self.num_microbatches)
        step.codes, step.lengths = self.codes.codes, self.codes.lengths
        step.width = self.codes.width
        step.stride = padded(self.num_microbatches)
        if self.started_by != BY_SENDER:
            self.posts = posts_of(
                self.codes, self.order.rank_of_stage, self.num_microbatches, self.executor,
            )
            step.posted_after, step.waits = self.posts.posted_after, self.posts.waits
            step.ticks, step.produced_tick = self.posts.ticks, self.posts.produced_tick
            step.streams, step.stream_width = self.posts.streams, self.posts.stream_width
        fill_kinds(step, self.started_by, self.costs, self.overhead)
        before_room = self.room
        self.make_messages(&before)
        give_back(before_room)
        self.look_up_sequence()

    cdef look_up_sequence(self):
        """Set up the sequence of an order that is played from its start, not for the first time."""
        cdef Step* step = &self.step
        cdef bint lowered = self.started_by == BY_RECEIVER
        cdef Sequence sequence
        cdef int64_t rank
        step.turns = NULL
        if self.started_by == BY_EITHER:
            return
        for rank in range(step.num_ranks):
            if step.places[rank] > 0:
                return
        key = (self.executor, "sequence")
        kept = self.codes.kept
        if key not in kept:
            kept[key] = None
            return
        if kept[key] is None:
            kept[key] = sequence_of(step, step.last_cut if step.cutting else -1, lowered)
        sequence = kept[key]
        step.turns = sequence.turns

    cdef make_messages(self, const Step* before):
        """Set up message arrays in which nothing has happened yet but what there was `before`."""
        cdef Step* step = &self.step
        cdef int64_t rows = 2 * step.num_stages + 2, size = rows * step.stride
        cdef int64_t num_done = step.num_ranks * (step.width + 1), at
        cdef bint by_sender = self.started_by == BY_SENDER, by_either = self.started_by == BY_EITHER
        cdef bint has_arrived = by_sender or by_either or self.spans
        cdef bint has_produced = by_either or (by_sender and step.wired)
        cdef int64_t num_arrays = has_arrived + has_produced + (not by_sender) + by_either
        self.room = take_room(num_arrays * size + num_done)
        cdef double* place = <double*> address_of(self.room)
        step.arrived = step.produced = step.sent = step.done = NULL
        step.following = NULL
        if has_arrived:
            step.arrived, place = place, place + size
            clear(step, step.arrived)
            take_over(rows, before.arrived, before.stride, step.arrived, step.stride)
        if has_produced:
            step.produced, place = place, place + size
            clear(step, step.produced)
            take_over(rows, before.produced, before.stride, step.produced, step.stride)
        if by_either:
            step.following, place = <int64_t*> place, place + size
            take_over(rows, <double*> before.following, before.stride,
                      <double*> step.following, step.stride)
        if not by_sender:
            step.sent, place = place, place + size
            clear(step, step.sent)
            take_over(rows, before.sent, before.stride, step.sent, step.stride)
            step.done = place
            if by_either:  # The other loop never asks for what has not been done.
                for at in range(num_done):
                    step.done[at] = UNKNOWN
            for at in range(0, num_done, step.width + 1):
                step.done[at] = 0.0
            take_over(
                step.num_ranks, before.done, before.width + 1, step.done, step.width + 1
            )

    cdef object stuck(self):
        cdef int64_t rank, name
        pending = []
        for rank in range(self.step.num_ranks):
            name = self.step.sends[rank].pending
            pending.append(
                None if name == NONE
                else (stage_of(maker_of(name)), work_of(maker_of(name)), <uint32_t> name)
            )
        places = [self.step.places[rank] for rank in range(self.step.num_ranks)]
        return Stuck(places, pending, self.started_by == BY_EITHER)

    cdef double end_of(self, int64_t code) noexcept:
        """When a forward or backward was done, from the message it made."""
        cdef const Step* step = &self.step
        cdef const Kind* kind = &step.kinds[kind_of(code)]
        cdef int64_t slot = output_of(step, code)
        if step.produced != NULL:
            return step.produced[slot]
        if step.sent != NULL:
            return step.sent[slot] - kind.send
        return step.arrived[slot] - kind.latency - kind.send

    cdef double seconds_of(self, int64_t code) noexcept:
        """What an action takes, its overhead included and its messages not."""
        return (
            self.costs[work_of(code) * self.step.num_stages + stage_of(code)]
            + self.overhead[work_of(code)]
        )

    cdef Played result(self):
        """Where every rank's time went."""
        cdef Played played = Played()
        played.extrapolated = self.step.left_out > 0
        played.result = np.empty((NUM_RESULTS, self.step.num_ranks))
        cdef const double* costs = self.costs
        cdef const double* overhead = self.overhead
        cdef const Step* step = &self.step
        cdef int64_t num_ranks = step.num_ranks, num_stages = step.num_stages
        cdef double* busy = <double*> address_of(played.result)
        cdef double* bubble = busy + BUBBLE * num_ranks
        cdef double* exposed = busy + EXPOSED_TRANSFER * num_ranks
        cdef double* overheads = busy + OVERHEAD * num_ranks
        cdef double* warmup = busy + WARMUP * num_ranks
        cdef double* steady = busy + STEADY * num_ranks
        cdef double* cooldown = busy + COOLDOWN * num_ranks
        cdef int64_t num_microbatches = self.order.num_microbatches
        cdef int64_t rank, stage, work, at, num_actions, num_split, code
        cdef int64_t num_backwards = num_microbatches * (step.num_stages // num_ranks)
        cdef double total = 0.0, span = 0.0, occupied, last_forward, started, warm
        for rank in range(num_ranks):
            total = max(total, step.clocks[rank].now + step.late)
            exposed[rank] = step.clocks[rank].exposed
            # Forwards and weight parts are counted by what the list holds besides backwards.
            num_actions = step.lengths[rank] + step.left_out * step.cycle_actions
            num_split = num_actions - 2 * num_backwards
            overheads[rank] = (
                num_backwards * overhead[FORWARD]
                + (num_backwards - num_split) * overhead[BACKWARD]
                + num_split * (overhead[BACKWARD_INPUT] + overhead[BACKWARD_WEIGHT])
            )
        for stage in range(step.num_stages):
            rank = step.ranks[stage]
            for work in range(2):
                occupied = num_microbatches * (
                    step.kinds[4 * stage + work].total - costs[work * num_stages + stage]
                    - overhead[work]
                )
                exposed[rank] += occupied
                step.clocks[rank].spent -= occupied
        for rank in range(num_ranks):
            busy[rank] = step.clocks[rank].spent - overheads[rank]
            # Where a rank never waits, rounding may leave a little less than nothing.
            exposed[rank] = max(0.0, exposed[rank])
            bubble[rank] = max(0.0, total - step.clocks[rank].spent - exposed[rank])
            at = rank * step.width + step.lengths[rank] - 1
            while work_of(step.codes[at]) != FORWARD:
                at -= 1
            last_forward = self.end_of(step.codes[at]) + step.late
            at = rank * step.width
            code = step.codes[at]
            started = self.end_of(code) - self.seconds_of(code)
            while work_of(step.codes[at]) == FORWARD:
                at += 1
            code = step.codes[at]
            warm = min(self.end_of(code) - self.seconds_of(code), last_forward)
            warmup[rank] = warm
            steady[rank] = last_forward - warm
            cooldown[rank] = total - last_forward
            span = max(span, step.clocks[rank].ended + step.late - started)
        played.step_time_s, played.longest_rank_span_s = total, span
        if self.spans:
            played.spans = self.all_spans()
        return played

    cdef object all_spans(self):
        """When every action ran, from the arrivals that were found by playing the whole step."""
        cdef Step* step = &self.step
        cdef int64_t rank, at, code, pending, slot, column = 0, num_actions = 0
        cdef double now, held_s
        cdef const Kind* kind
        for rank in range(step.num_ranks):
            num_actions += step.lengths[rank]
        spans = np.empty((4, num_actions))
        cdef double* starts = <double*> address_of(spans)
        cdef double* ends = starts + num_actions
        cdef double* sents = ends + num_actions
        cdef double* arrivals = sents + num_actions
        fill_kinds(step, BY_RECEIVER, self.costs, self.overhead)
        for rank in range(step.num_ranks):
            now = held_s = 0.0
            pending = NONE
            for at in range(rank * step.width, rank * step.width + step.lengths[rank]):
                code = step.codes[at]
                kind = &step.kinds[kind_of(code)]
                slot = input_of(step, code)
                sents[column] = arrivals[column] = NAN
                if kind.input != no_input(step):
                    arrivals[column] = step.arrived[slot]
                    sents[column] = step.arrived[slot] - kind.latency - kind.wire
                    now = max(now, step.arrived[slot])
                if pending != NONE and step.waits[at - 1] != AFTER_NEXT:
                    now = max(now, step.arrived[pending])
                    pending = NONE
                now += kind.total - kind.send
                starts[column], ends[column] = now - self.seconds_of(code), now
                if pending != NONE:
                    now = max(now, step.arrived[pending])
                    pending = NONE
                if step.pairs_together and is_paired(code):
                    held_s = kind.send
                else:
                    now += held_s + kind.send
                    held_s = 0.0
                slot = output_of(step, code)
                if (
                    self.started_by == BY_EITHER and step.waits[at] != NEVER
                    and step.arrived[slot] >= 0.0
                ):
                    pending = slot
                column += 1
        return spans


cdef bint copied(seconds, double* to, int64_t size) except -1:
    """Copy `size` times; False where they are not so many, or one is negative or not finite."""
    cdef int64_t at
    if not is_plain(seconds):
        seconds = np.ascontiguousarray(seconds, np.float64).ravel()
    cdef const double* times = <const double*> address_of(seconds)
    if len(seconds) != size:
        return False
    for at in range(size):
        if not 0.0 <= times[at] < INFINITY:
            return False
        to[at] = times[at]
    return True


cdef bint is_plain(seconds) except -1:
    """Whether these are C-contiguous float64; to have numpy say so takes longer than to copy them.
    """
    cdef Py_buffer view
    cdef bint plain
    if not PyObject_CheckBuffer(seconds):
        return False
    PyObject_GetBuffer(seconds, &view, PyBUF_RECORDS_RO)
    plain = (
        view.ndim == 1 and view.format[0] == c"d" and view.strides[0] == sizeof(double)
    )
    PyBuffer_Release(&view)
    return plain


cdef StartedBy started_by(order, rules):
    """Which end starts the messages of `order`, and so which loop plays it."""
    if rules.receive is Receive.BEFORE_STEP:
        return BY_SENDER
    # With generated orders on a loop of 3 ranks and more, a link carries one kind of message in the
    # order in which both of its ends deal with them.
    simple = order.placement == "loop" and (
        order.num_ranks != 2 or order.num_stages == order.num_ranks
    )
    if rules.receive is Receive.LOWERED and not rules.one_at_a_time and simple and order.generated:
        return BY_RECEIVER
    return BY_EITHER


cdef int64_t longer(int64_t count, int64_t total) noexcept:
    """How many cycles to play after `count` were not enough; `total` for all of them."""
    cdef int64_t more = count + 1 if count < 4 else 2 * count
    return total if 4 * more > 3 * total else more


cdef bint any_wire(int64_t num_stages, const double* costs) noexcept:
    """Whether any message occupies its link."""
    cdef int64_t hops, at
    for hops in (FORWARD_HOPS, BACKWARD_HOPS):
        for at in range((hops + WIRE) * num_stages, (hops + WIRE + 1) * num_stages):
            if costs[at] != 0.0:
                return True
    return False


cdef void fill_kinds(
    Step* step, StartedBy started_by, const double* costs, const double* overhead
) noexcept:
    """What the inner loops look up, from a cost table, for messages started by that end."""
    cdef int64_t num_ranks = step.num_ranks, num_stages = step.num_stages, stride = step.stride
    cdef int64_t stage, work, rank, way, row, hops, source, target, link
    cdef const double* hop
    cdef Kind* kind
    for stage in range(num_stages):
        rank = step.ranks[stage]
        for work in range(4):
            kind = &step.kinds[4 * stage + work]
            kind.input, kind.output = 2 * num_stages * stride, (2 * num_stages + 1) * stride
            kind.link = kind.input_link = 2 * num_ranks
            kind.total = costs[work * num_stages + stage] + overhead[work]
            kind.latency = kind.wire = kind.input_lag = kind.send = 0.0
            if work == BACKWARD_WEIGHT:
                continue
            # The rule of schedules.action.input_stage: a forward's input comes from the stage
            # before, a backward's from the one after. Boundary s lies between stages s and s + 1.
            way = 1 if work == FORWARD else -1
            row = 0 if work == FORWARD else num_stages
            hops = FORWARD_HOPS if work == FORWARD else BACKWARD_HOPS
            kind.output = (row + stage) * stride
            source, target = stage - way, stage + way
            if 0 <= source < num_stages and step.ranks[source] != rank:
                hop = costs + hops * num_stages + min(source, stage)
                link = link_of(step.ranks[source], rank, num_ranks)
                kind.input = (row + source) * stride
                kind.total += hop[RECEIVE * num_stages]
                kind.input_link = link
                kind.input_lag = hop[SEND * num_stages]
                if started_by == BY_SENDER:
                    kind.input_lag += hop[LATENCY * num_stages]
                if started_by == BY_RECEIVER:
                    kind.link = link
                    kind.latency, kind.wire = hop[LATENCY * num_stages], hop[WIRE * num_stages]
            if 0 <= target < num_stages and step.ranks[target] != rank:
                hop = costs + hops * num_stages + min(stage, target)
                kind.send = hop[SEND * num_stages]
                kind.total += kind.send
                if started_by != BY_RECEIVER:
                    kind.link = link_of(rank, step.ranks[target], num_ranks)
                    kind.latency, kind.wire = hop[LATENCY * num_stages], hop[WIRE * num_stages]


cdef inline int64_t link_of(int64_t source, int64_t target, int64_t num_ranks) noexcept:
    """The link from one rank to its neighbour."""
    return 2 * source + (target - source not in (1, 1 - num_ranks))


cdef void clear(const Step* step, double* times) noexcept:
    """Set the times of messages, unless NULL, to not known, but for that of "needs no message"."""
    cdef int64_t at, size = (2 * step.num_stages + 2) * step.stride
    if times == NULL:
        return
    for at in range(size):
        times[at] = UNKNOWN
    for at in range(no_input(step), no_input(step) + step.stride):
        times[at] = 0.0


cdef void take_over(
    int64_t num_rows, const double* old, int64_t old_width, double* new, int64_t new_width
) noexcept:
    """Copy the rows of an array, unless NULL, into one with other rows."""
    cdef int64_t row
    if old == NULL:
        return
    for row in range(num_rows):
        memcpy(new + row * new_width, old + row * old_width,
               min(old_width, new_width) * sizeof(double))


cdef list spare_rooms = []
"""Memory of steps that were played. To ask the system for new memory costs more than playing."""
cdef int64_t MAX_SPARE_SIZE = 2**22
"""Larger rooms are given up."""


cdef object take_room(int64_t size):
    """An array of `size` or more numbers that nobody else uses."""
    if spare_rooms:
        room = spare_rooms.pop()
        if room.size >= size:
            return room
    return np.empty(size)


cdef give_back(room):
    if room is not None and room.size <= MAX_SPARE_SIZE and len(spare_rooms) < 2:
        spare_rooms.append(room)
