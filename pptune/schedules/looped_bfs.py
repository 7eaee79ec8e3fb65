"""Breadth-first pipeline parallelism on looped stages (arXiv 2211.05953), as torch's
ScheduleLoopedBFS orders it: backwards take the micro-batches in reverse."""

from pptune.schedules.breadth_first import breadth_first_order
from pptune.schedules.order import Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("looped-bfs", shape, at_least=2)
    return breadth_first_order(shape, reverse_backwards=True)
