"""GPipe: all forwards, then all backwards; every rank holds M micro-batches (arXiv 1811.06965)."""

from pptune.schedules.breadth_first import breadth_first_order
from pptune.schedules.order import Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("gpipe", shape, exactly=1)
    return breadth_first_order(shape, reverse_backwards=False)
