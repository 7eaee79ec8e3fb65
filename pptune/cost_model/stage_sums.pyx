# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Sums over the layers of each stage, for anything that layers have: seconds, bytes."""

from libc.stdint cimport int64_t

import numpy as np

from pptune.schedules.orders cimport address_of


def stage_sums(per_layer, tuple layers_per_stage):
    """float64[n, num_stages] from `per_layer`, float64[n, 3]: n numbers of the embedding, a block
    and the head.

    The embedding is on the first stage, the head on the last. In numpy the calls would take longer
    than the work on as few numbers as stages are.
    """
    cdef int64_t num_rows = len(per_layer), num_stages = len(layers_per_stage), row, stage
    cdef const double* layer = <const double*> address_of(per_layer)
    sums = np.empty((num_rows, num_stages))
    cdef double* total = <double*> address_of(sums)
    cdef double blocks
    for stage in range(num_stages):
        blocks = <double> layers_per_stage[stage]
        for row in range(num_rows):
            total[row * num_stages + stage] = blocks * layer[3 * row + 1]
    for row in range(num_rows):
        total[row * num_stages] += layer[3 * row]
        total[row * num_stages + num_stages - 1] += layer[3 * row + 2]
    return sums
