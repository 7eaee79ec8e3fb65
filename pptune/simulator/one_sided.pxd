from pptune.simulator.state cimport Status, Step

cdef Status play_one_sided(Step* step, bint lowered) noexcept nogil
