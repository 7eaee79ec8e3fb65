from libc.stdint cimport int8_t, int32_t, int64_t

cdef class Posts:
    # By message: position, in the receiver's list, of the action that its receive follows, or NONE
    # where it is posted before the first.
    cdef int32_t* posted_after
    # By action, as in the order's codes: the Wait for its message.
    cdef int8_t* waits
    # By action: its tick in torch's lowering. This and the next are NULL for other executors.
    cdef int32_t* ticks
    # By message: tick of the action that produces it.
    cdef int32_t* produced_tick
    # Names of the messages that each rank sends or receives, in the order in which it posts them,
    # [num_ranks, stream_width]; NULL where that does not matter.
    cdef const int64_t* streams
    cdef int64_t stream_width
    cdef object stream_array
    cdef int64_t num_rows
    cdef int64_t stride
