"""1F1B: one forward and one backward in turn, so that rank r holds min(P - r, M) micro-batches.

PipeDream-Flush, arXiv 2006.09503, section 3.2; bubble (P - 1)(t_f + t_b), arXiv 2104.04473,
section 2.2.1.
"""

from pptune.schedules.looped import looped_order
from pptune.schedules.order import Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("1f1b", shape, exactly=1)
    return looped_order(shape, warmup_per_hop=1)
