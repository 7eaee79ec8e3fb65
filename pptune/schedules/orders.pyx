# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The inner loops that write orders and count what they hold.

Every schedule's own file describes it; here its actions are written, all ranks after each other.
"""

from libc.stdint cimport UINT32_MAX, int8_t, int32_t, int64_t
from libc.stdlib cimport free, malloc

import numpy as np

MAX_STAGES = STAGE_MASK
MAX_MICROBATCHES = UINT32_MAX


cdef class Codes:
    """The actions of all ranks, each as one integer; see orders.pxd."""

    def __cinit__(self, int64_t num_ranks, int64_t num_actions):
        """Room for `num_actions` per rank."""
        self.num_ranks = num_ranks
        self.width = padded(num_actions)
        self.kept = {}
        # numpy lets the system use large pages, which playing long orders needs to be fast.
        self.code_array = np.empty(num_ranks * self.width, np.int64)
        self.length_array = np.empty(num_ranks, np.int64)
        self.codes = <int64_t*> address_of(self.code_array)
        self.lengths = <int64_t*> address_of(self.length_array)

    @staticmethod
    def of(ranks):
        """The codes of these actions: per rank (stage, work, micro-batch, whether it is paired)."""
        cdef int64_t stage, work, microbatch, paired, rank, at
        cdef Codes made = Codes(len(ranks), max(map(len, ranks)))
        for rank, actions in enumerate(ranks):
            made.lengths[rank] = len(actions)
            for at, (stage, work, microbatch, paired) in enumerate(actions):
                made.codes[rank * made.width + at] = (
                    code_of(work, stage, microbatch) | paired << PAIR_SHIFT
                )
        return made

    def num_actions(self):
        """How many actions each rank does; int64[num_ranks]."""
        return self.length_array.copy()

    def columns(self):
        """Work, stage, micro-batch and whether it is paired, of every action, rank after rank."""
        cdef int64_t rank, at, code, column = 0
        total = self.length_array.sum()
        columns = tuple(np.empty(total, kind) for kind in (np.int8, np.int32, np.int32, np.bool_))
        cdef int8_t* works = <int8_t*> address_of(columns[0])
        cdef int32_t* stages = <int32_t*> address_of(columns[1])
        cdef int32_t* microbatches = <int32_t*> address_of(columns[2])
        cdef int8_t* pairs = <int8_t*> address_of(columns[3])
        for rank in range(self.num_ranks):
            for at in range(rank * self.width, rank * self.width + self.lengths[rank]):
                code = self.codes[at]
                works[column] = work_of(code)
                stages[column] = stage_of(code)
                microbatches[column] = microbatch_of(code)
                pairs[column] = is_paired(code)
                column += 1
        return columns

    def peaks(self, bytes_per_stage):
        """The largest sum of `bytes_per_stage`, float64[num_stages], over what each rank holds;
        float64[num_ranks].

        A stage's micro-batch is held from its forward until its full backward or weight part.
        """
        peaks = np.empty(self.num_ranks)
        cdef const double* stage_bytes = <const double*> address_of(bytes_per_stage)
        cdef double* highest_bytes = <double*> address_of(peaks)
        cdef int64_t rank, at, code, work
        cdef double held, highest, num_bytes
        for rank in range(self.num_ranks):
            held = highest = 0.0
            for at in range(rank * self.width, rank * self.width + self.lengths[rank]):
                code = self.codes[at]
                work = work_of(code)
                num_bytes = stage_bytes[stage_of(code)]
                if work == FORWARD:
                    held += num_bytes
                    highest = max(highest, held)
                elif work != BACKWARD_INPUT:
                    held -= num_bytes
            highest_bytes[rank] = highest
        return peaks


def breadth_first(
    int64_t num_ranks, int64_t num_chunks, int64_t num_microbatches, bint reverse_backwards
):
    """Forwards by chunk and micro-batch, then backwards from the last chunk on; see
    breadth_first.py."""
    cdef int64_t half = num_chunks * num_microbatches
    cdef Codes made = Codes(num_ranks, 2 * half)
    cdef int64_t rank, at, chunk, stage, last, microbatch, turn
    for rank in range(num_ranks):
        at = rank * made.width
        for chunk in range(num_chunks):
            stage = chunk * num_ranks + rank
            last = (num_chunks - 1 - chunk) * num_ranks + rank
            for microbatch in range(num_microbatches):
                made.codes[at] = code_of(FORWARD, stage, microbatch)
                turn = num_microbatches - 1 - microbatch if reverse_backwards else microbatch
                made.codes[half + at] = code_of(BACKWARD, last, turn)
                at += 1
        made.lengths[rank] = 2 * half
    return made


cdef struct Looped:
    # What looped.py describes.
    int64_t num_ranks
    int64_t num_chunks
    int64_t num_microbatches
    int64_t group


cdef struct Run:
    # Actions of one kind in the same stage whose micro-batches count up.
    int64_t code
    int64_t left


cdef Run run_at(int64_t index, int64_t work, int64_t rank, Looped* sizes) noexcept nogil:
    """A rank's forwards, backwards or weight parts from the `index`-th on."""
    cdef int64_t first = index // (sizes.num_chunks * sizes.group) * sizes.group
    cdef int64_t size = min(sizes.group, sizes.num_microbatches - first)
    cdef int64_t inside = index - first * sizes.num_chunks
    cdef int64_t chunk = inside // size
    cdef int64_t offset = inside % size
    cdef Run run
    if work != FORWARD:
        chunk = sizes.num_chunks - 1 - chunk
    run.code = code_of(work, chunk * sizes.num_ranks + rank, first + offset)
    run.left = size - offset
    return run


cdef void write_run(Run* run, int64_t* codes, int64_t step, int64_t count) noexcept nogil:
    """Write the next `count` actions of `run` to every `step`-th place."""
    cdef int64_t i
    for i in range(count):
        codes[step * i] = run.code + (i << MICROBATCH_SHIFT)
    run.code += count << MICROBATCH_SHIFT
    run.left -= count


def looped(
    int64_t num_ranks, int64_t num_chunks, int64_t num_microbatches, int64_t group,
    int64_t warmup_per_hop, int64_t weight_lag, bint split,
):
    """1F1B on looped stages; see looped.py.

    In slot i a rank does forward i, backward i - w and, where backwards are `split`, weight part
    i - w - lag, those that exist. Slots are written in runs in which only the micro-batches count
    up.
    """
    cdef Looped sizes = Looped(num_ranks, num_chunks, num_microbatches, group)
    cdef int64_t total = num_chunks * num_microbatches
    cdef int64_t backward = BACKWARD_INPUT if split else BACKWARD
    cdef Codes made = Codes(num_ranks, (3 if split else 2) * total)
    cdef int64_t rank, warmup, weights, slot, count, per_slot
    cdef int64_t* at
    cdef bint has_f, has_b, has_w
    cdef Run f, b, w
    for rank in range(num_ranks):
        warmup = min((num_chunks - 1) * group + warmup_per_hop * (num_ranks - 1 - rank), total)
        weights = warmup + weight_lag * rank if split else warmup
        f = b = w = Run(0, 0)
        at = made.codes + rank * made.width
        slot = 0
        while slot < weights + total:
            has_f = slot < total
            has_b = warmup <= slot < warmup + total
            has_w = split and slot >= weights
            count = weights + total - slot
            if slot < warmup:
                count = min(count, warmup - slot)
            if slot < weights:
                count = min(count, weights - slot)
            if slot < total:
                count = min(count, total - slot)
            if slot < warmup + total:
                count = min(count, warmup + total - slot)
            if has_f:
                if f.left == 0:
                    f = run_at(slot, FORWARD, rank, &sizes)
                count = min(count, f.left)
            if has_b:
                if b.left == 0:
                    b = run_at(slot - warmup, backward, rank, &sizes)
                count = min(count, b.left)
            if has_w:
                if w.left == 0:
                    w = run_at(slot - weights, BACKWARD_WEIGHT, rank, &sizes)
                count = min(count, w.left)
            per_slot = has_f + has_b + has_w
            if has_f:
                write_run(&f, at, per_slot, count)
            if has_b:
                write_run(&b, at + has_f, per_slot, count)
            if has_w:
                write_run(&w, at + per_slot - 1, per_slot, count)
            at += per_slot * count
            slot += count
        made.lengths[rank] = at - (made.codes + rank * made.width)
    return made


cdef struct Pen:
    # Where the next action is written. Actions of micro-batches that don't exist are left out.
    int64_t* at
    int64_t num_microbatches


cdef void write(Pen* pen, int64_t work, int64_t stage, int64_t microbatch) noexcept nogil:
    if microbatch < pen.num_microbatches:
        pen.at[0] = code_of(work, stage, microbatch)
        pen.at += 1


def zero_bubble_v(int64_t num_ranks, int64_t num_microbatches):
    """ZB-V; see zb_v.py."""
    cdef Codes made = Codes(num_ranks, 6 * num_microbatches)
    cdef int64_t planned = max(num_microbatches, 2 * num_ranks - 1)
    cdef int64_t rank, down, up, microbatch
    cdef int64_t f_down, f_up, i_down, i_up, w_down, w_up
    cdef Pen pen
    pen.num_microbatches = num_microbatches
    for rank in range(num_ranks):
        pen.at = made.codes + rank * made.width
        down, up = rank, 2 * num_ranks - 1 - rank
        # How many forwards, input and weight parts either stage has done.
        f_down = f_up = i_down = i_up = 0
        for _ in range(2 * (num_ranks - rank) - 1):
            write(&pen, FORWARD, down, f_down)
            f_down += 1
        for _ in range(rank):
            write(&pen, FORWARD, up, f_up)
            write(&pen, FORWARD, down, f_down)
            f_up += 1
            f_down += 1
        for _ in range(num_ranks - rank):
            write(&pen, FORWARD, up, f_up)
            write(&pen, BACKWARD_INPUT, up, i_up)
            write(&pen, BACKWARD_WEIGHT, up, i_up)
            f_up += 1
            i_up += 1
        while f_up < planned:
            if f_down < planned:
                write(&pen, FORWARD, down, f_down)
                f_down += 1
            write(&pen, BACKWARD_INPUT, down, i_down)
            write(&pen, BACKWARD_WEIGHT, down, i_down)
            write(&pen, FORWARD, up, f_up)
            write(&pen, BACKWARD_INPUT, up, i_up)
            write(&pen, BACKWARD_WEIGHT, up, i_up)
            f_up += 1
            i_down += 1
            i_up += 1
        w_down, w_up = i_down, i_up
        for _ in range(rank):
            write(&pen, BACKWARD_INPUT, down, i_down)
            write(&pen, BACKWARD_INPUT, up, i_up)
            i_down += 1
            i_up += 1
        for _ in range(num_ranks - rank):
            write(&pen, BACKWARD_INPUT, down, i_down)
            write(&pen, BACKWARD_WEIGHT, down, w_down)
            i_down += 1
            w_down += 1
        for microbatch in range(w_up, i_up):
            write(&pen, BACKWARD_WEIGHT, up, microbatch)
        for microbatch in range(w_down, i_down):
            write(&pen, BACKWARD_WEIGHT, down, microbatch)
        made.lengths[rank] = pen.at - (made.codes + rank * made.width)
    return made


cdef enum:
    # The stage on the way down the V and the one on the way back up.
    DOWN = 0
    UP = 1


cdef struct Fold:
    # One rank of DualPipeV: its next forward and backward on either side, and the weight parts that
    # its input parts owe.
    int64_t* at
    int64_t[2] stages
    int64_t[2] forwards
    int64_t[2] backwards
    int64_t* owed
    int64_t num_owed
    int64_t num_paid


cdef void do_next(Fold* fold, int64_t side, int64_t work, bint paired) noexcept nogil:
    """Write the side's next forward or backward; an input part owes its weight part."""
    cdef int64_t* following = &fold.forwards[side] if work == FORWARD else &fold.backwards[side]
    cdef int64_t stage = fold.stages[side], microbatch = following[0]
    following[0] += 1
    if work == BACKWARD_INPUT:
        fold.owed[fold.num_owed] = code_of(BACKWARD_WEIGHT, stage, microbatch)
        fold.num_owed += 1
    fold.at[0] = code_of(work, stage, microbatch) | <int64_t> paired << PAIR_SHIFT
    fold.at += 1


cdef void do_owed(Fold* fold) noexcept nogil:
    """Write the weight part that has been owed longest, if any."""
    if fold.num_paid < fold.num_owed:
        fold.at[0] = fold.owed[fold.num_paid]
        fold.at += 1
        fold.num_paid += 1


def dualpipe_v(int64_t num_ranks, int64_t num_microbatches):
    """DualPipeV; see dualpipe_v.py."""
    cdef Codes made = Codes(num_ranks, 6 * num_microbatches)
    cdef int64_t rank, after, turn, side, work = BACKWARD, first_split, backwards
    cdef Fold fold
    fold.owed = <int64_t*> malloc(2 * num_microbatches * sizeof(int64_t))
    if fold.owed == NULL:
        raise MemoryError
    for rank in range(num_ranks):
        after = num_ranks - 1 - rank
        fold.at = made.codes + rank * made.width
        fold.stages[DOWN], fold.stages[UP] = rank, 2 * num_ranks - 1 - rank
        for side in range(2):
            fold.forwards[side] = fold.backwards[side] = 0
        fold.num_owed = fold.num_paid = 0
        for _ in range(2 * after):
            do_next(&fold, DOWN, FORWARD, False)
        for _ in range(rank + 1):
            do_next(&fold, DOWN, FORWARD, False)
            do_next(&fold, UP, FORWARD, False)
        for _ in range(after):
            do_next(&fold, UP, BACKWARD_INPUT, False)
            do_owed(&fold)
            do_next(&fold, UP, FORWARD, False)
        for turn in range(num_microbatches - 2 * num_ranks + rank + 1):
            # The last rank's first pair is not overlapped, which shortens the bubble.
            do_next(&fold, DOWN, FORWARD, turn > 0 or after > 0)
            do_next(&fold, UP, BACKWARD, False)
            do_next(&fold, UP, FORWARD, True)
            do_next(&fold, DOWN, BACKWARD, False)
        for _ in range(after):
            do_next(&fold, UP, BACKWARD, False)
            do_next(&fold, UP, FORWARD, True)
            do_next(&fold, DOWN, BACKWARD, False)
        # Half way through the next step backwards are split: after the middle turn's backward up
        # on even ranks, before it on odd ones.
        first_split = 2 * ((rank + 1) // 2) + 1 - rank % 2
        backwards = 0
        for _ in range(rank + 1):
            for side in (UP, DOWN):
                work = BACKWARD_INPUT if backwards >= first_split else BACKWARD
                do_next(&fold, side, work, False)
                backwards += 1
        for _ in range(after):
            do_owed(&fold)
            do_next(&fold, DOWN, work, False)
        for _ in range(rank + 1):
            do_owed(&fold)
        made.lengths[rank] = fold.at - (made.codes + rank * made.width)
    free(fold.owed)
    return made
