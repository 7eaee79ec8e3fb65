from libc.stdint cimport int64_t

from pptune.simulator.state cimport Step, Turn

cdef class Sequence:
    # NULL where the order can't be put in one.
    cdef Turn* turns


cdef Sequence sequence_of(const Step* step, int64_t last_cut, bint lowered)
