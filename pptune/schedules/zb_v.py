"""ZB-V: two stages per rank in a V, so that rank 0 has the first and the last (arXiv 2401.10241,
section 6), as torch's ScheduleZBVZeroBubble orders it.

No bubble inside the step when F = I = W. An order of fewer than 2 P - 1 micro-batches is the one of
2 P - 1 with the others left out.
"""

from pptune.schedules import orders
from pptune.schedules.order import Cycle, Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("zb-v", shape, exactly=2)
    num_ranks, _, num_microbatches, _ = shape

    return Order(
        num_ranks=num_ranks,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        placement="v",
        make=lambda count: orders.zero_bubble_v(num_ranks, count),
        backwards="split",
        cycle=_cycle(num_ranks, num_microbatches),
    )


def _cycle(num_ranks: int, num_microbatches: int) -> Cycle | None:
    """The stable phase: forward, input and weight part of either stage, once per micro-batch."""
    count, rest = divmod(num_microbatches - (2 * num_ranks - 1), num_ranks)
    if count < 1:
        return None
    # Warmup of rank r: 2 (P - r) - 1 forwards, r pairs of forwards, P - r triples.
    return Cycle(num_ranks, 6 * num_ranks, 5 * num_ranks - 1 + 6 * rest, -3, count)
