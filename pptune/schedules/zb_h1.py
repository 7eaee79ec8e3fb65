"""ZB-H1: 1F1B with split backwards at 1F1B's memory, a third of its bubble when F = I = W.

arXiv 2401.10241, section 3.1: weight parts fill the bubble at the end of the step; every rank holds
P micro-batches.
"""

from pptune.schedules.looped import looped_order
from pptune.schedules.order import Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("zb-h1", shape, exactly=1)
    return looped_order(shape, warmup_per_hop=1, weight_lag=1)
