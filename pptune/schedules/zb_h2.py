"""ZB-H2: no bubble between a rank's first and last action when F = I = W, at twice the memory.

arXiv 2401.10241, section 3.2: more forwards before the first backward and weight parts that lag
further behind; every rank holds 2 P - 1 micro-batches.
"""

from pptune.schedules.looped import looped_order
from pptune.schedules.order import Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("zb-h2", shape, exactly=1)
    return looped_order(shape, warmup_per_hop=2, weight_lag=2)
