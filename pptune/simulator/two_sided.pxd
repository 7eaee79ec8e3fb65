from pptune.simulator.state cimport Status, Step

cdef Status play_two_sided(Step* step) noexcept nogil
