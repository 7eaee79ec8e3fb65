"""How an action is written as one integer, and every rank's actions as such codes."""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t

cpdef enum:
    # A kind of action; schedules.action.Work names these numbers for Python.
    FORWARD
    BACKWARD
    BACKWARD_INPUT
    BACKWARD_WEIGHT

cdef enum:
    # A code holds work in bits 0-1, stage in 2-23, micro-batch in 24-55, and in bit 56 whether the
    # action and the next one form an overlapped pair.
    STAGE_SHIFT = 2
    MICROBATCH_SHIFT = 24
    PAIR_SHIFT = 56

    WORK_MASK = 3
    STAGE_MASK = (1 << 22) - 1
    KIND_MASK = (1 << 24) - 1


cdef inline int64_t code_of(int64_t work, int64_t stage, int64_t microbatch) noexcept nogil:
    return work | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


cdef inline int64_t work_of(int64_t code) noexcept nogil:
    return code & WORK_MASK


cdef inline int64_t stage_of(int64_t code) noexcept nogil:
    return code >> STAGE_SHIFT & STAGE_MASK


cdef inline int64_t kind_of(int64_t code) noexcept nogil:
    """4 * stage + work: what all micro-batches have in common."""
    return code & KIND_MASK


cdef inline int64_t microbatch_of(int64_t code) noexcept nogil:
    return <uint32_t> (code >> MICROBATCH_SHIFT)


cdef inline bint is_paired(int64_t code) noexcept nogil:
    """Whether the action and the next one form an overlapped pair."""
    return code >> PAIR_SHIFT != 0


cdef inline int64_t padded(int64_t size) noexcept nogil:
    """The least odd number of 64-byte cache lines that holds `size` 8-byte items, in items.

    Rows a power of two apart share cache sets and evict each other when many ranks are played in
    turn: at 64 ranks that makes the inner loop five times slower.
    """
    return ((size + 7) // 8 | 1) * 8


cdef inline void* address_of(array) except NULL:
    """Where the numbers of a C-contiguous array begin. The array must outlive their use.

    Typed memoryviews would do the same at three times the size of the compiled module, ten times
    its build time and a microsecond per array.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS)
    PyBuffer_Release(&view)
    return view.buf


cdef class Codes:
    cdef readonly int64_t num_ranks
    # Rank r's actions are codes[r * width : r * width + lengths[r]].
    cdef int64_t* codes
    cdef int64_t width
    cdef int64_t* lengths
    cdef object code_array
    cdef object length_array
    # What executors make of these actions, by executor.
    cdef dict kept
