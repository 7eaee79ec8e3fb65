"""Interleaved 1F1B with split backwards, as torch's ScheduleInterleavedZeroBubble orders it.

Warmup grows by 1 per hop instead of 2 (ZB1P, arXiv 2401.10241), and rank r's weight parts lag
behind by r.
"""

from pptune.schedules.looped import looped_order
from pptune.schedules.order import Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("interleaved-zb", shape, at_least=2)
    return looped_order(shape, warmup_per_hop=1, weight_lag=1)
