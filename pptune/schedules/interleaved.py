"""Interleaved 1F1B: V stages per rank, bubble (P - 1)(t_f + t_b) / V.

arXiv 2104.04473, section 2.2.2. The micro-batch group size N is how many micro-batches a chunk runs
in a row: P in the paper, M // max(1, M // P) in torch's ScheduleInterleaved1F1B, an option in
Megatron-LM. Rank r holds up to (V - 1) N + 2 (P - 1 - r) + 1 stage-micro-batches.
"""

from pptune.schedules.looped import looped_order
from pptune.schedules.order import Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("interleaved", shape, at_least=2)
    return looped_order(shape, warmup_per_hop=2)
