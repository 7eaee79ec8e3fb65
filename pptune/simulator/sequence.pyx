# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""All ranks' actions in one sequence, each behind those that it needs.

Which rank can go on does not depend on what actions take, so an order that is played again under
other costs need not be searched for it again. No branch is left in such a loop that a processor
could guess wrong, and actions of different ranks overlap in it.
"""

from libc.stdint cimport int8_t, int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from pptune.schedules.orders cimport kind_of
from pptune.simulator.cuts cimport set_limits
from pptune.simulator.state cimport Step, Turn, input_of, no_input, output_of, rank_at


cdef class Sequence:
    def __dealloc__(self):
        free(self.turns)


cdef Sequence sequence_of(const Step* step, int64_t last_cut, bint lowered):
    """The sequence of a step that has cuts 0 to `last_cut`, or -1 for none.

    What comes before a cut is together: the first n turns, where n is how many actions that is.
    `step` stays as it is.
    """
    cdef Step dry = step[0]
    cdef Sequence sequence = Sequence()
    cdef int64_t rank, total = 0, size = (2 * step.num_stages + 2) * step.stride
    for rank in range(step.num_ranks):
        total += step.lengths[rank]
    cdef int8_t* made = <int8_t*> calloc(size, sizeof(int8_t))
    dry.places = <int64_t*> calloc(step.num_ranks, sizeof(int64_t))
    dry.limits = <int64_t*> malloc(step.num_ranks * sizeof(int64_t))
    sequence.turns = <Turn*> malloc(total * sizeof(Turn))
    try:
        if (
            made == NULL or dry.places == NULL or dry.limits == NULL or sequence.turns == NULL
        ):
            raise MemoryError
        memset(made + no_input(step), 1, step.stride)
        if not fill(&dry, last_cut, lowered, made, sequence.turns):
            free(sequence.turns)
            sequence.turns = NULL
    finally:
        free(made)
        free(dry.places)
        free(dry.limits)
    return sequence


cdef bint fill(
    Step* step, int64_t last_cut, bint lowered, int8_t* made, Turn* turns
) noexcept nogil:
    """Write the turns; False where some action before a cut, or before the end, can't be done."""
    cdef int64_t cut, remaining, before, at
    for cut in range(last_cut + 2):
        step.cut, step.cutting = cut, cut <= last_cut
        remaining = set_limits(step)
        before = remaining + 1
        while 0 < remaining < before:
            before = remaining
            # One action of each rank in a round, so that neighbours here don't wait for each other.
            for at in range(step.num_ranks):
                if write_next(step, rank_at(at, step.num_ranks), lowered, made, turns):
                    turns += 1
                    remaining -= 1
        if remaining > 0:
            return False
    return True


cdef bint write_next(
    Step* step, int64_t rank, bint lowered, int8_t* made, Turn* turn
) noexcept nogil:
    """Write the next turn of a rank; False where it is at its limit or needs a message to come."""
    cdef int64_t row = rank * (step.width + 1) + 1
    cdef int64_t at = step.places[rank]
    cdef int64_t code, input
    if at == step.limits[rank]:
        return False
    code = step.codes[rank * step.width + at]
    input = input_of(step, code)
    if not made[input]:
        return False
    turn.kind, turn.rank = <int32_t> kind_of(code), <int32_t> rank
    turn.input, turn.output = <int32_t> input, <int32_t> output_of(step, code)
    turn.posted = <int32_t> (row + step.posted_after[input]) if lowered else 0
    turn.done = <int32_t> (row + at)
    made[turn.output] = True
    step.places[rank] = at + 1
    return True
